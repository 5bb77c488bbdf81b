// What transport.h promises, of transports over the hub.
#include "kvstore/dist/transport/sim/sim_hub.h"

#include <heddle/error.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kvstore/dist/integer_parts.h"

namespace heddle::kvstore::dist {
namespace {

using std::chrono::steady_clock;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::UnorderedElementsAreArray;

constexpr NodeId kServer{.role = Role::kServer, .rank = 0};
constexpr NodeId kWorker{.role = Role::kWorker, .rank = 3};

steady_clock::time_point InAMinute() { return steady_clock::now() + std::chrono::minutes(1); }

// Remembers what has come.
class Events : public TransportEvents {
 public:
  std::vector<std::string> log;          // in order
  std::vector<std::uint64_t> sequences;  // of messages
  std::vector<std::vector<std::int64_t>> values;
  std::shared_ptr<Landing> landing;  // for the next payload
  int turns = 0;

  void OnConnected(NodeId peer, Incarnation incarnation, const std::string& address) override {
    Note("connected " + ToString(peer) + " " + std::to_string(incarnation) + " " + address);
  }
  std::shared_ptr<Landing> OnHeader(NodeId /*from*/, const Message& header,
                                    std::uint64_t bytes) override {
    EXPECT_TRUE(header.payload.empty());
    EXPECT_GT(bytes, 0u);
    return std::exchange(landing, nullptr);
  }
  void OnMessage(NodeId from, Message&& message) override {
    const std::lock_guard lock(mutex_);
    sequences.push_back(message.sequence);
    values.push_back(ValuesOf(message.payload));
    log.push_back("message " + ToString(from));
    changed_.notify_all();
  }
  void OnTurnEnd() override {
    const std::lock_guard lock(mutex_);
    ++turns;
    changed_.notify_all();
  }
  void OnLost(NodeId peer, const std::string& address, const std::string& why) override {
    Note("lost " + ToString(peer) + " " + address + ": " + why);
  }

  // Until there are so many entries in the log.
  void Await(std::size_t entries) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return log.size() >= entries; });
  }
  void AwaitTurnEnd() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return turns > 0; });
  }

 private:
  void Note(const std::string& what) {
    const std::lock_guard lock(mutex_);
    log.push_back(what);
    changed_.notify_all();
  }
  std::mutex mutex_;
  std::condition_variable changed_;
};

struct Pair {
  explicit Pair(std::uint64_t seed, bool provisional = false) : hub(seed) {
    server = hub.MakeTransport(
        {.self = kServer, .address = "host:1", .peers_are_provisional = provisional}, at_server);
    worker =
        hub.MakeTransport({.self = kWorker, .incarnation = 77, .address = "host:2"}, at_worker);
    worker->Connect(kServer, "host:1", InAMinute());
    at_server.Await(1);
  }
  Events at_server;
  Events at_worker;
  SimHub hub;
  std::unique_ptr<Transport> server;
  std::unique_ptr<Transport> worker;
};

Message Numbered(std::uint64_t sequence) {
  return {.kind = Kind::kPush,
          .sequence = sequence,
          .payload = PayloadOf({static_cast<std::int64_t>(sequence)})};
}

TEST(SimHub, MessagesOvertakeOneAnotherAndAllArriveOnce) {
  Pair pair(5);
  EXPECT_THAT(pair.at_server.log, ElementsAre("connected worker 3 77 host:2"));
  constexpr std::uint64_t kMessages = 500;
  for (std::uint64_t i = 0; i < kMessages; ++i) {
    bool sent = false;
    pair.worker->Send(kServer, Numbered(i), [&] { sent = true; });
    EXPECT_TRUE(sent);
  }
  pair.at_server.Await(1 + kMessages);
  pair.at_server.AwaitTurnEnd();
  std::vector<std::uint64_t> all(kMessages);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_THAT(pair.at_server.sequences, UnorderedElementsAreArray(all));
  EXPECT_NE(pair.at_server.sequences, all);
  for (std::size_t i = 0; i < kMessages; ++i) {
    const auto sequence = static_cast<std::int64_t>(pair.at_server.sequences[i]);
    EXPECT_THAT(pair.at_server.values[i], ElementsAre(sequence));
  }
}

