// TLS: what the store takes beside what plain sockets and OpenSSL alone take together.
#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <openssl/evp.h>

#include "base/check.h"
#include "benchmarks/dist/contests.h"
#include "benchmarks/dist/host_sections.h"
#include "benchmarks/dist/job.h"
#include "benchmarks/dist/turns.h"
#include "tools/testing/test_certificates.h"

namespace heddle::bench_dist {
namespace {

// One side's share of an echo: all bytes are encrypted, and as many decrypted, in records, as
// TLS_AES_128_GCM_SHA256 has them; what is encrypted stays in the cache.
class RecordCipher {
 public:
  RecordCipher() {
    const std::array<unsigned char, 16> key{};
    const EVP_CIPHER* const cipher = EVP_aes_128_gcm();
    CHECK(EVP_EncryptInit_ex(encrypting_.get(), cipher, nullptr, key.data(), nullptr) == 1);
    CHECK(EVP_DecryptInit_ex(decrypting_.get(), cipher, nullptr, key.data(), nullptr) == 1);
  }

  void ThereAndBack(std::span<const std::byte> out, std::span<std::byte> in) {
    for (std::size_t at = 0; at < out.size(); at += kRecord) {
      Encrypt(out.subspan(at, kRecord));
      Decrypt(in.subspan(at, kRecord));
    }
  }

 private:
  static constexpr std::size_t kRecord = 16 << 10;
  static constexpr int kTag = 16;
  using Context = std::unique_ptr<EVP_CIPHER_CTX, decltype(&EVP_CIPHER_CTX_free)>;

  static const unsigned char* Bytes(const std::byte* bytes) {
    return reinterpret_cast<const unsigned char*>(bytes);
  }

  void Encrypt(std::span<const std::byte> record) {
    EVP_CIPHER_CTX* const to = encrypting_.get();
    const auto size = static_cast<int>(record.size());
    int done = 0;
    CHECK(EVP_EncryptInit_ex(to, nullptr, nullptr, nullptr, iv_.data()) == 1);
    CHECK(EVP_EncryptUpdate(to, nullptr, &done, head_.data(), head_.size()) == 1);
    CHECK(EVP_EncryptUpdate(to, encrypted_.data(), &done, Bytes(record.data()), size) == 1);
    CHECK(EVP_EncryptFinal_ex(to, encrypted_.data() + done, &done) == 1);
    CHECK(EVP_CIPHER_CTX_ctrl(to, EVP_CTRL_GCM_GET_TAG, kTag, tag_.data()) == 1);
  }
  void Decrypt(std::span<std::byte> record) {
    EVP_CIPHER_CTX* const from = decrypting_.get();
    auto* const to = reinterpret_cast<unsigned char*>(record.data());
    const auto size = static_cast<int>(record.size());
    int done = 0;
    CHECK(EVP_DecryptInit_ex(from, nullptr, nullptr, nullptr, iv_.data()) == 1);
    CHECK(EVP_DecryptUpdate(from, nullptr, &done, head_.data(), head_.size()) == 1);
    CHECK(EVP_DecryptUpdate(from, to, &done, encrypted_.data(), size) == 1);
    CHECK(EVP_CIPHER_CTX_ctrl(from, EVP_CTRL_GCM_SET_TAG, kTag, tag_.data()) == 1);
    CHECK(EVP_DecryptFinal_ex(from, to + done, &done) == 1);
  }

  const Context encrypting_{EVP_CIPHER_CTX_new(), &EVP_CIPHER_CTX_free};
  const Context decrypting_{EVP_CIPHER_CTX_new(), &EVP_CIPHER_CTX_free};
  const std::array<unsigned char, 12> iv_{};
  const std::array<unsigned char, 5> head_{};  // a record's header, which is authenticated
  std::array<unsigned char, kRecord> encrypted_{};
  std::array<unsigned char, kTag> tag_{};
};

}  // namespace

void MeasureTls(bench::BarReport& report, bool quick) {
  tools::TestCertificates certificates;
  const Job job({.tls = certificates.right()});
  PlainPeers plain(kSystemKinds);
  const std::unique_ptr<Worker> worker = job.Join();
  job.Pin(1);
  plain.Pin(1);
  PinThisProcess(0);
  plain.Connect();
  RecordCipher cipher;
  const std::vector<std::byte> out(kLong);
  std::vector<std::byte> in(kLong);
  std::vector<Contender> contenders = {{.name = "heddle", .operation = PushPullOf(*worker, kLong)}};
  plain.AddTo(contenders, out, in);
  contenders.push_back({.name = "AES-128-GCM", .operation = [&] { cipher.ThereAndBack(out, in); }});
  TakeTurns(contenders, {.rounds = quick ? 3 : 15, .operations = 2});
  const Contender alone = std::move(contenders.back());
  contenders.pop_back();
  const Contender& echo = BestOf(std::span(contenders).subspan(1));
  // Both sides encrypt and decrypt, each on its CPU.
  std::vector<double> together;
  for (std::size_t i = 0; i < alone.figures.size(); ++i) {
    together.push_back(echo.figures[i] + alone.figures[i]);
  }
  AddBar(report, {.what = "pushpull of 64 MiB over TCP with TLS, on a CPU each",
                  .unit = "us",
                  .ours = contenders[0].figures,
                  .against = fmt::format("{}, and {:.0f} us of AES-128-GCM by OpenSSL", echo.name,
                                         bench::Median(alone.figures)),
                  .theirs = together,
                  .most = 1 / 0.8});
}

}  // namespace heddle::bench_dist
