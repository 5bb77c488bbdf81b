// Goal: thousands of connections that mean harm, to each port of a job that runs, change nothing:
// see hostile_job.h. Method: threads of plain sockets from eight loopback addresses, closed with a
// reset so that ports do not run out.
#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "tests/kvstore/dist/plain_socket.h"
#include "tests/tools/hostile_job.h"

namespace heddle::tools {
namespace {

using kvstore::dist_test::HeaderOf;
using kvstore::dist_test::PlainSocket;
using kvstore::dist_test::Preamble;
using namespace kvstore::dist;  // NOLINT(google-build-using-namespace)

constexpr std::size_t kHeldMax = 200;  // slow writers at a time, more than there is room for

class PlainAttacker : public Attacker {
 public:
  PlainAttacker(std::string address, const std::string& job_id, std::uint64_t seed)
      : address_(std::move(address)), recorded_(Record(address_, job_id)), random_(seed) {
    Message push;
    push.kind = Kind::kPush;
    push_ = HeaderOf(push);
    Message hello;
    hello.kind = Kind::kHello;
    huge_ = Preamble() + HeaderOf(hello);
  }

  void Run(long connections) override {
    for (long i = 0; i < connections; ++i) {
      auto socket = std::make_unique<PlainSocket>(address_, 2 + static_cast<int>(random_() % 8));
      socket->EndWithReset();
      switch (random_() % 6) {
        case 0:
          socket->Say(Noise(1 + random_() % 2000));
          break;
        case 1:  // half a handshake, or less
          socket->Say(recorded_.substr(0, random_() % recorded_.size()));
          break;
        case 2:
          socket->Say(HugeLength());
          break;
        case 3:  // at once
          ListenFor(*socket, recorded_ + push_);
          break;
        case 4:  // step by step
          socket->Say(recorded_.substr(0, recorded_.size() - kProofBytes));
          ListenFor(*socket, recorded_.substr(recorded_.size() - kProofBytes) + push_);
          break;
        default:
          held_.push_back(std::move(socket));
      }
      SayABit();
    }
  }
  bool got_in() const override { return got_in_; }

 private:
  static constexpr std::size_t kProofBytes = kHeaderBytes + 32;

  static std::string Record(const std::string& address, const std::string& job_id) {
    PlainSocket socket(address);
    return RecordHandshake(socket, job_id);
  }
  std::string Noise(std::size_t bytes) {
    std::string text(bytes, '\0');
    for (char& c : text) c = static_cast<char>(random_());
    return text;
  }
  std::string HugeLength() {
    std::string text = huge_;
    const bool of_meta = random_() % 2 == 0;  // docs/wire.md: 4 bytes at 4, or 8 bytes at 8
    text[kPreambleBytes + (of_meta ? 7 : 15)] = static_cast<char>(0x7f);
    return text + Noise(100);
  }
  // Slow writers: each says a byte now and then.
  void SayABit() {
    if (held_.empty()) return;
    held_[random_() % held_.size()]->Say(recorded_.substr(0, 1));
    if (held_.size() > kHeldMax) held_.pop_front();
  }
  void ListenFor(PlainSocket& socket, const std::string& said) {
    const bool begun = said.size() < recorded_.size();
    if (Has(Kind::kWelcome, AnswerTo(socket, said, begun))) got_in_ = true;
  }

  const std::string address_;
  const std::string recorded_;
  std::string push_, huge_;
  std::mt19937_64 random_;
  std::deque<std::unique_ptr<PlainSocket>> held_;
  bool got_in_ = false;
};

TEST(JobHostile, ManyConnectionsChangeNothing) {
  ExpectNoHarm(
      {},
      [](const auto& address, const auto& job_id, std::uint64_t seed) {
        return std::make_unique<PlainAttacker>(address, job_id, seed);
      },
      2000);
}

}  // namespace
}  // namespace heddle::tools
