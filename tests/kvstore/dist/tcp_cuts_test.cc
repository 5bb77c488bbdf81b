// Goal: a connection that is cut is made again as long as the peer is the same process, and nothing
// is lost or doubled by that (tcp_transport.h); else the peer is lost, as soon as that is known.
// Method: a worker and a server with a proxy between them that resets what it carries.
// TcpRandom.WhereConnectionsAreCutNothingIsLostOrDoubled has random cuts, with and without TLS.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/sanitizers.h"
#include "kvstore/dist/protocol/wire.h"
#include "kvstore/dist/transport/shm/meeting.h"
#include "kvstore/dist/transport/tcp/confirm_watch.h"
#include "kvstore/dist/transport/tcp/handshake.h"
#include "kvstore/dist/transport/tcp/send_queue.h"
#include "kvstore/dist/transport/tcp/tcp_peer.h"
#include "tests/kvstore/dist/cutting_proxy.h"
#include "tests/kvstore/dist/no_descriptors.h"
#include "tests/kvstore/dist/plain_socket.h"
#include "tests/kvstore/dist/random_bodies.h"
#include "tests/kvstore/dist/tcp_node.h"

namespace heddle::kvstore::dist_test {
namespace {

using namespace dist;  // NOLINT(google-build-using-namespace)
using std::chrono::milliseconds;
using testing::HasSubstr;

constexpr std::size_t kLong = 300'000;  // goes by the bulk link
constexpr milliseconds kForever{600'000};

TcpOptions Options(NodeId self, milliseconds cut_limit, Reception reception = Reception::kThread) {
  TcpOptions options = OptionsOf(self, reception);
  options.shared_memory = false;
  options.token = "secret";
  options.cut_limit = cut_limit;
  return options;
}

Message Numbered(std::uint64_t number, std::size_t bytes) {
  Message message;
  message.kind = Kind::kPush;
  message.sequence = number;
  message.payload = PayloadOf(std::string(bytes, static_cast<char>('a' + number % 26)));
  return message;
}

struct CutEnds {
  explicit CutEnds(milliseconds cut_limit, Reception reception_of_server = Reception::kThread)
      : server(Options(kServer0, cut_limit, reception_of_server)),
        proxy(server.transport->address()),
        worker(Options(kWorker0, cut_limit)) {}
  void Connect() { worker.transport->Connect(kServer0, proxy.address(), Long()); }
  // Short and long ones, both ways.
  void SendSome() {
    for (int i = 0; i < 4; ++i, ++sent) {
      const std::size_t bytes = i % 2 == 0 ? 100 : kLong;
      worker.transport->Send(kServer0, Numbered(sent, bytes));
      server.transport->Send(kWorker0, Numbered(sent, bytes));
    }
    worker.transport->Flush();
    server.transport->Flush();
  }
  // All that was sent has come once, as it was, and nobody was lost.
  void ExpectAll() {
    for (TcpNode* node : {&worker, &server}) {
      ASSERT_TRUE(node->WaitForMessages(sent));
      std::vector<std::uint64_t> numbers;
      for (const auto& [from, message] : node->Received()) {
        numbers.push_back(message.sequence);
        const Message expected = Numbered(message.sequence, message.payload.bytes());
        EXPECT_EQ(TextOf(message.payload), TextOf(expected.payload));
      }
      std::sort(numbers.begin(), numbers.end());
      for (std::uint64_t i = 0; i < sent; ++i) EXPECT_EQ(numbers[i], i);
      EXPECT_EQ(numbers.size(), sent);
      EXPECT_TRUE(node->Lost().empty()) << node->Lost()[0].why;
    }
  }

  TcpNode server;
  CuttingProxy proxy;
  TcpNode worker;
  std::uint64_t sent = 0;
};

TEST(TcpCuts, AnIdleConnectionThatWasCutGoesOn) {
  CutEnds ends(kForever);
  ends.Connect();
  for (int i = 0; i < 3; ++i) {
    ends.SendSome();
    ends.ExpectAll();
    ends.proxy.Cut();
  }
  ends.SendSome();
  ends.ExpectAll();
  EXPECT_EQ(ends.proxy.cuts(), 6);  // two links, three times
}

TEST(TcpCuts, WhatIsSentDuringACutComesAfterIt) {
  CutEnds ends(kForever);
  ends.Connect();
  ends.SendSome();
  ends.proxy.GoDown();
  ends.proxy.Cut();
  ends.SendSome();
  ends.proxy.GoUp();
  ends.ExpectAll();
}

// As by a firewall that has forgotten a connection, when what is idle at the connecting end is used
// by the other one. Which can only wait to be connected with: the connecting end has to notice.
TEST(TcpCuts, AResetThatOnlyTheAcceptingEndSeesIsMendedToo) {
  CutEnds ends(milliseconds(4000));
  ends.Connect();
  ends.SendSome();
  ends.ExpectAll();
  ends.proxy.CutTowardsTarget();
  for (int i = 0; i < 4; ++i, ++ends.sent) {
    ends.server.transport->Send(kWorker0, Numbered(ends.sent, i % 2 == 0 ? 100 : kLong));
  }
  ends.server.transport->Flush();
  ASSERT_TRUE(ends.worker.WaitForMessages(ends.sent));
  EXPECT_TRUE(ends.server.Lost().empty());
  EXPECT_TRUE(ends.worker.Lost().empty());
}

TEST(TcpCuts, CutForTooLongThePeerIsLost) {
  CutEnds ends(milliseconds(200));
  ends.Connect();
  ends.SendSome();
  ends.ExpectAll();
  ends.proxy.GoDown();
  ends.proxy.Cut();
  ASSERT_TRUE(ends.worker.WaitForLoss());
  ASSERT_TRUE(ends.server.WaitForLoss());
  EXPECT_EQ(ends.worker.Lost()[0].peer, kServer0);
  EXPECT_EQ(ends.server.Lost()[0].peer, kWorker0);
  EXPECT_THAT(ends.server.Lost()[0].why, HasSubstr("Connection reset by peer"));
  EXPECT_THAT(ends.server.Lost()[0].why, HasSubstr("not connected again for 0.2 s"));
  EXPECT_THAT(ends.worker.Lost()[0].why, HasSubstr("Connection reset by peer"));
}

TEST(TcpCuts, WithoutDescriptorsToConnectAgainThePeerIsLost) {
  if (kAddressSanitizer) GTEST_SKIP() << "the sanitizer's checks need descriptors themselves";
  CutEnds ends(milliseconds(200));
  ends.Connect();
  ends.SendSome();
  ends.ExpectAll();
  const NoDescriptors none;
  ends.proxy.Cut();
  ASSERT_TRUE(ends.worker.WaitForLoss());
  EXPECT_EQ(ends.worker.Lost()[0].peer, kServer0);
  EXPECT_EQ(ends.worker.Lost()[0].address, ends.proxy.address());
  EXPECT_THAT(ends.worker.Lost()[0].why, HasSubstr("Connection reset by peer"));
}

// No limit, so it cannot be what ends the wait.
TEST(TcpCuts, WhereNobodyListensAnyMoreThePeerIsLostAtOnce) {
  CutEnds ends(kForever);
  ends.Connect();
  ends.proxy.StopListening();
  ends.proxy.Cut();
  ASSERT_TRUE(ends.worker.WaitForLoss());
  EXPECT_THAT(ends.worker.Lost()[0].why, HasSubstr("Connection refused"));
}

TEST(TcpCuts, AnotherProcessIsNotTakenForThePeer) {
  CutEnds ends(kForever);
  ends.Connect();
  ends.SendSome();
  ends.ExpectAll();
  TcpOptions options = Options(kServer0, kForever);
  options.incarnation = 77;
  TcpNode restarted(options);
  ends.proxy.Redirect(restarted.transport->address());
  ends.proxy.Cut();
  ASSERT_TRUE(ends.worker.WaitForLoss());
  EXPECT_THAT(ends.worker.Lost()[0].why, HasSubstr("not known here any more"));
  EXPECT_TRUE(restarted.Received().empty());
  EXPECT_TRUE(restarted.connected.empty());
}

// Who knows the peer's incarnation but not the token gets nothing, and harms nobody.
TEST(TcpCuts, WithoutTheTokenNobodyTakesAConnectionOver) {
  CutEnds ends(kForever);
  ends.Connect();
  ends.SendSome();
  ends.ExpectAll();
  const TcpOptions of_worker = Options(kWorker0, kForever);
  for (const char* token : {"", "wrong"}) {
    Handshake handshake = Handshake::Connecting(
        {.node = kWorker0, .incarnation = of_worker.incarnation, .job_id = "test", .token = token},
        Link::kUrgent, {}, 0);
    PlainSocket stranger(ends.server.transport->address());
    stranger.Say(handshake.Start());
    while (handshake.wanted() > 0) {
      const std::string heard = stranger.Hear(handshake.wanted());
      if (heard.empty()) break;
      stranger.Say(handshake.Feed(std::as_bytes(std::span(heard))));
    }
    EXPECT_EQ(handshake.state(), Handshake::State::kFailed);
    EXPECT_THAT(handshake.why(), HasSubstr("token"));
  }
  ends.SendSome();
  ends.ExpectAll();
  EXPECT_EQ(ends.proxy.cuts(), 0);
}

// The server does not read: all bytes have left the worker, and none has arrived for good.
TEST(TcpCuts, WhatWasRevokedAfterItWasSentComesAsItWas) {
  CutEnds ends(kForever, Reception::kCallersOnly);
  std::atomic<bool> connected = false;
  std::thread connecting([&] {
    ends.Connect();
    connected = true;
  });
  ASSERT_TRUE(ends.server.WaitFor([&] { return connected.load(); }));
  connecting.join();
  auto memory = std::make_shared<std::string>(kLong, 'a');
  Message message = Numbered(0, 0);
  message.payload = Payload(nullptr, std::as_bytes(std::span(*memory)));
  const Transport::SendId id = ends.worker.transport->Send(kServer0, message);
  ASSERT_TRUE(
      ends.worker.WaitFor([&] { return ends.worker.transport->stats().bytes_sent >= kLong; }));
  EXPECT_NE(ends.worker.transport->Revoke(kServer0, id), Revoked::kDropped);
  std::fill(memory->begin(), memory->end(), '!');
  memory.reset();
  ends.proxy.Cut();
  ASSERT_TRUE(ends.server.WaitForMessages(1));
  EXPECT_EQ(TextOf(ends.server.Received()[0].second.payload), std::string(kLong, 'a'));
}

// Given up in the midst of a payload, which then is cut and comes again: the memory stays as it is,
// and what follows is whole.
TEST(TcpCuts, ALandingThatIsGivenUpMidwayIsLeftAlone) {
  constexpr std::size_t kVeryLong = 24 << 20;  // no socket buffers as much
  CutEnds ends(kForever);
  auto landing = std::make_shared<TestLanding>(kVeryLong, 100'000);
  landing->revoked_after = 1;
  std::atomic<int> headers = 0;
  ends.worker.land = [&](NodeId, const Message& header, std::uint64_t) -> std::shared_ptr<Landing> {
    if (header.sequence != 1) return nullptr;
    return headers++ == 0 ? landing : nullptr;
  };
  ends.Connect();
  ends.server.transport->Send(kWorker0, Numbered(1, kVeryLong));
  ASSERT_TRUE(ends.worker.WaitFor([&] { return landing->reads.load() == 1; }));
  ends.proxy.Cut();
  ends.server.transport->Send(kWorker0, Numbered(2, kLong));
  const auto second_came = [&] {
    return std::any_of(ends.worker.received.begin(), ends.worker.received.end(),
                       [](const auto& entry) { return entry.second.sequence == 2; });
  };
  ASSERT_TRUE(ends.worker.WaitFor(second_came));
  EXPECT_EQ(landing->reads, 1);
  EXPECT_EQ(landing->text().back(), '?');
  EXPECT_TRUE(ends.worker.Lost().empty());
}

// A process of the job, worker 0 to the server, that does what the test says.
struct Rogue {
  explicit Rogue(TcpNode& server) : socket(server.transport->address()) {
    socket.ShakeHands(0, "test", Link::kBulk, "secret");
    EXPECT_TRUE(server.WaitFor([&] { return !server.connected.empty(); }));
  }
  void Hear(std::size_t messages, std::size_t bytes) {
    for (std::size_t i = 0; i < messages; ++i) {
      ASSERT_EQ(socket.Hear(kHeaderBytes + bytes).size(), kHeaderBytes + bytes);
    }
  }
  void Confirm(std::uint64_t messages) {
    socket.Say(EncodeMessage({.kind = Kind::kReceived, .sequence = messages}));
  }

  PlainSocket socket;
};

// A process of the job that reads and never says so: what it was sent is kept for it, so it is sent
// no more than a bound, until it does.
TEST(TcpCuts, APeerThatDoesNotConfirmIsSentNoMoreThanABound) {
  constexpr std::size_t kBytes = 1 << 20;
  constexpr std::size_t kBefore = SendQueue::kRetainedMax / kBytes;  // that the bound lets pass
  constexpr std::size_t kMessages = kBefore + 30;
  const std::string memory(kBytes, 'a');
  std::atomic<std::size_t> kept = 0;
  TcpNode server(Options(kServer0, kForever));
  Rogue rogue(server);
  for (std::size_t i = 0; i < kMessages; ++i) {
    Message message = Numbered(i, 0);
    ++kept;
    const std::shared_ptr<const void> owner(memory.data(), [&kept](const void*) { --kept; });
    message.payload = Payload(owner, std::as_bytes(std::span(memory)));
    server.transport->Send(kWorker0, std::move(message));
  }
  rogue.Hear(kBefore, kBytes);
  // What was begun when the bound was passed is completed.
  EXPECT_LE(server.transport->stats().bytes_sent, (kBefore + 2) * (kHeaderBytes + kBytes));
  EXPECT_EQ(kept, kMessages);
  rogue.Confirm(kBefore);
  rogue.Hear(kMessages - kBefore, kBytes);
  EXPECT_TRUE(server.WaitFor([&] { return kept <= kMessages - kBefore; }));
}

constexpr milliseconds kConfirmLimit{400};

TcpOptions ImpatientServer() {
  TcpOptions options = Options(kServer0, kForever);
  options.confirm_limit = kConfirmLimit;
  return options;
}

// It is alive for all that heartbeats tell, and speaks; but what it was sent would be kept for
// ever.
TEST(TcpCuts, APeerThatNeverConfirmsIsLost) {
  for (const std::size_t bytes : {kLong, SendQueue::kSmallMax}) {  // of small ones, very many
    SCOPED_TRACE(bytes);
    const std::size_t messages = bytes == kLong ? 1 : SendQueue::kUnconfirmedMax / bytes + 1;
    TcpNode server(ImpatientServer());
    Rogue rogue(server);
    std::atomic<std::size_t> kept = 0;
    for (std::size_t i = 0; i < messages; ++i) {
      ++kept;
      server.transport->Send(kWorker0, Numbered(i, bytes), [&kept] { --kept; });
    }
    server.transport->Flush();
    rogue.Hear(messages, bytes);
    const auto begin = TestClock::now();
    EXPECT_TRUE(server.WaitFor([&] {
      rogue.Confirm(0);
      return !server.lost.empty();
    }));
    EXPECT_GE(TestClock::now() - begin, kConfirmLimit / 2);
    const auto lost = server.Lost();
    ASSERT_EQ(lost.size(), 1u);
    EXPECT_EQ(lost[0].peer, kWorker0);
    EXPECT_THAT(lost[0].address, HasSubstr("127.0.0.1:"));
    EXPECT_EQ(lost[0].why,
              "it is alive, but has confirmed nothing for 0.4 s of what was sent to it");
    EXPECT_EQ(kept, 0u);
  }
}

TEST(TcpCuts, APeerThatDoesNotReadIsLost) {
  TcpNode server(ImpatientServer());
  const Rogue rogue(server);
  server.transport->Send(kWorker0, Numbered(0, 24 << 20));  // no socket buffers as much
  ASSERT_TRUE(server.WaitForLoss());
  EXPECT_EQ(server.Lost()[0].peer, kWorker0);
  EXPECT_EQ(server.Lost()[0].why,
            "it is alive, but has taken in nothing for 0.4 s of what was sent to it");
}

// Few small messages are not confirmed by themselves, however long that takes.
TEST(TcpCuts, WhatAnHonestPeerDoesNotConfirmIsNotWaitedFor) {
  TcpNode server(ImpatientServer());
  Rogue rogue(server);
  const auto until = TestClock::now() + 3 * kConfirmLimit;
  std::uint64_t sent = 0;
  EXPECT_FALSE(server.WaitFor(
      [&] {
        server.transport->Send(kWorker0, Numbered(sent++, 10));
        server.transport->Flush();
        return !server.lost.empty();
      },
      until));
  rogue.Hear(sent, 10);
}

// Several times the limit goes by in the midst of one message, either way. Where the machine itself
// keeps the slow peer from going on, for half of the limit, it may well be lost: that says nothing.
TEST(TcpCuts, SlowPeersAreNotLost) {
  constexpr std::size_t kBytes = 24 << 20;
  constexpr std::size_t kSteps = 60;
  const auto step = 4 * kConfirmLimit / kSteps;
  const std::string said = EncodeMessage(Numbered(7, kBytes));
  bool on_time = false;
  for (int trial = 0; trial < 20 && !on_time; ++trial) {
    TcpNode server(ImpatientServer());
    Rogue rogue(server);
    server.transport->Send(kWorker0, Numbered(0, kBytes));
    on_time = true;
    auto next = TestClock::now();
    auto last = next;
    const auto in_step = [&](const auto& move) {
      std::this_thread::sleep_until(next += step);  // a slow link
      move();
      const auto now = TestClock::now();
      on_time = on_time && now - std::exchange(last, now) < kConfirmLimit / 2;
    };
    std::size_t heard = 0;
    for (std::size_t i = 0; i < kSteps && on_time; ++i) {
      in_step([&] { heard += rogue.socket.Hear(kBytes / kSteps).size(); });
    }
    const std::size_t rest = kHeaderBytes + kBytes - kBytes / kSteps * kSteps;
    if (on_time) in_step([&] { heard += rogue.socket.Hear(rest).size(); });
    if (!on_time) continue;
    ASSERT_EQ(heard, kHeaderBytes + kBytes);
    // Its word comes behind what it has begun to say.
    for (std::size_t i = 0; i <= kSteps && on_time; ++i) {
      const std::size_t part = said.size() / kSteps;
      in_step([&] { rogue.socket.Say(std::string_view(said).substr(i * part, part)); });
    }
    in_step([&] { rogue.Confirm(1); });
    if (!on_time) continue;
    ASSERT_TRUE(server.WaitForMessages(1));
    EXPECT_TRUE(server.Lost().empty());
  }
  EXPECT_TRUE(on_time) << "never went on in time";
}

// How many looks find it out; 0: none of a thousand.
template <class Next>
int LooksUntilOverdue(ConfirmWatch::Sight sight, Next next) {
  ConfirmWatch watch;
  for (int looks = 1; looks <= 1000; ++looks) {
    if (watch.Look(sight)) return looks;
    next(sight);
  }
  return 0;
}

TEST(ConfirmWatch, FindsOutWhoConfirmsNothing) {
  constexpr int kFound = ConfirmWatch::kLooks + 1;  // the first one sees that something is owed
  constexpr ConfirmWatch::Sight kOwes{.owes = true, .sent = 1 << 20};
  using Sight = ConfirmWatch::Sight;
  EXPECT_EQ(LooksUntilOverdue(kOwes, [](Sight&) {}), kFound);
  EXPECT_EQ(LooksUntilOverdue({.waits = true, .sent = 7, .in_flight = 7}, [](Sight&) {}), kFound);
  // More is sent to it, all of which it takes; it says little, or all the time.
  EXPECT_EQ(LooksUntilOverdue(kOwes, [](Sight& sight) { sight.sent += 1 << 20; }), kFound);
  EXPECT_EQ(LooksUntilOverdue(kOwes, [](Sight& sight) { sight.heard += 1000; }), kFound);
  EXPECT_EQ(LooksUntilOverdue(kOwes,
                              [](Sight& sight) {
                                sight.heard += 1 << 20;
                                sight.heard_in_full += 1 << 20;
                              }),
            kFound - 1 + static_cast<int>(ConfirmWatch::kBehindMax >> 20));
}

TEST(ConfirmWatch, LeavesAloneWhoGoesOn) {
  constexpr ConfirmWatch::Sight kOwes{.owes = true, .sent = 1 << 20};
  using Sight = ConfirmWatch::Sight;
  EXPECT_EQ(LooksUntilOverdue({.sent = 1 << 20}, [](Sight&) {}), 0);
  int looks = 0;
  EXPECT_EQ(
      LooksUntilOverdue(
          kOwes, [&](Sight& sight) { sight.confirmed += ++looks % ConfirmWatch::kLooks == 0; }),
      0);
  // A long message of its own that goes on and on; one that goes to it.
  EXPECT_EQ(LooksUntilOverdue(kOwes, [](Sight& sight) { sight.heard += ConfirmWatch::kHeardMin; }),
            0);
  EXPECT_EQ(LooksUntilOverdue({.waits = true, .sent = 100, .in_flight = 100},
                              [](Sight& sight) { ++sight.sent; }),
            0);
  // What is owed is still on its way.
  EXPECT_EQ(LooksUntilOverdue({.owes = true, .sent = 5000, .in_flight = 5000},
                              [](Sight& sight) { --sight.in_flight; }),
            0);
}

// Cut ten times, for 10 ms each, and sound for `sound` in between: for how long it counts as cut.
std::vector<milliseconds> CutFor(bool idle, milliseconds sound) {
  CutTime cut;
  CutTime::Clock::time_point now{};
  std::vector<milliseconds> counted;
  for (int i = 0; i < 10; ++i) {
    const auto since = cut.Cut(now, /*progress=*/7, idle, milliseconds(800));
    counted.push_back(std::chrono::duration_cast<milliseconds>(now - since));
    cut.Resumed(now += milliseconds(10));
    now += sound;
  }
  return counted;
}

TEST(TcpCuts, WhatIsCutAgainAndAgainIsCutAllTheWhileIfNothingPasses) {
  EXPECT_EQ(CutFor(/*idle=*/false, milliseconds(200)).back(), milliseconds(9 * 210));
  EXPECT_EQ(CutFor(/*idle=*/true, milliseconds(1)).back(), milliseconds(9 * 11));
  // Nothing was to pass: it was sound.
  EXPECT_THAT(CutFor(/*idle=*/true, milliseconds(200)), testing::Each(milliseconds(0)));
}

// A worker 0 of the test's making connects to the server.
struct Attempt {
  Attempt(CutEnds& ends, std::optional<std::uint64_t> received, std::uint32_t number)
      : Attempt(ends.server, {}, received, number) {}
  Attempt(const TcpNode& server, const MeetingName& meeting, std::optional<std::uint64_t> received,
          std::uint32_t number)
      : handshake(Handshake::Connecting({.node = kWorker0,
                                         .incarnation = Options(kWorker0, kForever).incarnation,
                                         .job_id = "test",
                                         .token = "secret"},
                                        Link::kUrgent, meeting, received, number)),
        socket(server.transport->address()),
        unsaid(handshake.Start()) {}
  // Says what is unsaid, and hears the answer.
  void Step() {
    socket.Say(std::exchange(unsaid, {}));
    while (unsaid.empty() && handshake.wanted() > 0) {
      const std::string heard = socket.Hear(handshake.wanted());
      if (heard.empty()) return;
      unsaid = handshake.Feed(std::as_bytes(std::span(heard)));
    }
  }
  // The same with a server that runs only when it is waited for.
  void StepWith(TcpNode& server) {
    std::atomic<bool> done = false;
    std::thread stepping([&] {
      Step();
      done = true;
    });
    EXPECT_TRUE(server.WaitFor([&] { return done.load(); }));
    stepping.join();
  }

  Handshake handshake;
  PlainSocket socket;
  std::string unsaid;
};

TEST(TcpCuts, AnAttemptThatWasGivenUpIsNotTakenForTheLast) {
  CutEnds ends(kForever);
  Attempt first(ends, std::nullopt, 1);
  first.Step();
  first.Step();
  ASSERT_EQ(first.handshake.state(), Handshake::State::kDone) << first.handshake.why();
  Attempt late(ends, 0, 2);
  late.Step();
  ASSERT_FALSE(late.unsaid.empty());
  Attempt last(ends, 0, 3);
  last.Step();
  last.Step();
  ASSERT_EQ(last.handshake.state(), Handshake::State::kDone) << last.handshake.why();
  late.Step();
  EXPECT_EQ(late.socket.HearAll(), "");
  ends.server.transport->Send(kWorker0, Numbered(0, 10));
  ends.server.transport->Flush();
  EXPECT_EQ(last.socket.Hear(kHeaderBytes + 10).substr(kHeaderBytes), std::string(10, 'a'));
  EXPECT_TRUE(ends.server.Lost().empty());
}

// Between what proves the peer and the answer: only the answer's failure tells of it.
TEST(TcpCuts, AResetBeforeTheWelcomeIsACutToo) {
  CutEnds ends(kForever, Reception::kCallersOnly);
  std::uint32_t number = 0;
  // A new connection, which gets as far as to be known; then it is resumed.
  for (const auto received : {std::optional<std::uint64_t>(), std::optional<std::uint64_t>(0)}) {
    Attempt attempt(ends, received, ++number);
    attempt.StepWith(ends.server);
    ASSERT_FALSE(attempt.unsaid.empty());
    attempt.socket.Say(attempt.unsaid);
    attempt.socket.EndWithReset();
  }
  Attempt last(ends, 0, ++number);
  last.StepWith(ends.server);
  last.StepWith(ends.server);
  ASSERT_EQ(last.handshake.state(), Handshake::State::kDone) << last.handshake.why();
  ends.server.transport->Send(kWorker0, Numbered(0, 10));
  ends.server.transport->Flush();
  EXPECT_EQ(last.socket.Hear(kHeaderBytes + 10).substr(kHeaderBytes), std::string(10, 'a'));
  EXPECT_TRUE(ends.server.Lost().empty());
}

// With shared memory there is nothing to resume: who has not heard the welcome comes anew.
TEST(TcpCuts, AResetBeforeTheWelcomeToSharedMemoryLeavesNoPeerBehind) {
  TcpOptions options = Options(kServer0, kForever, Reception::kCallersOnly);
  options.shared_memory = true;
  TcpNode server(options);
  MeetingPoint unheard;
  {
    Attempt attempt(server, unheard.name(), std::nullopt, 1);
    attempt.StepWith(server);
    ASSERT_FALSE(attempt.unsaid.empty());
    attempt.socket.Say(attempt.unsaid);
    attempt.socket.EndWithReset();
  }
  MeetingPoint meeting;
  Attempt last(server, meeting.name(), std::nullopt, 2);
  last.StepWith(server);
  last.StepWith(server);
  ASSERT_EQ(last.handshake.state(), Handshake::State::kDone) << last.handshake.why();
  EXPECT_TRUE(last.handshake.welcome().shares);
  EXPECT_TRUE(server.Lost().empty());
}

TEST(TcpCuts, WhoClaimsToHaveReceivedWhatWasNotSentIsLost) {
  CutEnds ends(kForever);
  ends.Connect();
  Attempt liar(ends, 1000, 100);
  liar.Step();
  liar.Step();
  ASSERT_TRUE(ends.server.WaitForLoss());
  EXPECT_THAT(ends.server.Lost()[0].why, HasSubstr("what was not sent to it"));
}

}  // namespace
}  // namespace heddle::kvstore::dist_test
