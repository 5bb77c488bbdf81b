// The TCP transport's promises (transport.h), one by one, over loopback.
#include "kvstore/dist/transport/tcp/tcp_transport.h"

#include <heddle/error.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/sanitizers.h"
#include "tests/kvstore/dist/no_descriptors.h"
#include "tests/kvstore/dist/tcp_node.h"
#include "tests/message_of.h"

namespace heddle::kvstore::dist_test {
namespace {

using namespace dist;  // NOLINT(google-build-using-namespace)
using testing::HasSubstr;

constexpr std::size_t kMiB = 1 << 20;

Message Push(std::uint64_t sequence, Payload payload = {}, std::int32_t priority = 0) {
  Message message;
  message.kind = Kind::kPush;
  message.sequence = sequence;
  message.priority = priority;
  message.payload = std::move(payload);
  return message;
}

// A text that no shift of itself equals.
std::string Pattern(std::size_t bytes) {
  std::string text(bytes, '\0');
  for (std::size_t i = 0; i < bytes; ++i) text[i] = static_cast<char>(i * 2654435761u >> 13);
  return text;
}

// A server with a thread of its own and a worker that receives on the test's.
struct Pair {
  explicit Pair(TcpOptions server_options = OptionsOf(kServer0, Reception::kThread),
                TcpOptions worker_options = OptionsOf(kWorker0))
      : server(std::move(server_options)), worker(std::move(worker_options)) {
    Connect();
  }
  void Connect() { worker.transport->Connect(kServer0, server.transport->address(), Long()); }

