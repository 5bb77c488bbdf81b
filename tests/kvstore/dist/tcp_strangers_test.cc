// Goal: bytes of strangers, and bad bytes of peers, end a connection with an answer where one can
// be read, and harm nobody else. Method: plain sockets against a listening transport that serves a
// worker all the while.
#include <heddle/logging.h>

#include <mutex>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/sanitizers.h"
#include "kvstore/dist/transport/tcp/handshake.h"
#include "tests/kvstore/dist/no_descriptors.h"
#include "tests/kvstore/dist/plain_socket.h"
#include "tests/kvstore/dist/random_bodies.h"
#include "tests/kvstore/dist/tcp_node.h"

namespace heddle::kvstore::dist_test {
namespace {

using namespace dist;  // NOLINT(google-build-using-namespace)
using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;
using testing::IsEmpty;

class TcpStrangers : public testing::Test {
 protected:
  TcpStrangers() : TcpStrangers(Options()) {}
  explicit TcpStrangers(TcpOptions options) : server(options), worker(OptionsOf(kWorker0)) {
    server.answer = [this](NodeId from, const Message& message) {
      Message value = message;
      value.kind = Kind::kValue;
      server.transport->Send(from, std::move(value));
    };
    worker.transport->Connect(kServer0, address(), Long());
  }
  ~TcpStrangers() override { ExpectService(); }

