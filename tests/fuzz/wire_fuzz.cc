#include "tests/fuzz/wire_fuzz.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include <sys/uio.h>

#include "base/check.h"
#include "kvstore/dist/protocol/wire.h"
#include "kvstore/dist/transport/tcp/buffer_pool.h"
#include "kvstore/dist/transport/tcp/handshake.h"
#include "kvstore/dist/transport/tcp/receiver.h"

namespace heddle::fuzz {
namespace {

using namespace kvstore::dist;       // NOLINT(google-build-using-namespace)
using namespace kvstore::dist_test;  // NOLINT(google-build-using-namespace)

enum Reader : std::uint8_t { kBody, kStream, kAccepting, kConnecting, kReaders };

constexpr WireLimits kLimits = {.meta_bytes_max = 1 << 16, .payload_bytes_max = 1 << 16};

std::span<const std::byte> Bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// What decodes is what an honest sender could have sent: it encodes to the same bytes.
void ReadBody(std::size_t type, std::string_view meta) {
  std::string again;
  if (BodyTypes()[type % BodyTypes().size()].recode(meta, &again)) CHECK(again == meta);
}

// The whole stream at once, as plainly as can be: the oracle of ReadStream.
struct Expected {
  std::vector<std::string> messages;
  bool wrong = false;
};

Expected ReadAtOnce(std::string_view stream) {
  Expected expected;
  while (stream.size() >= kHeaderBytes) {
    Message message;
    std::uint32_t meta_bytes = 0;
    std::uint64_t payload_bytes = 0;
    const std::string wrong = DecodeHeader(Bytes(stream).first<kHeaderBytes>(), kLimits, &message,
                                           &meta_bytes, &payload_bytes);
    if (!wrong.empty()) {
      expected.wrong = true;
      break;
    }
    CHECK(meta_bytes <= kLimits.meta_bytes_max && payload_bytes <= kLimits.payload_bytes_max);
    const std::uint64_t size = kHeaderBytes + meta_bytes + payload_bytes;
    if (stream.size() < size) break;
    expected.messages.emplace_back(stream.substr(0, size));
    stream.remove_prefix(size);
  }
  return expected;
}

void ReadStream(std::size_t piece, std::size_t header_read, std::string_view stream) {
  const Expected expected = ReadAtOnce(stream);
  static const std::shared_ptr<BufferPool> pool = BufferPool::Create(1 << 20);
  std::vector<std::string> got;
  Receiver receiver(pool, kLimits, header_read,
                    {.land = [](const Message&, std::uint64_t) { return nullptr; },
                     .deliver =
                         [&](Message message) {
                           got.push_back(EncodeMessage(message));
                           return true;
                         }},
                    [](const Message&, std::uint64_t) {});
  bool wrong = false;
  while (!stream.empty() && !wrong) {
    std::array<iovec, 8> runs;
    const std::size_t count = receiver.Prepare(runs.data(), runs.size());
    CHECK(count > 0 && count <= runs.size());
    std::size_t read = 0;
    for (const iovec& run : std::span(runs).first(count)) {
      const std::size_t bytes = std::min({run.iov_len, piece - read, stream.size()});
      std::memcpy(run.iov_base, stream.data(), bytes);
      stream.remove_prefix(bytes);
      read += bytes;
    }
    CHECK(read > 0, "it wants no bytes");
    wrong = !receiver.Commit(read).empty();
  }
  CHECK(wrong == expected.wrong);
  CHECK(got == expected.messages);
}

void ShakeHands(Handshake handshake, std::size_t piece, std::string_view bytes) {
  std::string sent = handshake.Start();
  while (handshake.state() == Handshake::State::kGoing && !bytes.empty()) {
    const std::size_t wanted = handshake.wanted();
    CHECK(wanted > 0 && wanted <= Handshake::kBytesMax);
    const std::string_view taken = bytes.substr(0, std::min(piece, wanted));
    sent += handshake.Feed(Bytes(taken));
    bytes.remove_prefix(taken.size());
  }
  // Nobody guesses the proof, which depends on a nonce.
  CHECK(handshake.state() == Handshake::State::kGoing ||
        handshake.state() == Handshake::State::kFailed);
  CHECK((handshake.state() == Handshake::State::kFailed) == !handshake.why().empty());
  CHECK(sent.size() <= Handshake::kBytesMax, "{} bytes in answer", sent.size());
}

std::string Input(Reader reader, std::uint8_t piece, const std::string& bytes) {
  return std::string{static_cast<char>(reader), static_cast<char>(piece)} + bytes;
}

}  // namespace

void ReadWire(const std::uint8_t* input, std::size_t bytes) {
  if (bytes < 2) return;
  const std::string_view rest(reinterpret_cast<const char*>(input) + 2, bytes - 2);
  const std::size_t piece = input[1] + std::size_t{1};
  static const Identity self = {{Role::kScheduler, 0}, 7, "job", "token"};
  switch (input[0] % kReaders) {
    case kBody:
      return ReadBody(input[1], rest);
    case kStream:
      return ReadStream(
          piece, std::array{kHeaderBytes, std::size_t{512}, Receiver::kBufferBytes}[input[1] % 3],
          rest);
    case kAccepting:
      return ShakeHands(Handshake::Accepting(self), piece, rest);
    case kConnecting:
      return ShakeHands(Handshake::Connecting(self, Link::kUrgent), piece, rest);
  }
}

std::vector<std::string> HonestInputs(Random& random) {
  std::vector<std::string> inputs;
  for (std::size_t i = 0; i < BodyTypes().size(); ++i) {
    for (int round = 0; round < 4; ++round) {
      inputs.push_back(Input(kBody, static_cast<std::uint8_t>(i), BodyTypes()[i].random(random)));
    }
  }
  for (int round = 0; round < 60; ++round) {
    std::string stream;
    for (std::uint64_t i = Below(random, 5); i > 0; --i) {
      stream += EncodeMessage(RandomMessage(random));
    }
    inputs.push_back(Input(kStream, static_cast<std::uint8_t>(random()), stream));
  }
  for (int round = 0; round < 10; ++round) {
    const Identity peer = {{Role::kWorker, -1}, random(), "job", "token"};
    Handshake connecting = Handshake::Connecting(peer, Link::kUrgent);
    Handshake accepting = Handshake::Accepting(peer);
    std::string hello = connecting.Start(), challenge, proof;
    const auto feed = [](Handshake& to, std::string_view bytes) {
      std::string answer;
      while (!bytes.empty() && to.wanted() > 0) {
        const std::size_t count = std::min(to.wanted(), bytes.size());
        answer += to.Feed(Bytes(bytes.substr(0, count)));
        bytes.remove_prefix(count);
      }
      return answer;
    };
    challenge = feed(accepting, hello);
    proof = feed(connecting, challenge);
    feed(accepting, proof);
    CHECK(accepting.state() == Handshake::State::kAdmit);
    const std::string welcome = accepting.Admit();
    const auto piece = static_cast<std::uint8_t>(random());
    inputs.push_back(Input(kAccepting, piece, hello + proof));
    inputs.push_back(Input(kConnecting, piece, challenge + welcome));
  }
  inputs.push_back(Input(kAccepting, 0, "GET / HTTP/1.1\r\nHost: a\r\n\r\n"));
  inputs.push_back(Input(kAccepting, 255, "\x16\x03\x01 and so on, in TLS"));
  return inputs;
}

}  // namespace heddle::fuzz