  TcpNode server;
  TcpNode worker;
};

// Without ever waiting in the transport.
bool TakeUntilReceived(TcpNode& node, std::size_t count) {
  for (const auto until = Long(); TestClock::now() < until; node.transport->TakeArrived()) {
    const std::lock_guard lock(node.mutex);
    if (node.received.size() >= count) return true;
  }
  return false;
}

// ---- Messages

TEST(TcpTransport, AllFieldsOfAMessageArrive) {
  Pair pair;
  Message message = Push(12, PayloadOf(Pattern(1000)), -5);
  message.flags = kFlagRates;
  message.dtype = DType::kFloat16;
  message.rank = 3;
  message.incarnation = 0x123456789abcdef0;
  message.part = {.store = 1, .part = 2, .key = 0xfedcba9876543210};
  message.version = std::uint64_t{5} << 32;
  message.meta = "meta data";
  pair.worker.transport->Send(kServer0, message);
  pair.worker.transport->Flush();
  ASSERT_TRUE(pair.server.WaitForMessages(1));
  const auto [from, received] = pair.server.Received()[0];
  EXPECT_EQ(from, kWorker0);
  EXPECT_EQ(received.kind, message.kind);
  EXPECT_EQ(received.flags, message.flags);
  EXPECT_EQ(received.dtype, message.dtype);
  EXPECT_EQ(received.rank, message.rank);
  EXPECT_EQ(received.priority, message.priority);
  EXPECT_EQ(received.incarnation, message.incarnation);
  EXPECT_EQ(received.part, message.part);
  EXPECT_EQ(received.sequence, message.sequence);
  EXPECT_EQ(received.version, message.version);
  EXPECT_EQ(received.meta, message.meta);
  EXPECT_EQ(TextOf(received.payload), Pattern(1000));
}

class TcpSizes : public testing::TestWithParam<Reception> {};

// Around every size at which the transport changes its ways.
TEST_P(TcpSizes, PayloadsOfAllSizesGoThereAndBack) {
  Pair pair(OptionsOf(kServer0, Reception::kThread), OptionsOf(kWorker0, GetParam()));
  pair.server.answer = [&](NodeId from, const Message& message) {
    Message value = message;
    value.kind = Kind::kValue;
    pair.server.transport->Send(from, std::move(value));
  };
  std::uint64_t sequence = 0;
  for (const std::size_t base :
       {std::size_t{1}, std::size_t{64}, std::size_t{4096}, std::size_t{16} << 10,
        std::size_t{64} << 10, kMiB / 4, kMiB, 4 * kMiB, 9 * kMiB}) {
    for (const std::size_t bytes : {base - 1, base, base + 1}) {
      const std::string text = Pattern(bytes);
      pair.worker.transport->Send(kServer0, Push(sequence++, PayloadOf(text)));
      ASSERT_TRUE(pair.worker.WaitForMessages(sequence)) << bytes;
      EXPECT_EQ(pair.worker.Received().back().second.sequence, sequence - 1);
      ASSERT_TRUE(TextOf(pair.worker.Received().back().second.payload) == text) << bytes;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(All, TcpSizes,
                         testing::Values(Reception::kCallersOnly, Reception::kCallersFirst,
                                         Reception::kThread));

TEST(TcpTransport, PayloadsOfManyRunsAreSentInOrder) {
  Pair pair;
  const std::string text = Pattern(3 * kMiB);
  std::vector<std::span<const std::byte>> runs;
  std::size_t at = 0;
  for (std::size_t i = 0; at < text.size(); ++i) {
    const std::size_t bytes = std::min(text.size() - at, i * 37 % 5000);
    runs.push_back(std::as_bytes(std::span(text).subspan(at, bytes)));
    at += bytes;
  }
  pair.worker.transport->Send(kServer0, Push(0, Payload(nullptr, runs)));
  ASSERT_TRUE(pair.worker.WaitFor([&] {
    const std::lock_guard lock(pair.server.mutex);
    return pair.server.received.size() == 1;
  }));
  EXPECT_TRUE(TextOf(pair.server.Received()[0].second.payload) == text);
}

// Groups of all lengths, with single messages between them.
TEST(TcpTransport, MessagesSentTogetherKeepTheirOrder) {
  Pair pair;
  constexpr std::uint64_t kMessages = 3000;
  const auto payload_of = [](std::uint64_t sequence) {
    return Pattern(sequence * 7919 % (Transport::kCopiedMax + 1));
  };
  std::uint64_t sequence = 0;
  for (std::size_t length = 1; sequence < kMessages; length = length % 130 + 1) {
    std::vector<Outgoing> together;
    for (std::size_t i = 0; i < length && sequence < kMessages; ++i, ++sequence) {
      together.push_back({kServer0, Push(sequence, PayloadOf(payload_of(sequence)))});
    }
    if (length % 3 == 0) {
      for (Outgoing& each : together) pair.worker.transport->Send(kServer0, each.message);
    } else {
      pair.worker.transport->SendTogether(together);
    }
  }
  pair.worker.transport->Flush();
  ASSERT_TRUE(pair.server.WaitForMessages(kMessages));
  const auto received = pair.server.Received();
  for (std::uint64_t i = 0; i < kMessages; ++i) {
    ASSERT_EQ(received[i].second.sequence, i);
    ASSERT_TRUE(TextOf(received[i].second.payload) == payload_of(i)) << i;
  }
}

TEST(TcpTransport, MessagesSentTogetherToNobodyAreDropped) {
  Pair pair;
  const auto owner = std::make_shared<const std::string>("bytes");
  std::vector<Outgoing> together(3);
  for (Outgoing& each : together) {
    each = {TheServer(1), Push(0, Payload(owner, std::as_bytes(std::span(*owner))))};
  }
  pair.worker.transport->SendTogether(together);
  together.clear();
  EXPECT_EQ(owner.use_count(), 1);
}

TEST(TcpTransport, ManySmallMessagesShareCallsToTheSystem) {
  Pair pair;
  for (std::uint64_t i = 0; i < 1000; ++i) {
    pair.worker.transport->Send(kServer0, Push(i, PayloadOf(Pattern(256))));
  }
  pair.worker.transport->Flush();
  ASSERT_TRUE(pair.server.WaitForMessages(1000));
  const auto received = pair.server.Received();
  for (std::uint64_t i = 0; i < 1000; ++i) {
    EXPECT_EQ(received[i].second.sequence, i);
  }
  const TcpStats stats = pair.worker.transport->stats();
  EXPECT_LE(stats.writes, 250u);  // by packs of 16 KiB there are 20
  EXPECT_LE(stats.bytes_sent, 1000u * (256 + 64));
}

TEST(TcpTransport, HeadersAreAllThatIsAddedToALongPayload) {
  Pair pair;
  pair.worker.transport->Send(kServer0, Push(0, PayloadOf(Pattern(kMiB))));
  ASSERT_TRUE(pair.worker.WaitFor([&] {
    const std::lock_guard lock(pair.server.mutex);
    return pair.server.received.size() == 1;
  }));
  EXPECT_LE(pair.worker.transport->stats().bytes_sent, kMiB + kMiB / 1000);
}

TEST(TcpTransport, OwnersAreReleasedWhenAllIsSent) {
  Pair pair;
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{100}, 3 * kMiB}) {
    auto owner = std::make_shared<const std::string>(Pattern(bytes));
    const std::weak_ptr<const std::string> watch = owner;
    std::atomic<bool> sent = false;
    Payload payload(owner, std::as_bytes(std::span(*owner)));
    owner = nullptr;
    pair.worker.transport->Send(kServer0, Push(0, std::move(payload)), [&] { sent = true; });
    EXPECT_TRUE(pair.worker.WaitFor([&] { return sent.load() && watch.expired(); }));
  }
}

TEST(TcpTransport, ToSomebodyUnknownMessagesAreDropped) {
  Pair pair;
  bool sent = false;
  pair.worker.transport->Send({Role::kServer, 5}, Push(0, PayloadOf("x")), [&] { sent = true; });
  EXPECT_TRUE(sent);
}

// ---- Landings

TEST(TcpTransport, PayloadsComeIntoTheirLanding) {
  Pair pair;
  std::vector<std::shared_ptr<TestLanding>> landings;
  pair.worker.land = [&](NodeId, const Message&, std::uint64_t bytes) {
    landings.push_back(std::make_shared<TestLanding>(bytes, 10'000));
    return landings.back();
  };
  std::vector<std::string> texts;
  for (const std::size_t bytes : {std::size_t{10}, std::size_t{100'000}, 2 * kMiB}) {
    texts.push_back(Pattern(bytes));
    pair.server.transport->Send(kWorker0, Push(texts.size(), PayloadOf(texts.back())));
    ASSERT_TRUE(pair.worker.WaitForMessages(texts.size()));
  }
  ASSERT_EQ(landings.size(), texts.size());
  for (std::size_t i = 0; i < texts.size(); ++i) {
    EXPECT_TRUE(landings[i]->text() == texts[i]);
    EXPECT_TRUE(TextOf(pair.worker.Received()[i].second.payload) == texts[i]);
  }
}

// What comes after the memory was given up goes nowhere, the message comes without it, and the next
// ones are whole: given up before the first byte, and after the first of several reads (no socket
// buffers as much as the long payload).
TEST(TcpTransport, ALandingThatIsGivenUpMidwayIsLeftAlone) {
  for (const std::size_t bytes : {std::size_t{1000}, 24 * kMiB}) {
    Pair pair;
    auto landing = std::make_shared<TestLanding>(bytes, 100'000);
    if (bytes == 1000) {
      landing->Revoke();
    } else {
      landing->revoked_after = 1;
    }
    pair.worker.land = [&](NodeId, const Message& header,
                           std::uint64_t) -> std::shared_ptr<Landing> {
      return header.sequence == 1 ? landing : nullptr;
    };
    pair.server.transport->Send(kWorker0, Push(1, PayloadOf(Pattern(bytes))));
    pair.server.transport->Send(kWorker0, Push(2, PayloadOf(Pattern(kMiB))));
    pair.server.transport->Send(kWorker0, Push(3, PayloadOf(Pattern(10))));
    const auto have = [&](std::uint64_t sequence) {
      return std::any_of(pair.worker.received.begin(), pair.worker.received.end(),
                         [&](const auto& entry) { return entry.second.sequence == sequence; });
    };
    ASSERT_TRUE(pair.worker.WaitFor([&] { return have(1) && have(2) && have(3); }));
    EXPECT_EQ(landing->reads, landing->revoked_after);
    EXPECT_EQ(landing->text().back(), '?');
    for (const auto& [from, message] : pair.worker.Received()) {
      if (message.sequence == 1) {
        EXPECT_TRUE(message.payload.empty());
      } else if (message.sequence == 2) {
        EXPECT_TRUE(TextOf(message.payload) == Pattern(kMiB));
      }
    }
  }
}

// ---- Revoking what is being sent

// Of several long messages to a peer that does not read, one is being sent and others wait.
TEST(TcpTransport, WhatIsQueuedCanBeRevoked) {
  TcpNode server(OptionsOf(kServer0, Reception::kCallersOnly));  // reads only when told to
  TcpNode worker(OptionsOf(kWorker0));
  std::thread connect(
      [&] { worker.transport->Connect(kServer0, server.transport->address(), Long()); });
  ASSERT_TRUE(server.WaitFor([&] { return !server.connected.empty(); }));
  std::atomic<bool> connected = false;
  std::thread waits([&] {
    connect.join();
    connected = true;
  });
  ASSERT_TRUE(server.WaitFor([&] { return connected.load(); }));
  waits.join();

  const std::string text = Pattern(32 * kMiB);
  std::vector<std::weak_ptr<const void>> owners;
  std::vector<Transport::SendId> ids;
  for (std::uint64_t i = 0; i < 3; ++i) {
    auto owner = std::make_shared<std::string>(text);
    owners.emplace_back(owner);
    Payload payload(owner, std::as_bytes(std::span(*owner)));
    ids.push_back(worker.transport->Send(kServer0, Push(i, std::move(payload))));
  }
  EXPECT_EQ(worker.transport->Revoke(kServer0, ids[0]), Revoked::kCopied);
  EXPECT_EQ(worker.transport->Revoke(kServer0, ids[1]), Revoked::kDropped);
  EXPECT_TRUE(owners[0].expired());
  EXPECT_TRUE(owners[1].expired());
  EXPECT_FALSE(owners[2].expired());
  EXPECT_EQ(worker.transport->Revoke(kServer0, ids[1]), Revoked::kSent);
  ASSERT_TRUE(server.WaitForMessages(2));
  EXPECT_EQ(server.Received()[0].second.sequence, 0u);
  EXPECT_TRUE(TextOf(server.Received()[0].second.payload) == text);
  EXPECT_EQ(server.Received()[1].second.sequence, 2u);
  EXPECT_TRUE(TextOf(server.Received()[1].second.payload) == text);
}

// ---- Priorities

// To a peer that does not read yet: the first message has begun, of the others the urgent ones
// come first.
TEST(TcpTransport, UrgentMessagesOvertake) {
  TcpOptions options = OptionsOf(kWorker0);
  Pair pair(OptionsOf(kServer0, Reception::kCallersFirst), options);
  std::atomic<bool> go = false;
  pair.server.land = [&](NodeId, const Message& header, std::uint64_t) {
    while (header.sequence == 0 && !go) std::this_thread::yield();
    return std::shared_ptr<Landing>();
  };
  pair.worker.transport->Send(kServer0, Push(0, PayloadOf(Pattern(32 * kMiB)), 0));
  for (std::uint64_t i = 1; i <= 20; ++i) {
    const auto priority = static_cast<std::int32_t>(i * 7 % 20);
    pair.worker.transport->Send(kServer0, Push(i, PayloadOf(Pattern(kMiB)), priority));
  }
  go = true;
  ASSERT_TRUE(pair.worker.WaitFor([&] {
    const std::lock_guard lock(pair.server.mutex);
    return pair.server.received.size() == 21;
  }));
  std::vector<std::int32_t> priorities;
  for (std::size_t i = 1; i < 21; ++i) {
    priorities.push_back(pair.server.Received()[i].second.priority);
  }
  EXPECT_TRUE(std::is_sorted(priorities.rbegin(), priorities.rend()))
      << testing::PrintToString(priorities);
}

// While a long message is on its way, a short one passes on the other connection. Nobody but the
// test's thread sends, so the long one has just begun.
TEST(TcpTransport, ShortMessagesPassLongOnes) {
  Pair pair(OptionsOf(kServer0, Reception::kThread), OptionsOf(kWorker0, Reception::kCallersOnly));
  pair.worker.transport->Send(kServer0, Push(0, PayloadOf(Pattern(64 * kMiB))));
  pair.worker.transport->Send(kServer0, Push(1, PayloadOf(Pattern(4096)), 1));
  ASSERT_TRUE(pair.worker.WaitFor([&] {
    const std::lock_guard lock(pair.server.mutex);
    return pair.server.received.size() == 2;
  }));
  EXPECT_EQ(pair.server.Received()[0].second.sequence, 1u);
}

// ---- Leading

TEST(TcpTransport, AnInterruptBringsTheLeaderBack) {
  Pair pair;
  pair.worker.transport->Interrupt();  // counts for the next, and must not be lost
  for (int i = 0; i < 50; ++i) {
    std::atomic<bool> leads = false;
    std::thread leader([&] {
      leads = true;
      while (leads) pair.worker.transport->RunOne(Long());
    });
    while (!leads) std::this_thread::yield();
    leads = false;
    pair.worker.transport->Interrupt();
    leader.join();
  }
}

TEST(TcpTransport, WithThreadsOfItsOwnCallersDoNotLead) {
  Pair pair;
  EXPECT_FALSE(pair.server.transport->RunOne(Long()));
}

// Nobody waits, so the transport's own thread receives, and sends what was left for company.
TEST(TcpTransport, WithoutCallersTheOwnThreadDoesAll) {
  Pair pair(OptionsOf(kServer0, Reception::kCallersFirst));
  for (int i = 0; i < 20; ++i) {
    pair.worker.transport->Send(kServer0, Push(0, PayloadOf("x")));
    std::unique_lock lock(pair.server.mutex);
    ASSERT_TRUE(pair.server.changed.wait_until(lock, Long(), [&] {
      return pair.server.received.size() == static_cast<std::size_t>(i) + 1;
    }));
  }
}

TEST(TcpTransport, AThreadThatWaitsForNothingTakesWhatHasCome) {
  Pair pair(OptionsOf(kServer0, Reception::kThread), OptionsOf(kWorker0, Reception::kCallersOnly));
  pair.server.answer = [&pair](NodeId from, const Message& message) {
    pair.server.transport->Send(from, message);
  };
  pair.worker.answer = [&pair](NodeId, const Message&) {
    pair.worker.transport->TakeArrived();  // this thread leads already
  };
  pair.worker.transport->TakeArrived();  // nothing has come
  for (std::size_t i = 1; i <= 20; ++i) {
    pair.worker.transport->Send(kServer0, Push(0, PayloadOf("x")));
    pair.worker.transport->Flush();
    ASSERT_TRUE(TakeUntilReceived(pair.worker, i));
  }
}

TEST(TcpTransport, WithThreadsOfItsOwnCallersTakeNothing) {
  Pair pair;
  std::atomic<bool> by_caller = false;
  pair.server.answer = [&, caller = std::this_thread::get_id()](NodeId, const Message&) {
    if (std::this_thread::get_id() == caller) by_caller = true;
  };
  pair.worker.transport->Send(kServer0, Push(0));
  pair.worker.transport->Flush();
  ASSERT_TRUE(TakeUntilReceived(pair.server, 1));
  EXPECT_FALSE(by_caller);
}

// ---- Peers

// The own thread looks around ever more seldom while callers lead, and leaves what has come to
// those that only try; then they stop, and one sends on.
class TcpCallers : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(TcpTransport, TcpCallers, testing::Bool(),
                         [](const auto& info) { return info.param ? "Try" : "Wait"; });

TEST_P(TcpCallers, WhereTheyLeadNoMoreTheOwnThreadDoesAll) {
  Pair pair(OptionsOf(kServer0, Reception::kCallersFirst));
  pair.server.answer = [&pair](NodeId from, const Message& message) {
    pair.server.transport->Send(from, message);
  };
  std::uint64_t sent = 0;
  const auto send = [&] {
    Message message;
    message.kind = Kind::kPush;
    message.sequence = sent++;
    pair.worker.transport->Send(kServer0, std::move(message));
  };
  for (const std::size_t burst : {std::size_t{1}, std::size_t{3}, std::size_t{300}}) {
    for (int i = 0; i < 100; ++i) {
      send();
      ASSERT_TRUE(GetParam() ? TakeUntilReceived(pair.worker, sent)
                             : pair.worker.WaitForMessages(sent));
      std::this_thread::sleep_for(std::chrono::microseconds(i));
    }
    for (std::size_t i = 0; i < burst; ++i) send();
    std::unique_lock lock(pair.worker.mutex);
    ASSERT_TRUE(pair.worker.changed.wait_until(lock, Long(), [&] {
      return pair.worker.received.size() == sent;
    })) << burst;
  }
}

TEST(TcpTransport, AcceptedPeersAreToldOfOnce) {
  Pair pair;
  pair.worker.transport->Send(kServer0, Push(0));
  pair.worker.transport->Flush();
  ASSERT_TRUE(pair.server.WaitForMessages(1));
  const std::lock_guard lock(pair.server.mutex);
  EXPECT_THAT(pair.server.connected, testing::ElementsAre(kWorker0));
}

TEST(TcpTransport, PeersWithoutRankAreProvisionalUntilRenamed) {
  TcpOptions options = OptionsOf({Role::kScheduler, 0}, Reception::kThread);
  options.peers_are_provisional = true;
  TcpNode scheduler(options);
  TcpNode a(OptionsOf({Role::kWorker, -1}));
  TcpNode b(OptionsOf({Role::kWorker, 0}));
  for (TcpNode* node : {&a, &b}) {
    node->transport->Connect({Role::kScheduler, 0}, scheduler.transport->address(), Long());
    node->transport->Send({Role::kScheduler, 0}, Push(node == &a ? 1 : 2));
    node->transport->Flush();
    ASSERT_TRUE(scheduler.WaitForMessages(node == &a ? 1 : 2));
  }
  const NodeId first = scheduler.Received()[0].first;
  const NodeId second = scheduler.Received()[1].first;
  EXPECT_EQ(first.role, Role::kWorker);
  EXPECT_LT(first.rank, -1);
  EXPECT_LT(second.rank, -1);
  EXPECT_NE(first, second);
  EXPECT_TRUE(scheduler.transport->Rename(first, kWorker0));
  EXPECT_FALSE(scheduler.transport->Rename(first, kWorker0));
  EXPECT_FALSE(scheduler.transport->Rename(second, kWorker0));
  scheduler.transport->Send(kWorker0, Push(3));
  scheduler.transport->Flush();
  ASSERT_TRUE(a.WaitForMessages(1));
  EXPECT_EQ(a.Received()[0].first, (NodeId{Role::kScheduler, 0}));
  a.transport->Close();
  ASSERT_TRUE(scheduler.WaitForLoss());
  EXPECT_EQ(scheduler.Lost()[0].peer, kWorker0);
}

TEST(TcpTransport, ASecondProcessOfARankIsRefused) {
  Pair pair;
  TcpOptions options = OptionsOf(kWorker0);
  options.incarnation = 99;
  TcpNode twin(options);
  try {
    twin.transport->Connect(kServer0, pair.server.transport->address(), Long());
    FAIL();
  } catch (const NetworkError& error) {
    EXPECT_THAT(error.what(), HasSubstr("worker 0 is connected already, from 127.0.0.1:"));
    EXPECT_THAT(error.what(), HasSubstr("server 0 at 127.0.0.1:"));
  }
  EXPECT_EQ(pair.server.transport->stats().strangers_refused, 1u);
}

TEST(TcpTransport, ConnectingTwiceIsAnError) {
  Pair pair;
  EXPECT_THROW(pair.Connect(), InvalidState);
}

TEST(TcpTransport, AnotherNodeThanWantedIsAnError) {
  TcpNode server(OptionsOf({Role::kServer, 1}, Reception::kThread));
  TcpNode worker(OptionsOf(kWorker0));
  try {
    worker.transport->Connect(kServer0, server.transport->address(), Long());
    FAIL();
  } catch (const NetworkError& error) {
    EXPECT_THAT(error.what(), HasSubstr("connect to server 0 at 127.0.0.1:"));
    EXPECT_THAT(error.what(), HasSubstr("server 1 listens there"));
  }
}

// ---- Ends

TEST(TcpTransport, ADisconnectSendsFirstWhatIsQueued) {
  Pair pair;
  for (std::uint64_t i = 0; i < 8; ++i) {
    pair.worker.transport->Send(kServer0, Push(i, PayloadOf(Pattern(2 * kMiB))));
    pair.worker.transport->Send(kServer0, Push(100 + i, PayloadOf("small")));
  }
  pair.worker.transport->Disconnect(kServer0);
  ASSERT_TRUE(pair.worker.WaitFor([&] {
    const std::lock_guard lock(pair.server.mutex);
    return !pair.server.lost.empty();
  }));
  EXPECT_EQ(pair.server.Received().size(), 16u);
  EXPECT_EQ(pair.server.Lost()[0].peer, kWorker0);
  EXPECT_THAT(pair.server.Lost()[0].address, HasSubstr("127.0.0.1:"));
  EXPECT_THAT(pair.server.Lost()[0].why, HasSubstr("closed the connection"));
  EXPECT_TRUE(pair.worker.Lost().empty());
}

TEST(TcpTransport, AfterADisconnectOneCanConnectAgain) {
  Pair pair;
  for (std::uint64_t i = 1; i <= 3; ++i) {
    pair.worker.transport->Send(kServer0, Push(i));
    pair.worker.transport->Disconnect(kServer0);
    ASSERT_TRUE(pair.worker.WaitFor([&] {
      const std::lock_guard lock(pair.server.mutex);
      return pair.server.lost.size() == i;
    }));
    pair.Connect();
  }
  EXPECT_EQ(pair.server.Received().size(), 3u);
}

TEST(TcpTransport, TheEndOfAPeerIsToldOnce) {
  Pair pair;
  pair.server.transport->Close();
  ASSERT_TRUE(pair.worker.WaitForLoss());
  EXPECT_EQ(pair.worker.Lost()[0].peer, kServer0);
  EXPECT_EQ(pair.worker.Lost()[0].address, pair.server.transport->address());
  // Sending to it is no error.
  bool sent = false;
  pair.worker.transport->Send(kServer0, Push(0, PayloadOf("x")), [&] { sent = true; });
  EXPECT_TRUE(sent);
  for (int i = 0; i < 10; ++i) pair.worker.transport->RunOne(In(std::chrono::milliseconds(1)));
  EXPECT_EQ(pair.worker.Lost().size(), 1u);
}

TEST(TcpTransport, CloseMayBeCalledTwiceAndWithMuchQueued) {
  TcpNode server(OptionsOf(kServer0, Reception::kThread));
  server.answer = [](NodeId, const Message&) {};
  TcpNode worker(OptionsOf(kWorker0));
  worker.transport->Connect(kServer0, server.transport->address(), Long());
  for (int i = 0; i < 4; ++i) {
    worker.transport->Send(kServer0, Push(0, PayloadOf(Pattern(16 * kMiB))));
  }
  worker.transport->Close();
  worker.transport->Close();
  EXPECT_FALSE(worker.transport->RunOne(Long()));
  EXPECT_THROW(worker.transport->Connect(kServer0, server.transport->address(), Long()),
               NetworkError);
}

// ---- Listening and connecting

TEST(TcpTransport, ABusyPortIsNamedWithItsSetting) {
  TcpNode server(OptionsOf(kServer0));
  TcpOptions options = OptionsOf({Role::kServer, 1});
  const std::string address = server.transport->address();
  options.port = static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
  options.setting = "HEDDLE_PORT";
  try {
    TcpNode other(options);
    FAIL();
  } catch (const NetworkError& error) {
    EXPECT_THAT(error.what(), HasSubstr(address));
    EXPECT_THAT(error.what(), HasSubstr("HEDDLE_PORT"));
    EXPECT_THAT(error.what(), HasSubstr("Address already in use"));
  }
}

TEST(TcpTransport, AddressesOfVersion6HaveBrackets) {
  for (const char* const host : {"fd00:77::2", "10.77.0.2", "node7"}) {
    TcpOptions options = OptionsOf(kServer0);
    options.node_host = host;
    const TcpNode server(options);
    const std::string expected =
        host == std::string("fd00:77::2") ? "[fd00:77::2]:" : std::string(host) + ":";
    EXPECT_THAT(server.transport->address(), testing::StartsWith(expected));
  }
}

TEST(TcpTransport, AnAddressOfAnotherMachineCannotBeListenedOn) {
  TcpOptions options = OptionsOf(kServer0);
  options.bind_address = "192.0.2.1";  // set apart for documentation
  try {
    TcpNode server(options);
    FAIL();
  } catch (const NetworkError& error) {
    EXPECT_THAT(error.what(), HasSubstr("192.0.2.1:0"));
    EXPECT_THAT(error.what(), HasSubstr("Cannot assign requested address"));
  }
}

// The address of a server that has ended: nobody listens there, most likely.
std::string FreeAddress() { return TcpNode(OptionsOf(kServer0)).transport->address(); }

TEST(TcpTransport, WhereNobodyListensTheDeadlineEnds) {
  TcpNode worker(OptionsOf(kWorker0));
  const std::string address = FreeAddress();
  try {
    worker.transport->Connect(kServer0, address, In(std::chrono::milliseconds(100)));
    FAIL();
  } catch (const TimeoutError& error) {
    EXPECT_THAT(error.what(), HasSubstr("server 0 at " + address));
    EXPECT_THAT(error.what(), HasSubstr("Connection refused"));
  }
}

TEST(TcpTransport, AConnectionThatNobodyWantsAnyMoreIsGivenUpBeforeTheDeadline) {
  TcpNode worker(OptionsOf(kWorker0));
  const std::string address = FreeAddress();
  try {
    worker.transport->Connect(kServer0, address, Long(), [] { return true; });
    FAIL();
  } catch (const NetworkError& error) {
    EXPECT_THAT(error.what(), HasSubstr("server 0 at " + address));
  }
}

TEST(TcpTransport, TheListenerMayComeLater) {
  const std::string address = FreeAddress();
  TcpNode worker(OptionsOf(kWorker0));
  std::atomic<bool> connected = false;
  std::thread connect([&] {
    worker.transport->Connect(kServer0, address, Long());
    connected = true;
  });
  std::this_thread::yield();
  TcpOptions options = OptionsOf(kServer0, Reception::kThread);
  options.port = static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
  TcpNode server(options);
  connect.join();
  EXPECT_TRUE(connected);
}

// It asks whether it was given up after an attempt, the first of which has found none.
TEST(TcpTransport, WithoutDescriptorsItTriesAgainUntilTheDeadline) {
  if (kAddressSanitizer) GTEST_SKIP() << "the sanitizer's checks need descriptors themselves";
  TcpNode server(OptionsOf(kServer0, Reception::kThread));
  TcpNode worker(OptionsOf(kWorker0));
  const std::string address = server.transport->address();
  std::optional<NoDescriptors> none(std::in_place);
  const std::string error = MessageOf<TimeoutError>(
      [&] { worker.transport->Connect(kServer0, address, In(std::chrono::milliseconds(100))); });
  EXPECT_THAT(error, HasSubstr("server 0 at " + address));
  EXPECT_THAT(error, HasSubstr("Too many open files"));
  worker.transport->Connect(kServer0, address, Long(), [&] {
    none.reset();
    return false;
  });
  EXPECT_FALSE(none);
}

TEST(TcpTransport, BadAddressesAreInvalid) {
  TcpNode worker(OptionsOf(kWorker0));
  for (const char* address : {"", "localhost", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:0",
                              "127.0.0.1:65536", ":9091", "127.0.0.1:90 91"}) {
    EXPECT_THROW(worker.transport->Connect(kServer0, address, Long()), InvalidArgument) << address;
  }
}

TEST(TcpTransport, NamesAreLookedUp) {
  TcpNode server(OptionsOf(kServer0, Reception::kThread));
  TcpNode worker(OptionsOf(kWorker0));
  const std::string address = server.transport->address();
  worker.transport->Connect(kServer0, "localhost" + address.substr(address.rfind(':')), Long());
}

TEST(TcpTransport, TokensMustMatch) {
  TcpOptions options = OptionsOf(kServer0, Reception::kThread);
  options.token = "secret";
  TcpNode server(options);
  TcpOptions worker_options = OptionsOf(kWorker0);
  for (const char* token : {"", "wrong"}) {
    worker_options.token = token;
    TcpNode worker(worker_options);
    EXPECT_THROW(worker.transport->Connect(kServer0, server.transport->address(), Long()),
                 NetworkError);
  }
  worker_options.token = "secret";
  TcpNode worker(worker_options);
  worker.transport->Connect(kServer0, server.transport->address(), Long());
}

}  // namespace
}  // namespace heddle::kvstore::dist_test