  static TcpOptions Options() { return OptionsOf(kServer0, Reception::kThread); }
  std::string address() const { return server.transport->address(); }
  // The worker is still served.
  void ExpectService() {
    Message push;
    push.kind = Kind::kPush;
    push.payload = PayloadOf(std::string(100'000, 'x'));
    worker.transport->Send(kServer0, push);
    EXPECT_TRUE(worker.WaitForMessages(++served_));
    EXPECT_TRUE(worker.Lost().empty());
  }

  TcpNode server;
  TcpNode worker;

 private:
  std::size_t served_ = 0;
};

TEST_F(TcpStrangers, ABrowserIsAnswered) {
  PlainSocket browser(address());
  browser.Say("GET /index.html HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_THAT(browser.HearAll(), HasSubstr("heddle"));
}

TEST_F(TcpStrangers, AnotherVersionIsToldSo) {
  PlainSocket stranger(address());
  std::string preamble = Preamble();
  ++preamble[4];
  stranger.Say(preamble);
  EXPECT_THAT(stranger.HearAll(), HasSubstr("version"));
}

TEST_F(TcpStrangers, AnotherJobIsToldSo) {
  PlainSocket stranger(address());
  Handshake handshake = Handshake::Connecting(
      {.node = {Role::kWorker, 3}, .incarnation = 5, .job_id = "other", .token = ""},
      Link::kUrgent);
  stranger.Say(handshake.Start());
  EXPECT_THAT(stranger.HearAll(), HasSubstr("wrong job"));
}

TEST_F(TcpStrangers, MessagesBeforeTheHandshakeAreRefused) {
  PlainSocket stranger(address());
  Message push;
  push.kind = Kind::kHeartbeat;
  stranger.Say(Preamble() + HeaderOf(push));
  EXPECT_THAT(stranger.HearAll(), HasSubstr("expected a hello"));
}

TEST_F(TcpStrangers, RandomBytesEndTheConnection) {
  std::mt19937_64 random(TestSeed());
  for (int i = 0; i < 60; ++i) {
    PlainSocket stranger(address());
    std::string bytes = i % 2 == 0 ? Preamble() : "";
    for (int j = 0; j < 300; ++j) bytes += static_cast<char>(random());
    stranger.Say(bytes);
    EXPECT_LE(stranger.HearAll().size(), 1000u);
  }
  EXPECT_EQ(server.Received().size(), 0u);
}

// 2^63 bytes are announced by one who belongs to the job.
TEST_F(TcpStrangers, AbsurdLengthsEndTheConnectionAndAreNamed) {
  for (const std::size_t at : {std::size_t{8}, std::size_t{4}}) {  // payload_bytes, meta_bytes
    const auto before = server.Lost().size();
    PlainSocket peer(address());
    peer.ShakeHands(7, "test");
    Message push;
    push.kind = Kind::kPush;
    std::string header = HeaderOf(push);
    for (std::size_t i = at; i < at + 4; ++i) header[i] = '\0';
    header[at + (at == 8 ? 7 : 3)] = static_cast<char>(0x80);
    peer.Say(header);
    const char* const wrong = at == 8 ? "9223372036854775808 bytes of payload" : "bytes of meta";
    EXPECT_THAT(peer.HearAll(), AllOf(HasSubstr("you sent"), HasSubstr(wrong)));
    ASSERT_TRUE(server.WaitFor([&] { return server.lost.size() > before; }));
    EXPECT_EQ(server.Lost().back().peer, (NodeId{Role::kWorker, 7}));
    EXPECT_THAT(server.Lost().back().why, HasSubstr(wrong));
  }
}

// 4 GiB are within the limits; memory is taken as bytes come.
TEST_F(TcpStrangers, AnnouncedBytesCostNothingUntilTheyCome) {
  PlainSocket peer(address());
  peer.ShakeHands(7, "test", Link::kBulk);
  Message push;
  push.kind = Kind::kPush;
  std::string header = HeaderOf(push);
  header[12] = 1;  // of payload_bytes, bit 32
  peer.Say(header + std::string(100'000, 'x'));
  ExpectService();
}

TEST_F(TcpStrangers, BadBytesOfAPeerAreNamed) {
  std::mt19937_64 random(TestSeed());
  for (int i = 0; i < 30; ++i) {
    const auto before = server.Lost().size();
    {
      PlainSocket peer(address());
      peer.ShakeHands(7, "test", i % 2 == 0 ? Link::kUrgent : Link::kBulk);
      std::string bytes;
      for (int j = 0; j < 200; ++j) bytes += static_cast<char>(random());
      bytes[0] = static_cast<char>(0xff);  // a kind that there is not
      peer.Say(bytes);
      EXPECT_THAT(peer.HearAll(), HasSubstr("you sent a message of unknown kind 255"));
    }
    ASSERT_TRUE(server.WaitFor([&] { return server.lost.size() > before; }));
    EXPECT_THAT(server.Lost().back().why, HasSubstr("unknown kind 255"));
  }
}

TEST_F(TcpStrangers, AnEndInTheMiddleOfAMessageIsNamed) {
  {
    PlainSocket peer(address());
    peer.ShakeHands(7, "test");
    Message push;
    push.kind = Kind::kPush;
    push.payload = PayloadOf("12345");
    peer.Say(HeaderOf(push) + "123");
  }
  ASSERT_TRUE(server.WaitForLoss());
  EXPECT_THAT(server.Lost()[0].why, HasSubstr("in the middle of a message"));
}

class TcpStrangersLimited : public TcpStrangers {
 protected:
  TcpStrangersLimited() : TcpStrangers(LimitedOptions()) {}
  static TcpOptions LimitedOptions() {
    TcpOptions options = Options();
    options.handshake_limit = std::chrono::milliseconds(200);
    options.strangers_max = 3;
    return options;
  }
};

TEST_F(TcpStrangersLimited, WhoSaysNothingIsTurnedAway) {
  PlainSocket silent(address());
  EXPECT_EQ(silent.HearAll(), "");
  PlainSocket slow(address());
  slow.Say(Preamble().substr(0, 10));
  EXPECT_EQ(slow.HearAll(), "");
}

// More of them than there may be are closed at once, those that there are after their time; then
// there is room again.
TEST_F(TcpStrangersLimited, StrangersAreFew) {
  std::vector<std::unique_ptr<PlainSocket>> strangers;
  for (int i = 0; i < 20; ++i) strangers.push_back(std::make_unique<PlainSocket>(address()));
  for (const auto& stranger : strangers) EXPECT_EQ(stranger->HearAll(), "");
  EXPECT_EQ(server.transport->stats().strangers_refused, 20u);
  TcpNode late(OptionsOf({Role::kWorker, 1}));
  late.transport->Connect(kServer0, address(), Long());
}

class TcpStrangersCrowded : public TcpStrangers {
 protected:
  TcpStrangersCrowded() : TcpStrangers(CrowdedOptions()) {}
  static TcpOptions CrowdedOptions() {
    TcpOptions options = Options();
    options.handshake_limit = std::chrono::minutes(10);
    options.strangers_max = 3;
    return options;
  }
  // Comes back when it has been accepted.
  static void BeginHandshake(PlainSocket& stranger) {
    stranger.Say(Handshake::Connecting(
                     {.node = {Role::kWorker, 3}, .incarnation = 5, .job_id = "test", .token = ""},
                     Link::kBulk)
                     .Start());
    EXPECT_EQ(stranger.Hear(kPreambleBytes), Preamble());
  }
};

// Three of one host, which say nothing, stand in the way of one that has just come from another:
// the oldest of them goes.
TEST_F(TcpStrangersCrowded, AHostCannotKeepOthersOut) {
  PlainSocket first(address(), 2);
  PlainSocket second(address(), 2);
  PlainSocket third(address(), 2);
  PlainSocket honest(address(), 3);
  EXPECT_EQ(first.HearAll(), "");
  honest.ShakeHands(7, "test");
  EXPECT_EQ(server.transport->stats().strangers_refused, 1u);
}

// The same from one host: who is in the midst of a handshake stays for a while, then goes.
TEST_F(TcpStrangersCrowded, WhoTakesLongGoesWhenOthersWait) {
  PlainSocket first(address());
  PlainSocket second(address());
  PlainSocket third(address());
  const auto begin = TestClock::now();
  TcpNode late(OptionsOf({Role::kWorker, 1}));
  late.transport->Connect(kServer0, address(), Long());  // tries again until then
  EXPECT_GE(TestClock::now() - begin, std::chrono::milliseconds(900));
  EXPECT_EQ(first.HearAll(), "");
}

// Collects what is logged while it lives.
class LogLines {
 public:
  LogLines() {
    SetLogSink([this](LogLevel, std::string_view line) {
      const std::lock_guard lock(mutex_);
      lines_.emplace_back(line);
    });
  }
  ~LogLines() { SetLogSink({}); }
  std::vector<std::string> Take() {
    const std::lock_guard lock(mutex_);
    return std::move(lines_);
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

TEST_F(TcpStrangersCrowded, TheLogStaysShort) {
  LogLines log;
  constexpr std::uint64_t kStrangers = 500;
  for (std::uint64_t i = 0; i < kStrangers; ++i) {
    PlainSocket stranger(address());
    stranger.Say("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    stranger.HearAll();
  }
  EXPECT_EQ(server.transport->stats().strangers_refused, kStrangers);
  const std::vector<std::string> lines = log.Take();
  EXPECT_GE(lines.size(), 20u);
  EXPECT_LT(lines.size(), kStrangers / 4);
}

// Fewer than there may be have all descriptors: the oldest goes all the same, once it has had time
// for its handshake.
TEST_F(TcpStrangersCrowded, WhoHasTheLastDescriptorGoesWhenOthersWait) {
  // To look at a virtual table that sanitizer wants a pipe.
  if (kAddressSanitizer) GTEST_SKIP() << "the sanitizer needs a descriptor itself";
  PlainSocket first(address());
  PlainSocket second(address());
  for (PlainSocket* const stranger : {&first, &second}) BeginHandshake(*stranger);
  LogLines log;
  DescriptorsInUse in_use;
  in_use.GiveOneBack();
  PlainSocket late(address());
  late.ShakeHands(7, "test");
  EXPECT_EQ(server.transport->stats().strangers_refused, 1u);
  first.HearAll();
  const std::vector<std::string> lines = log.Take();
  EXPECT_THAT(lines, Contains(AllOf(HasSubstr("refused the connection from 127.0.0.1:"),
                                    HasSubstr("Too many open files"))));
}

// Nor do those who wait for a descriptor cause more lines than others.
TEST_F(TcpStrangersCrowded, TheLogStaysShortWithoutDescriptors) {
  // To look at a virtual table that sanitizer wants a pipe.
  if (kAddressSanitizer) GTEST_SKIP() << "the sanitizer needs a descriptor itself";
  constexpr int kLinesMax = 20;
  const auto begin = TestClock::now();
  for (int i = 0; i < kLinesMax; ++i) {
    PlainSocket stranger(address());
    stranger.Say("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    stranger.HearAll();
  }
  PlainSocket first(address());
  BeginHandshake(first);
  LogLines log;
  DescriptorsInUse in_use;
  in_use.GiveOneBack();
  PlainSocket late(address());
  late.ShakeHands(7, "test");
  if (TestClock::now() - begin < std::chrono::seconds(10)) {
    EXPECT_THAT(log.Take(), IsEmpty());
  }
}

// A listener that never answers, as connecting nodes see it.
TEST(TcpSilentListener, IsNamedAtTheDeadline) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in here{};
  here.sin_family = AF_INET;
  here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof here;
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&here), length), 0);
  ASSERT_EQ(listen(listener, 5), 0);
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&here), &length), 0);
  TcpNode worker(OptionsOf(kWorker0));
  try {
    worker.transport->Connect(kServer0, "127.0.0.1:" + std::to_string(ntohs(here.sin_port)),
                              In(std::chrono::milliseconds(200)));
    ADD_FAILURE();
  } catch (const TimeoutError& error) {
    EXPECT_THAT(error.what(), HasSubstr("it listens, but has not answered"));
  }
  close(listener);
}

}  // namespace
}  // namespace heddle::kvstore::dist_test