TEST(SimHub, ProvisionalPeersAreRenamed) {
  Pair pair(6, /*provisional=*/true);
  const NodeId provisional{.role = Role::kWorker, .rank = -2};
  EXPECT_FALSE(pair.server->Rename({Role::kWorker, -9}, kWorker));
  EXPECT_TRUE(pair.server->Rename(provisional, kWorker));
  pair.server->Send(kWorker, Numbered(1));
  pair.at_worker.Await(1);
  pair.worker->Send(kServer, Numbered(2));
  pair.at_server.Await(2);
  EXPECT_EQ(pair.at_server.log[1], "message worker 3");
}

TEST(SimHub, ADisconnectComesAfterTheLastMessage) {
  Pair pair(7);
  for (std::uint64_t i = 0; i < 50; ++i) pair.worker->Send(kServer, Numbered(i));
  pair.worker->Disconnect(kServer);
  pair.at_server.Await(52);
  EXPECT_EQ(pair.at_server.sequences.size(), 50u);
  EXPECT_THAT(pair.at_server.log.back(), HasSubstr("lost worker 3 host:2"));
  pair.server->Send(kWorker, Numbered(1));  // to nobody
  EXPECT_TRUE(pair.at_worker.log.empty());
}

TEST(SimHub, ACutIsALossOnBothSides) {
  Pair pair(8);
  pair.hub.Cut("host:2");
  pair.at_server.Await(2);
  pair.at_worker.Await(1);
  EXPECT_THAT(pair.at_server.log.back(), HasSubstr("cut"));
  EXPECT_THAT(pair.at_worker.log.back(), HasSubstr("lost server 0 host:1"));
  Events events;
  const auto late = pair.hub.MakeTransport({.self = {Role::kWorker, 1}, .address = ""}, events);
  EXPECT_THROW(late->Connect(kWorker, "host:2", steady_clock::now()), TimeoutError);
  EXPECT_THROW(pair.hub.MakeTransport({.self = kServer, .address = "host:1"}, events),
               NetworkError);
}

// Two runs of three integers.
class TwoRuns : public Landing {
 public:
  explicit TwoRuns(bool taken) : taken_(taken) {}
  std::span<const std::span<std::byte>> runs() override { return runs_; }
  bool BeginRead() override { return taken_; }
  void EndRead() override {}
  Payload Finish() override { return PayloadOf({first_[0], second_[0], second_[1]}); }

 private:
  bool taken_;
  std::int64_t first_[1] = {};
  std::int64_t second_[2] = {};
  std::span<std::byte> runs_[2] = {std::as_writable_bytes(std::span(first_)),
                                   std::as_writable_bytes(std::span(second_))};
};

TEST(SimHub, PayloadsLandWhereTheReceiverWants) {
  Pair pair(9);
  pair.at_server.landing = std::make_shared<TwoRuns>(true);
  pair.worker->Send(kServer, {.kind = Kind::kPush, .payload = PayloadOf({1, 2, 3})});
  pair.at_server.Await(2);
  EXPECT_THAT(pair.at_server.values, ElementsAre(ElementsAre(1, 2, 3)));
  // Given up: the message comes without it.
  pair.at_server.landing = std::make_shared<TwoRuns>(false);
  pair.worker->Send(kServer, {.kind = Kind::kPush, .payload = PayloadOf({1, 2, 3})});
  pair.at_server.Await(3);
  EXPECT_THAT(pair.at_server.values, ElementsAre(ElementsAre(1, 2, 3), ElementsAre()));
}

}  // namespace
}  // namespace heddle::kvstore::dist
