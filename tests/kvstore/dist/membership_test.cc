// How nodes join a job, meet at barriers, fail and leave: the scheduler's machine and a member's,
// by examples.
#include <heddle/logging.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/protocol/member.h"
#include "kvstore/dist/protocol/scheduler.h"
#include "kvstore/dist/protocol/wire.h"
#include "kvstore/dist/protocol/words.h"

namespace heddle::kvstore::dist_test {
namespace {

using namespace dist;  // NOLINT(google-build-using-namespace)
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::Pair;

constexpr NodeId kScheduler = {Role::kScheduler, 0};
NodeId Worker(std::int32_t rank) { return {Role::kWorker, rank}; }
NodeId Server(std::int32_t rank) { return {Role::kServer, rank}; }

// A scheduler whose inputs are written by hand. Every process has address "10.0.0.<n>:1" and
// incarnation n, and comes as rank -1 - n.
class SchedulerTest : public testing::Test {
 protected:
  void Make(std::int32_t workers, std::int32_t servers) {
    options_.num_workers = workers;
    options_.num_servers = servers;
    options_.address = "10.0.0.100:9";
    scheduler_.emplace(now_, options_);
  }
  static std::string Address(int n) { return "10.0.0." + std::to_string(n) + ":1"; }

  JoinBody JoinOf(int n, Role role, std::int32_t rank = -1) const {
    return {role,
            rank,
            static_cast<Incarnation>(n),
            Address(n),
            options_.num_workers,
            options_.num_servers};
  }
  Outputs Join(int n, const JoinBody& join) {
    return Say({join.role, -1 - n}, {.kind = Kind::kJoin, .meta = Encode(join)});
  }
  Outputs Join(int n, Role role, std::int32_t rank = -1) { return Join(n, JoinOf(n, role, rank)); }
  Outputs Say(NodeId from, Message message) {
    Outputs out;
    scheduler_->OnMessage(now_, from, message, out);
    return out;
  }
  Outputs Say(NodeId from, Kind kind, std::uint64_t sequence = 0) {
    return Say(from, Message{.kind = kind, .sequence = sequence});
  }
  Outputs ReportLost(NodeId from, NodeId lost) {
    return Say(from, {.kind = Kind::kPeerDown, .meta = Encode(FailureBody{lost, "", "reset"})});
  }
  Outputs SayOwnEnd(NodeId node, const std::string& why) {
    return Say(node, {.kind = Kind::kPeerDown, .meta = Encode(FailureBody{node, "", why})});
  }
  Outputs Lose(NodeId peer) {
    Outputs out;
    scheduler_->OnLost(now_, peer, "10.9.9.9:9", "connection reset", out);
    return out;
  }
  // Time goes by in the steps that the machine asks for; those who live give signs of it.
  Outputs Pass(Time time, const std::vector<NodeId>& alive) {
    Outputs out;
    const Time end = now_ + time;
    for (auto next = scheduler_->next_time(); next && *next <= end;
         next = scheduler_->next_time()) {
      now_ = std::max(now_, *next);
      Outputs ignored;
      for (const NodeId node : alive) {
        scheduler_->OnMessage(now_, node, {.kind = Kind::kHeartbeat}, ignored);
      }
      scheduler_->OnTime(now_, out);
    }
    now_ = end;
    return out;
  }
  // Two workers and a server that have joined.
  void StartJob() {
    Make(2, 1);
    Join(1, Role::kWorker);
    Join(2, Role::kWorker);
    Join(3, Role::kServer);
  }

  static std::vector<std::pair<NodeId, Kind>> Sent(const Outputs& out) {
    std::vector<std::pair<NodeId, Kind>> sent;
    for (const Outgoing& each : out.messages) sent.emplace_back(each.to, each.message.kind);
    return sent;
  }
  static std::string RefusalIn(const Outputs& out) {
    ErrorBody error;
    if (out.messages.size() != 1 || out.messages[0].message.kind != Kind::kRefused ||
        !Decode(out.messages[0].message.meta, &error) ||
        out.disconnects != std::vector{out.messages[0].to}) {
      return "not refused";
    }
    return error.message;
  }
  static std::string LogOf(const Outputs& out) {
    std::string all;
    for (const auto& [level, text] : out.log) all += text + "\n";
    return all;
  }
  std::string WhyFailed() const {
    const auto& failure = scheduler_->failure();
    return failure ? ToString(failure->node) + " at " + failure->address + ": " + failure->why
                   : "not failed";
  }

  Time now_ = seconds(1000);
  SchedulerOptions options_;
  std::optional<SchedulerMachine> scheduler_;
};

TEST_F(SchedulerTest, NobodyHearsAnythingUntilAllHaveJoined) {
  Make(2, 1);
  EXPECT_THAT(Sent(Join(1, Role::kWorker)), IsEmpty());
  EXPECT_THAT(Sent(Join(2, Role::kServer)), IsEmpty());
  const Outputs out = Join(3, Role::kWorker);
  EXPECT_THAT(Sent(out), ElementsAre(Pair(Server(0), Kind::kRoster), Pair(Worker(0), Kind::kRoster),
                                     Pair(Worker(1), Kind::kRoster)));
  EXPECT_THAT(out.renames, ElementsAre(Pair(Worker(-2), Worker(0)), Pair(Server(-3), Server(0)),
                                       Pair(Worker(-4), Worker(1))));
  RosterBody roster;
  ASSERT_TRUE(Decode(out.messages[2].message.meta, &roster));
  EXPECT_EQ(roster.rank, 1);
  EXPECT_EQ(roster.num_workers, 2);
  EXPECT_EQ(roster.num_servers, 1);
  EXPECT_THAT(roster.nodes, ElementsAre(NodeEntry{Server(0), 2, Address(2)}));
  ASSERT_TRUE(Decode(out.messages[0].message.meta, &roster));
  EXPECT_EQ(roster.rank, 0);
  EXPECT_THAT(roster.nodes,
              ElementsAre(NodeEntry{Server(0), 2, Address(2)}, NodeEntry{Worker(0), 1, Address(1)},
                          NodeEntry{Worker(1), 3, Address(3)}));
}

TEST_F(SchedulerTest, WantedRanksAreKeptAndTheOthersTakeWhatIsFreeInOrder) {
  Make(4, 1);
  Join(1, Role::kWorker);
  Join(2, Role::kWorker, 0);
  Join(3, Role::kServer);
  Join(4, Role::kWorker, 2);
  const Outputs out = Join(5, Role::kWorker);
  EXPECT_THAT(out.renames, testing::UnorderedElementsAre(
                               Pair(Worker(-2), Worker(1)), Pair(Worker(-3), Worker(0)),
                               Pair(Server(-4), Server(0)), Pair(Worker(-5), Worker(2)),
                               Pair(Worker(-6), Worker(3))));
}

TEST_F(SchedulerTest, ARepeatedJoinChangesNothingAndBringsTheRosterAgain) {
  Make(1, 1);
  EXPECT_THAT(Sent(Join(1, Role::kWorker)), IsEmpty());
  EXPECT_THAT(Sent(Join(1, Role::kWorker)), IsEmpty());
  EXPECT_EQ(Join(2, Role::kServer).messages.size(), 2u);
  EXPECT_THAT(Sent(Join(1, Role::kWorker)), ElementsAre(Pair(Worker(0), Kind::kRoster)));
}

TEST_F(SchedulerTest, ASecondProcessOfARankIsRefusedNamingBothAddresses) {
  Make(2, 1);
  Join(1, Role::kWorker, 1);
  EXPECT_THAT(RefusalIn(Join(2, Role::kWorker, 1)),
              AllOf(HasSubstr("worker 1"), HasSubstr(Address(1)), HasSubstr(Address(2))));
  Join(3, Role::kServer);
  EXPECT_EQ(Join(4, Role::kWorker, 0).messages.size(), 3u);  // the job goes on
  EXPECT_THAT(RefusalIn(Join(5, Role::kWorker, 1)),
              AllOf(HasSubstr("worker 1"), HasSubstr(Address(1)), HasSubstr(Address(5))));
  EXPECT_THAT(
      RefusalIn(Join(6, Role::kServer)),
      AllOf(HasSubstr("all 1 servers have joined and the job has begun"), HasSubstr(Address(6))));
  EXPECT_FALSE(scheduler_->failure());
}

TEST_F(SchedulerTest, WrongCountsAreRefusedNamingBoth) {
  Make(2, 1);
  JoinBody join = JoinOf(1, Role::kWorker);
  join.num_workers = 3;
  EXPECT_THAT(RefusalIn(Join(1, join)),
              AllOf(HasSubstr("2 workers and 1 servers"), HasSubstr("3 workers and 1 servers"),
                    HasSubstr(Address(1))));
  join.num_workers = 2;
  join.num_servers = 7;
  EXPECT_THAT(RefusalIn(Join(1, join)), HasSubstr("2 workers and 7 servers"));
  join.num_workers = join.num_servers = 0;  // was told nothing
  EXPECT_THAT(Sent(Join(1, join)), IsEmpty());
}

TEST_F(SchedulerTest, RanksAndRolesThatCannotBeAreRefused) {
  Make(2, 1);
  EXPECT_THAT(RefusalIn(Join(1, Role::kWorker, 2)), HasSubstr("expected a rank from 0 to 1"));
  EXPECT_THAT(RefusalIn(Join(1, Role::kWorker, -5)), HasSubstr("rank -5"));
  EXPECT_THAT(RefusalIn(Join(1, Role::kScheduler)),
              AllOf(HasSubstr("has a scheduler, 10.0.0.100:9"), HasSubstr(Address(1))));
  EXPECT_THAT(RefusalIn(Say(Worker(-2), {.kind = Kind::kJoin, .meta = "x"})),
              HasSubstr("cannot be read"));
  Join(1, Role::kServer);
  EXPECT_THAT(RefusalIn(Join(2, Role::kServer)), HasSubstr("all 1 servers have joined"));
}

TEST_F(SchedulerTest, TheStartDeadlineNamesWhoHasNotCome) {
  options_.start_timeout = milliseconds(20'200);
  Make(3, 2);
  Join(1, Role::kWorker, 1);
  Join(2, Role::kServer);
  const Outputs early = Pass(milliseconds(20'199), {Worker(-2), Server(-3)});
  EXPECT_FALSE(scheduler_->failure());
  EXPECT_THAT(LogOf(early), AllOf(HasSubstr("2 of 3 workers (ranks 0, 2)"),
                                  HasSubstr("1 of 2 servers,"), HasSubstr(Address(1))));
  const Outputs out = Pass(milliseconds(1), {Worker(-2), Server(-3)});
  EXPECT_THAT(WhyFailed(), AllOf(HasSubstr("did not begin within 20.2 s"),
                                 HasSubstr("2 of 3 workers (ranks 0, 2)"),
                                 HasSubstr("worker 1 (" + Address(1) + ")")));
  EXPECT_THAT(Sent(out),
              ElementsAre(Pair(Worker(-2), Kind::kJobFailed), Pair(Server(-3), Kind::kJobFailed)));
  EXPECT_THAT(RefusalIn(Join(5, Role::kWorker, 0)), HasSubstr("the job has failed"));
}

TEST_F(SchedulerTest, WithoutAStartDeadlineTheyHaveForever) {
  options_.start_timeout = Time{0};
  Make(2, 1);
  Join(1, Role::kWorker);
  Pass(std::chrono::hours(1), {Worker(-2)});
  EXPECT_FALSE(scheduler_->failure());
}

TEST_F(SchedulerTest, ABarrierIsDoneWhenEachWorkerHasCome) {
  StartJob();
  EXPECT_THAT(Sent(Say(Worker(1), Kind::kBarrier, 0)), IsEmpty());
  EXPECT_THAT(Sent(Say(Worker(1), Kind::kBarrier, 0)), IsEmpty());  // again: counts once
  const Outputs out = Say(Worker(0), Kind::kBarrier, 0);
  EXPECT_THAT(Sent(out), ElementsAre(Pair(Worker(0), Kind::kBarrierDone),
                                     Pair(Worker(1), Kind::kBarrierDone)));
  EXPECT_EQ(out.messages[0].message.sequence, 0u);
  // Who has not heard of it asks again.
  EXPECT_THAT(Sent(Say(Worker(1), Kind::kBarrier, 0)),
              ElementsAre(Pair(Worker(1), Kind::kBarrierDone)));
  EXPECT_THAT(Sent(Say(Server(0), Kind::kBarrier, 1)), IsEmpty());  // servers have none
}

TEST_F(SchedulerTest, BarriersThatOvertakeOneAnotherAreAllDone) {
  StartJob();
  Say(Worker(0), Kind::kBarrier, 1);  // so it has come to 0 as well
  Say(Worker(0), Kind::kBarrier, 0);
  const Outputs first = Say(Worker(1), Kind::kBarrier, 0);
  EXPECT_EQ(first.messages.size(), 2u);
  const Outputs second = Say(Worker(1), Kind::kBarrier, 1);
  ASSERT_EQ(second.messages.size(), 2u);
  EXPECT_EQ(second.messages[0].message.sequence, 1u);
}

TEST_F(SchedulerTest, AWorkerThatLeavesSatisfiesOpenAndLaterBarriers) {
  StartJob();
  Say(Worker(0), Kind::kBarrier, 0);
  EXPECT_THAT(Sent(Say(Worker(1), Kind::kLeaveJob)),
              ElementsAre(Pair(Worker(1), Kind::kDone), Pair(Worker(0), Kind::kBarrierDone)));
  EXPECT_THAT(Sent(Say(Worker(0), Kind::kBarrier, 1)),
              ElementsAre(Pair(Worker(0), Kind::kBarrierDone)));
}

TEST_F(SchedulerTest, AWorkerThatLeavesAfterItHasComeIsNotCountedForAnother) {
  Make(3, 1);
  for (int n = 1; n <= 3; ++n) Join(n, Role::kWorker);
  Join(4, Role::kServer);
  Say(Worker(0), Kind::kBarrier, 0);
  EXPECT_THAT(Sent(Say(Worker(0), Kind::kLeaveJob)), ElementsAre(Pair(Worker(0), Kind::kDone)));
  EXPECT_THAT(Sent(Say(Worker(1), Kind::kBarrier, 0)), IsEmpty());
  EXPECT_EQ(Say(Worker(2), Kind::kBarrier, 0).messages.size(), 2u);
}

TEST_F(SchedulerTest, BarriersAreDoneWithoutAWorkerThatHasComeToItsLast) {
  StartJob();
  const Message last{.kind = Kind::kBarrier, .flags = kFlagLast, .sequence = 0};
  EXPECT_THAT(Sent(Say(Worker(1), last)), IsEmpty()) << "nobody has called one";
  EXPECT_THAT(Sent(Say(Worker(1), last)), IsEmpty());  // again
  for (std::uint64_t number = 0; number < 3; ++number) {
    EXPECT_THAT(
        Sent(Say(Worker(0), Kind::kBarrier, number)),
        ElementsAre(Pair(Worker(0), Kind::kBarrierDone), Pair(Worker(1), Kind::kBarrierDone)));
    EXPECT_THAT(Sent(Say(Worker(1), last)), IsEmpty());  // late
  }
  EXPECT_THAT(Sent(Say(Worker(1), Kind::kLeaveJob)), ElementsAre(Pair(Worker(1), Kind::kDone)));
  EXPECT_THAT(Sent(Say(Worker(0), Kind::kBarrier, 3)),
              ElementsAre(Pair(Worker(0), Kind::kBarrierDone)));
}

TEST_F(SchedulerTest, AWorkerIsInTheBarriersBeforeItsLast) {
  Make(3, 1);
  for (int n = 1; n <= 3; ++n) Join(n, Role::kWorker);
  Join(4, Role::kServer);
  const std::vector<NodeId> all = {Worker(0), Worker(1), Worker(2), Server(0)};
  Say(Worker(0), {.kind = Kind::kBarrier, .flags = kFlagLast, .sequence = 2});
  Pass(seconds(11), all);
  EXPECT_EQ(Say(Worker(1), Kind::kBarrier, 0).messages.size(), 0u);
  EXPECT_THAT(LogOf(Pass(seconds(11), all)),
              AllOf(HasSubstr("come: worker 0, worker 1;"), HasSubstr("missing: worker 2")));
  EXPECT_EQ(Say(Worker(2), Kind::kBarrier, 0).messages.size(), 3u);
  EXPECT_EQ(Say(Worker(2), Kind::kBarrier, 2).messages.size(), 0u);
  EXPECT_EQ(Say(Worker(1), Kind::kBarrier, 1).messages.size(), 3u);
  EXPECT_THAT(LogOf(Pass(seconds(11), all)),
              AllOf(HasSubstr("barrier 2"), HasSubstr("come: worker 2; missing: worker 1 (")))
      << "worker 0 is not missing";
  EXPECT_EQ(Say(Worker(1), Kind::kBarrier, 2).messages.size(), 3u);
}

TEST_F(SchedulerTest, ABarrierNumberBeyondReasonFailsTheJobRatherThanLoopingForever) {
  StartJob();
  Say(Worker(0), Kind::kLeaveJob);
  Say(Worker(1), Kind::kBarrier, std::uint64_t{1} << 63);
  EXPECT_THAT(WhyFailed(), AllOf(HasSubstr("worker 1"), HasSubstr("9223372036854775808")));
}

TEST_F(SchedulerTest, AWaitingBarrierIsNamedWithWhoIsMissing) {
  StartJob();
  const std::vector<NodeId> all = {Worker(0), Worker(1), Server(0)};
  Pass(seconds(7), all);
  Say(Worker(0), Kind::kBarrier, 0);
  EXPECT_THAT(LogOf(Pass(seconds(9), all)), Not(HasSubstr("barrier")));
  EXPECT_THAT(LogOf(Pass(seconds(2), all)),
              AllOf(HasSubstr("barrier 0 has waited 10."), HasSubstr("come: worker 0;"),
                    HasSubstr("missing: worker 1 (" + Address(2) + ", last heard 0.")));
  EXPECT_THAT(LogOf(Pass(seconds(11), all)), HasSubstr("barrier 0"));  // again and again
  Say(Worker(1), Kind::kBarrier, 0);
  EXPECT_THAT(LogOf(Pass(seconds(30), all)), IsEmpty());
}

TEST_F(SchedulerTest, WhoAsksIsToldWhatWaits) {
  StartJob();
  Say(Worker(0), Kind::kBarrier, 0);
  TextBody text;
  const Outputs words = Say(Worker(0), Kind::kStatus);
  ASSERT_EQ(words.messages.size(), 1u);
  ASSERT_EQ(words.messages[0].message.kind, Kind::kStatusReply);
  ASSERT_TRUE(Decode(words.messages[0].message.meta, &text));
  // Who asks says by itself which barrier waits, and for how long.
  EXPECT_EQ(text.text,
            "come: worker 0; missing: worker 1 (" + Address(2) + ", last heard 0.0 s ago)");

  scheduler_->OnConnected(Worker(-99), "10.0.0.77:1");
  const Outputs json = Say(Worker(-99), Kind::kStatus);  // a stranger: a program
  ASSERT_TRUE(Decode(json.messages.at(0).message.meta, &text));
  const auto status = nlohmann::json::parse(text.text);
  EXPECT_EQ(status["phase"], "running");
  EXPECT_EQ(status["num_workers"], 2);
  EXPECT_EQ(status["barriers_done"], 0);
  ASSERT_EQ(status["nodes"].size(), 3u);
  EXPECT_EQ(status["nodes"][0]["role"], "worker");
  EXPECT_EQ(status["nodes"][0]["address"], Address(1));
  EXPECT_EQ(status["nodes"][0]["barriers"], 1);
  EXPECT_FALSE(status.contains("failure"));
  EXPECT_THAT(LogOf(Lose(Worker(-99))), IsEmpty());  // it has what it came for

  Say(Worker(1), Kind::kBarrier, 0);
  EXPECT_EQ(Say(Worker(0), Kind::kStatus).messages.at(0).message.sequence, 1u)
      << "barriers are done";

  scheduler_->OnConnected(Worker(-98), "10.0.0.78:1");
  EXPECT_THAT(LogOf(Lose(Worker(-98))), HasSubstr("which had not joined"));
  Lose(Worker(1));
  const auto failed = nlohmann::json::parse(scheduler_->Status(now_));
  EXPECT_EQ(failed["phase"], "failed");
  EXPECT_EQ(failed["failure"]["rank"], 1);
  EXPECT_EQ(failed["nodes"][1]["presence"], "gone");
}

TEST_F(SchedulerTest, WhatNodesSayOfThemselvesIsInTheStatusWithItsRates) {
  StartJob();
  const auto node = [this](std::size_t index) {
    return nlohmann::json::parse(scheduler_->Status(now_))["nodes"][index];
  };
  EXPECT_FALSE(node(0).contains("requests")) << "it has not said anything";
  const auto say = [this](NodeId from, const StateBody& state) {
    Say(from, {.kind = Kind::kHeartbeat, .meta = Encode(state)});
  };
  say(Server(0), {.requests = 10, .bytes = 1000, .rounds = 4, .waiting = 7});
  say(Worker(0), {.requests = 5, .bytes = 500, .waiting = 2});
  now_ += seconds(2);
  say(Server(0),
      {.requests = 30, .bytes = 5000, .rounds = 10, .stalled = 3, .stall = "key 'w' waits"});
  Say(Server(0), {.kind = Kind::kHeartbeat, .meta = "what cannot be read changes nothing"});
  const auto worker = node(0), server = node(2);
  EXPECT_EQ(worker["requests"], 5);
  EXPECT_EQ(worker["open_requests"], 2);
  EXPECT_EQ(worker["requests_per_second"], 0) << "of one heartbeat nothing follows";
  EXPECT_FALSE(worker.contains("rounds"));
  EXPECT_EQ(server["requests"], 30);
  EXPECT_EQ(server["requests_per_second"], 10);
  EXPECT_EQ(server["bytes"], 5000);
  EXPECT_EQ(server["bytes_per_second"], 2000);
  EXPECT_EQ(server["rounds"], 10);
  EXPECT_EQ(server["rounds_per_second"], 3);
  EXPECT_EQ(server["unfinished_bytes"], 0);
  EXPECT_EQ(server["stalled_parts"], 3);
  EXPECT_EQ(server["stall"], "key 'w' waits");
}

TEST_F(SchedulerTest, TheStatusOfVeryManyNodesFitsIntoAMessage) {
  constexpr int kWorkers = 5000;
  Make(kWorkers, 1);
  for (int n = 1; n <= kWorkers; ++n) Join(n, Role::kWorker);
  Join(kWorkers + 1, Role::kServer);
  const std::string text = scheduler_->Status(now_);
  EXPECT_LE(Encode(TextBody{text}).size(), kMetaBytesMax);
  const auto status = nlohmann::json::parse(text);
  EXPECT_GT(status["nodes"].size(), 1000u);
  EXPECT_EQ(status["nodes"].back()["role"], "server") << "of workers there are enough";
  EXPECT_EQ(status["nodes"].size() + status["nodes_left_out"].get<std::size_t>(),
            static_cast<std::size_t>(kWorkers) + 1);
}

TEST_F(SchedulerTest, StatusIsJsonWhateverAddressesHold) {
  Make(1, 1);
  JoinBody join = JoinOf(1, Role::kWorker);
  join.address = "\xff\xfe\"\n";
  Join(1, join);
  EXPECT_FALSE(nlohmann::json::parse(scheduler_->Status(now_)).empty());
}

TEST_F(SchedulerTest, HeartbeatsAreAnswered) {
  StartJob();
  const Outputs out = Say(Worker(1), Kind::kHeartbeat, 7);
  ASSERT_THAT(Sent(out), ElementsAre(Pair(Worker(1), Kind::kHeartbeat)));
  EXPECT_EQ(out.messages[0].message.sequence, 7u);
  EXPECT_THAT(Sent(Say(Worker(-3), Kind::kHeartbeat)),  // under its old name
              ElementsAre(Pair(Worker(1), Kind::kHeartbeat)));
}

TEST_F(SchedulerTest, ANodeSilentForThreeSecondsFailsTheJobByName) {
  StartJob();
  const Outputs out = Pass(seconds(4), {Worker(0), Server(0)});
  EXPECT_THAT(WhyFailed(),
              AllOf(HasSubstr("worker 1 at " + Address(2)), HasSubstr("silent for 3")));
  EXPECT_THAT(Sent(out),
              ElementsAre(Pair(Worker(0), Kind::kJobFailed), Pair(Worker(1), Kind::kJobFailed),
                          Pair(Server(0), Kind::kJobFailed)));
}

// Before the job begins and after it has, and wherever its last sign was between two looks at the
// time.
TEST_F(SchedulerTest, ASilentNodeIsNamedWithinThreeHeartbeatsAndASecond) {
  const std::vector<NodeId> all = {Worker(-2), Worker(-3), Server(-4)};
  const auto fall_silent = [&](std::size_t silent, int workers, milliseconds heartbeat, Time late) {
    options_.heartbeat_every = heartbeat;
    options_.dead_after = 3 * heartbeat;
    Make(workers, 1);
    for (int n = 1; n <= 3; ++n) Join(n, n < 3 ? Role::kWorker : Role::kServer);
    Pass(2 * heartbeat + late, all);
    for (const NodeId node : all) Say(node, Kind::kHeartbeat);
    std::vector<NodeId> others = all;
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(silent));
    Pass(3 * heartbeat - milliseconds(1), others);
    EXPECT_EQ(WhyFailed(), "not failed");
    Pass(milliseconds(1) + seconds(1), others);
    EXPECT_THAT(WhyFailed(), HasSubstr(Address(static_cast<int>(silent) + 1) + ": silent for"));
  };
  for (std::size_t silent = 0; silent < all.size(); ++silent) {
    for (const int workers : {2, 3}) {  // of which two come
      for (const milliseconds heartbeat :
           {milliseconds(100), milliseconds(1000), milliseconds(5000)}) {
        for (int late = 0; late < 20; ++late) {
          SCOPED_TRACE(testing::Message() << ToString(all[silent]) << " of " << workers
                                          << " workers, a heartbeat each " << heartbeat.count()
                                          << " ms, late by " << late << "/20");
          fall_silent(silent, workers, heartbeat, late * heartbeat / 20);
        }
      }
    }
  }
}

TEST_F(SchedulerTest, WhoIsHeardOfNowAndThenIsAlive) {
  StartJob();
  for (int i = 0; i < 10; ++i) {
    Pass(milliseconds(2900), {});
    for (const NodeId node : {Worker(0), Worker(1), Server(0)}) Say(node, Kind::kHeartbeat);
  }
  EXPECT_FALSE(scheduler_->failure());
}

TEST_F(SchedulerTest, ASchedulerThatStoodStillTakesNobodyForDead) {
  StartJob();
  Pass(seconds(1), {Worker(0), Worker(1), Server(0)});
  now_ += seconds(60);
  Outputs out;
  scheduler_->OnTime(now_, out);
  EXPECT_EQ(WhyFailed(), "not failed");
  Pass(seconds(4), {Worker(0), Server(0)});  // and is not fooled for good
  EXPECT_THAT(WhyFailed(), HasSubstr("worker 1"));
}

TEST_F(SchedulerTest, ALostConnectionFailsTheJobAtOnce) {
  StartJob();
  const Outputs out = Lose(Server(0));
  EXPECT_THAT(WhyFailed(), HasSubstr("server 0 at " + Address(3) +
                                     ": its connection was lost: "
                                     "connection reset"));
  EXPECT_THAT(Sent(out),
              ElementsAre(Pair(Worker(0), Kind::kJobFailed), Pair(Worker(1), Kind::kJobFailed)));
  FailureBody told;
  ASSERT_TRUE(Decode(out.messages[0].message.meta, &told));
  EXPECT_EQ(told.node, Server(0));
  EXPECT_EQ(told.address, Address(3));
}

TEST_F(SchedulerTest, AProcessLostBeforeTheStartFailsTheJobIfItHadJoined) {
  Make(2, 1);
  scheduler_->OnConnected(Worker(-9), Address(9));
  Lose(Worker(-9));  // has never joined
  EXPECT_FALSE(scheduler_->failure());
  Join(1, Role::kWorker);
  Lose(Worker(-2));
  EXPECT_THAT(WhyFailed(), HasSubstr("a worker at " + Address(1)));
}

TEST_F(SchedulerTest, ALostPeerThatTheSchedulerStillHearsIsBelievedAfterAMoment) {
  StartJob();
  const std::vector<NodeId> all = {Worker(0), Worker(1), Server(0)};
  EXPECT_THAT(Sent(ReportLost(Worker(0), Server(0))), IsEmpty());
  ReportLost(Worker(1), Server(0));
  Pass(milliseconds(400), all);
  EXPECT_FALSE(scheduler_->failure());
  Pass(milliseconds(200), all);
  EXPECT_THAT(WhyFailed(), AllOf(HasSubstr("server 0 at " + Address(3)), HasSubstr("worker 0 ("),
                                 HasSubstr("has lost it: reset")));
}

TEST_F(SchedulerTest, TheFirstCauseIsNamedEvenIfAnEffectIsReportedFirst) {
  StartJob();
  ReportLost(Server(0), Worker(0));  // since worker 0 ended, because
  Lose(Worker(1));                   // worker 1 had died
  EXPECT_THAT(WhyFailed(), HasSubstr("worker 1"));
  Pass(seconds(2), {Worker(0), Server(0)});
  EXPECT_THAT(WhyFailed(), HasSubstr("worker 1"));  // the first failure stays
}

// Worker 0 ends because it has lost the server, and the scheduler sees that first.
TEST_F(SchedulerTest, WhoEndsBecauseItHasLostAnotherIsNotTheCause) {
  StartJob();
  ReportLost(Worker(1), Server(0));
  ReportLost(Worker(0), Server(0));
  Lose(Worker(0));
  Lose(Worker(1));
  EXPECT_FALSE(scheduler_->failure());
  Lose(Server(0));
  EXPECT_THAT(WhyFailed(), HasSubstr("server 0 at " + Address(3)));
}

TEST_F(SchedulerTest, ItsWordCountsIfNothingElseIsSeenOfTheOther) {
  StartJob();
  ReportLost(Worker(0), Server(0));
  Lose(Worker(0));
  Pass(seconds(1), {Worker(1), Server(0)});
  EXPECT_THAT(WhyFailed(), AllOf(HasSubstr("server 0 at " + Address(3)), HasSubstr("worker 0")));
}

// The job fails when the node's process has ended, so that a launcher sees that first.
TEST_F(SchedulerTest, ANodeMayReportItself) {
  StartJob();
  SayOwnEnd(Worker(1), "its program threw std::bad_alloc");
  ReportLost(Server(0), Worker(1));  // which sees the end sooner than the scheduler
  EXPECT_FALSE(scheduler_->failure());
  Lose(Worker(1));
  EXPECT_THAT(WhyFailed(), HasSubstr("worker 1 at " + Address(2) + ": its program threw"));
}

TEST_F(SchedulerTest, ANodeThatReportsItselfAndGoesOnIsBelievedAfterAMoment) {
  StartJob();
  const std::vector<NodeId> all = {Worker(0), Worker(1), Server(0)};
  SayOwnEnd(Worker(1), "its program threw std::bad_alloc");
  Pass(milliseconds(400), all);
  EXPECT_FALSE(scheduler_->failure());
  Pass(milliseconds(200), all);
  EXPECT_THAT(WhyFailed(), HasSubstr("worker 1 at " + Address(2) + ": its program threw"));
}

// Its program ended by the NetworkError that it got for the lost server.
TEST_F(SchedulerTest, WhoReportsItselfAfterItHasLostAnotherIsNotTheCause) {
  StartJob();
  ReportLost(Worker(1), Server(0));
  SayOwnEnd(Worker(1), "its process exited with status 1");
  EXPECT_FALSE(scheduler_->failure());
  Lose(Worker(1));
  EXPECT_FALSE(scheduler_->failure());
  Lose(Server(0));
  EXPECT_THAT(WhyFailed(), HasSubstr("server 0 at " + Address(3)));
}

TEST_F(SchedulerTest, ReportsAboutStrangersAndThoseWhoLeftMeanNothing) {
  StartJob();
  Say(Worker(1), Kind::kLeaveJob);
  ReportLost(Server(0), Worker(1));
  ReportLost(Server(0), Worker(17));
  ReportLost(Worker(-77), Server(0));  // by a stranger
  Pass(seconds(2), {Worker(0), Server(0)});
  EXPECT_FALSE(scheduler_->failure());
}

// Its process has exited with a status other than 0.
TEST_F(SchedulerTest, AWorkerMayReportItselfAlsoWhenItHasLeft) {
  StartJob();
  Say(Worker(1), Kind::kLeaveJob);
  SayOwnEnd(Worker(1), "its process exited with status 3");
  EXPECT_FALSE(scheduler_->failure());
  Lose(Worker(1));
  EXPECT_THAT(WhyFailed(), HasSubstr("worker 1 at " + Address(2) + ": its process exited"));
}

TEST_F(SchedulerTest, ABadEndIsNotForgottenWhenTheOthersLeaveBeforeItIsSeen) {
  StartJob();
  Say(Worker(1), Kind::kLeaveJob);
  SayOwnEnd(Worker(1), "its process exited with status 3");
  Say(Worker(0), Kind::kLeaveJob);
  EXPECT_THAT(WhyFailed(), HasSubstr("worker 1 at " + Address(2) + ": its process exited"));
}

TEST_F(SchedulerTest, AReportAboutAWorkerThatThenLeavesIsForgotten) {
  StartJob();
  ReportLost(Server(0), Worker(1));
  Say(Worker(1), Kind::kLeaveJob);
  Pass(seconds(2), {Worker(0), Server(0)});
  EXPECT_FALSE(scheduler_->failure());
}

TEST_F(SchedulerTest, MessagesOfAnotherIncarnationAreRefusedByName) {
  StartJob();
  const Outputs out =
      Say(Worker(1), {.kind = Kind::kLeaveJob, .rank = 1, .incarnation = 0xabc, .sequence = 0});
  ASSERT_THAT(Sent(out), ElementsAre(Pair(Worker(1), Kind::kError)));
  ErrorBody error;
  ASSERT_TRUE(Decode(out.messages[0].message.meta, &error));
  EXPECT_EQ(error.code, ErrorBody::Code::kInvalidState);
  EXPECT_THAT(error.message, AllOf(HasSubstr("worker 1"), HasSubstr("0000000000000002"),
                                   HasSubstr("0000000000000abc")));
  EXPECT_THAT(Sent(Say(Worker(0), Kind::kBarrier, 0)), IsEmpty());  // it has not left
}

TEST_F(SchedulerTest, WhenAllWorkersHaveLeftTheServersEndAndThenTheScheduler) {
  StartJob();
  EXPECT_THAT(Sent(Say(Worker(0), Kind::kLeaveJob)), ElementsAre(Pair(Worker(0), Kind::kDone)));
  EXPECT_THAT(Sent(Say(Worker(0), Kind::kLeaveJob)), ElementsAre(Pair(Worker(0), Kind::kDone)));
  EXPECT_THAT(Sent(Lose(Worker(0))), IsEmpty());
  EXPECT_THAT(Sent(Say(Worker(1), Kind::kLeaveJob)),
              ElementsAre(Pair(Worker(1), Kind::kDone), Pair(Server(0), Kind::kShutdown)));
  // If that was lost, the next sign of life brings it again.
  EXPECT_THAT(Sent(Say(Server(0), Kind::kHeartbeat)),
              ElementsAre(Pair(Server(0), Kind::kShutdown), Pair(Server(0), Kind::kHeartbeat)));
  EXPECT_FALSE(scheduler_->done());
  Say(Server(0), Kind::kShutdownDone);
  EXPECT_TRUE(scheduler_->done());
  EXPECT_FALSE(scheduler_->failure());
  EXPECT_EQ(scheduler_->next_time(), std::nullopt);
}

TEST_F(SchedulerTest, AServerThatIsGoneAfterItWasToldToEndHasEnded) {
  StartJob();
  Say(Worker(0), Kind::kLeaveJob);
  Say(Worker(1), Kind::kLeaveJob);
  Lose(Server(0));
  EXPECT_TRUE(scheduler_->done());
  EXPECT_FALSE(scheduler_->failure());
}

TEST_F(SchedulerTest, AServerThatSaysNothingWhenToldToEndDoesNotHoldUpTheEnd) {
  StartJob();
  Say(Worker(0), Kind::kLeaveJob);
  Say(Worker(1), Kind::kLeaveJob);
  const Outputs out = Pass(seconds(4), {});
  EXPECT_TRUE(scheduler_->done());
  EXPECT_FALSE(scheduler_->failure());
  EXPECT_THAT(LogOf(out), HasSubstr("server 0 at " + Address(3)));
}

TEST_F(SchedulerTest, AfterAFailureItStaysUntilAllAreGoneOrForAWhile) {
  StartJob();
  Lose(Worker(0));
  EXPECT_FALSE(scheduler_->done());
  EXPECT_THAT(Sent(Say(Worker(1), Kind::kHeartbeat)),  // it may not have heard
              ElementsAre(Pair(Worker(1), Kind::kJobFailed), Pair(Worker(1), Kind::kHeartbeat)));
  Lose(Worker(1));
  EXPECT_FALSE(scheduler_->done());
  Lose(Server(0));
  EXPECT_TRUE(scheduler_->done());

  StartJob();
  Lose(Worker(0));
  Pass(seconds(4), {Worker(1), Server(0)});
  EXPECT_TRUE(scheduler_->done());
  EXPECT_THAT(WhyFailed(), HasSubstr("worker 0"));
}

TEST_F(SchedulerTest, AfterAFailureItStaysForThoseWhoHaveNotJoined) {
  const auto fail = [this] {
    Make(2, 1);
    Join(1, Role::kWorker);
    scheduler_->OnConnected(Worker(-3), Address(2));
    Lose(Worker(-2));
    EXPECT_THAT(WhyFailed(), HasSubstr(Address(1)));
    EXPECT_FALSE(scheduler_->done());
  };
  fail();
  EXPECT_THAT(RefusalIn(Join(2, Role::kWorker)),
              AllOf(HasSubstr("the job has failed"), HasSubstr(Address(1))));
  EXPECT_FALSE(scheduler_->done());  // the server is not even connected
  EXPECT_THAT(RefusalIn(Join(3, Role::kServer)), HasSubstr(Address(1)));
  EXPECT_TRUE(scheduler_->done());

  fail();
  Lose(Worker(-3));
  EXPECT_THAT(RefusalIn(Join(3, Role::kServer)), HasSubstr(Address(1)));
  EXPECT_FALSE(scheduler_->done());  // it may come again
  Pass(options_.linger, {});
  EXPECT_TRUE(scheduler_->done());

  options_.start_timeout = seconds(10);
  Make(2, 1);
  Join(1, Role::kWorker);
  Pass(seconds(9), {Worker(-2)});
  Lose(Worker(-2));
  EXPECT_FALSE(scheduler_->done());
  Pass(seconds(1), {});
  EXPECT_TRUE(scheduler_->done());  // nobody can join any more

  fail();
  Outputs out;
  scheduler_->Abort(now_, "it was interrupted by a signal", out);  // changes nothing
  Join(2, Role::kWorker);
  EXPECT_FALSE(scheduler_->done());

  Make(2, 1);
  Join(1, Role::kWorker);
  scheduler_->Abort(now_, "it was interrupted by a signal", out);
  Lose(Worker(-2));
  EXPECT_TRUE(scheduler_->done());  // nobody is awaited any more
}

TEST_F(SchedulerTest, ASchedulerThatIsToldToEndSaysSo) {
  StartJob();
  Outputs out;
  scheduler_->Abort(now_, "it was interrupted by a signal", out);
  EXPECT_EQ(WhyFailed(), "the scheduler at 10.0.0.100:9: it was interrupted by a signal");
  EXPECT_EQ(out.messages.size(), 3u);
}

TEST_F(SchedulerTest, ItsStateIsPutInWords) {
  StartJob();
  Say(Worker(0), Kind::kBarrier, 0);
  Say(Worker(1), Kind::kLeaveJob);
  now_ += milliseconds(1500);
  const std::string text = scheduler_->DescribeState(now_);
  EXPECT_THAT(text,
              AllOf(HasSubstr("1 barriers done"),
                    HasSubstr("worker 0 (" + Address(1) + ", last heard 1.5 s ago)"),
                    HasSubstr("worker 1 (" + Address(2) + ", last heard 1.5 s ago), has left"),
                    HasSubstr("server 0")));
}

TEST(Words, LongListsAreCutAndRanksAreRuns) {
  EXPECT_EQ(Ranks({4}), "rank 4");
  EXPECT_EQ(Ranks({0, 2, 3, 4, 9}), "ranks 0, 2-4, 9");
  EXPECT_EQ(JoinWords(std::vector<std::string>(14, "a")),
            "a, a, a, a, a, a, a, a, a, a, a, a and 2 more");
}

// A member whose scheduler is written by hand.
class MemberTest : public testing::Test {
 protected:
  void Make(Role role) {
    options_.join = {role, -1, 42, "10.0.0.1:1", 1, 1};
    options_.scheduler_address = "10.0.0.100:9";
    member_.emplace(options_);
  }
  std::vector<Kind> Join() {
    Outputs out;
    member_->Join(now_, out);
    return Kinds(out);
  }
  std::vector<Kind> Hear(Message message) {
    Outputs out;
    member_->OnMessage(now_, message, out);
    return Kinds(out);
  }
  std::vector<Kind> Pass(Time time, bool scheduler_lives = true) {
    Outputs out;
    const Time end = now_ + time;
    while (now_ < end) {
      const auto next = member_->next_time();
      now_ = next ? std::min(std::max(now_, *next), end) : end;
      member_->OnTime(now_, out);
      if (scheduler_lives) Hear({.kind = Kind::kHeartbeat});
    }
    return Kinds(out);
  }
  Message Roster() const {
    RosterBody roster;
    roster.rank = 3;
    roster.num_workers = 4;
    roster.num_servers = 1;
    roster.slice_bytes = 1;
    return {.kind = Kind::kRoster, .meta = Encode(roster)};
  }
  static std::vector<Kind> Kinds(const Outputs& out) {
    std::vector<Kind> kinds;
    for (const Outgoing& each : out.messages) {
      EXPECT_EQ(each.to, kScheduler);
      EXPECT_EQ(each.message.incarnation, 42u);
      kinds.push_back(each.message.kind);
    }
    return kinds;
  }
  std::string WhyFailed() const {
    const auto& failure = member_->failure();
    return failure ? ToString(failure->node) + " at " + failure->address + ": " + failure->why
                   : "not failed";
  }

  Time now_ = seconds(1000);
  MemberOptions options_;
  std::optional<Member> member_;
};

TEST_F(MemberTest, JoinsUntilTheRosterComes) {
  Make(Role::kWorker);
  EXPECT_THAT(Join(), ElementsAre(Kind::kJoin));
  EXPECT_EQ(member_->self(), Worker(-1));
  EXPECT_THAT(Pass(seconds(1)), ElementsAre(Kind::kHeartbeat, Kind::kJoin));
  Hear(Roster());
  ASSERT_TRUE(member_->roster());
  EXPECT_EQ(member_->self(), Worker(3));
  EXPECT_THAT(Pass(seconds(2)), ElementsAre(Kind::kHeartbeat, Kind::kHeartbeat));
}

TEST_F(MemberTest, ARefusalIsItsOwnFailureAndSaysWhy) {
  Make(Role::kServer);
  Join();
  Hear({.kind = Kind::kRefused,
        .meta = Encode(ErrorBody{ErrorBody::Code::kInvalidState, "server 0 has joined already"})});
  EXPECT_TRUE(member_->refused());
  EXPECT_EQ(WhyFailed(),
            "the scheduler at 10.0.0.100:9: refused this process: server 0 has joined already");
  EXPECT_EQ(member_->next_time(), std::nullopt);
}

TEST_F(MemberTest, HearsOfTheJobsFailureAndKeepsTheFirst) {
  Make(Role::kWorker);
  Join();
  Hear(Roster());
  Hear({.kind = Kind::kJobFailed, .meta = Encode(FailureBody{Server(2), "10.0.0.5:1", "silent"})});
  Hear({.kind = Kind::kJobFailed, .meta = Encode(FailureBody{Worker(1), "", "other"})});
  member_->OnSchedulerLost(now_, "reset");
  EXPECT_EQ(WhyFailed(), "server 2 at 10.0.0.5:1: silent");
  EXPECT_FALSE(member_->refused());
}

TEST_F(MemberTest, AFailureThatCannotBeReadIsStillAFailure) {
  Make(Role::kWorker);
  Join();
  Hear({.kind = Kind::kJobFailed, .meta = "?"});
  EXPECT_THAT(WhyFailed(), HasSubstr("cannot be read"));
}

TEST_F(MemberTest, ASilentSchedulerIsNamed) {
  Make(Role::kWorker);
  Join();
  Hear(Roster());
  Pass(seconds(10));
  EXPECT_FALSE(member_->failure());
  Pass(seconds(4), /*scheduler_lives=*/false);
  EXPECT_THAT(WhyFailed(), HasSubstr("the scheduler at 10.0.0.100:9: silent for 3.0 s"));
}

// Wherever its last answer was between two of this node's heartbeats.
TEST_F(MemberTest, ASilentSchedulerIsNamedAfterThreeSecondsAndNotAHeartbeatLater) {
  for (const int late_ms : {0, 1, 500, 999}) {
    Make(Role::kWorker);
    Join();
    Hear(Roster());
    Pass(seconds(2));
    now_ += milliseconds(late_ms);
    Hear({.kind = Kind::kHeartbeat});
    Pass(milliseconds(2999), /*scheduler_lives=*/false);
    EXPECT_FALSE(member_->failure()) << late_ms;
    Pass(milliseconds(1), /*scheduler_lives=*/false);
    EXPECT_TRUE(member_->failure()) << late_ms;
  }
}

TEST_F(MemberTest, ALostSchedulerIsNamed) {
  Make(Role::kWorker);
  Join();
  member_->OnSchedulerLost(now_, "connection reset");
  EXPECT_EQ(WhyFailed(),
            "the scheduler at 10.0.0.100:9: its connection was lost: connection reset");
}

TEST_F(MemberTest, AProcessThatStoodStillDoesNotTakeTheSchedulerForDead) {
  Make(Role::kWorker);
  Join();
  Hear(Roster());
  now_ += seconds(60);
  Outputs out;
  member_->OnTime(now_, out);
  EXPECT_FALSE(member_->failure());
  EXPECT_THAT(Kinds(out), ElementsAre(Kind::kHeartbeat));  // at once
  Pass(seconds(4), /*scheduler_lives=*/false);
  EXPECT_TRUE(member_->failure());
}

TEST_F(MemberTest, AStartThatTakesTooLongSaysWhatTheSchedulerKnows) {
  options_.start_timeout = seconds(10);
  Make(Role::kWorker);
  Join();
  EXPECT_THAT(Pass(seconds(6)), testing::Contains(Kind::kStatus));
  Hear({.kind = Kind::kStatusReply, .meta = Encode(TextBody{"missing: worker 1"})});
  Pass(seconds(3));
  EXPECT_FALSE(member_->failure());
  Pass(seconds(1));
  EXPECT_THAT(WhyFailed(), HasSubstr("did not begin within 10.0 s: missing: worker 1"));
}

// Connecting has taken most of the deadline: it does not begin anew.
TEST_F(MemberTest, TheStartDeadlineCountsFromTheStart) {
  options_.start_timeout = seconds(10);
  Make(Role::kWorker);
  const Time started = now_;
  now_ += milliseconds(9700);
  Outputs out;
  member_->Join(now_, out, started);
  EXPECT_LE(member_->next_time(), started + seconds(10));
  Pass(milliseconds(299));
  EXPECT_FALSE(member_->failure());
  Pass(milliseconds(1));
  EXPECT_THAT(WhyFailed(), HasSubstr("did not begin within 10.0 s"));
}

TEST_F(MemberTest, AWorkerLeavesUntilTheSchedulerHasHeardIt) {
  Make(Role::kWorker);
  Join();
  Hear(Roster());
  member_->OnLeft(now_);
  EXPECT_THAT(Pass(seconds(1)), ElementsAre(Kind::kHeartbeat, Kind::kLeaveJob));
  EXPECT_FALSE(member_->left());
  Hear({.kind = Kind::kDone});
  EXPECT_TRUE(member_->left());
  EXPECT_EQ(member_->next_time(), std::nullopt);
  member_->OnSchedulerLost(now_, "closed");
  EXPECT_FALSE(member_->failure());
}

TEST_F(MemberTest, ASchedulerThatEndsWhileAWorkerLeavesIsNoFailure) {
  Make(Role::kWorker);
  Join();
  Hear(Roster());
  Hear({.kind = Kind::kDone});  // not of a leave
  EXPECT_FALSE(member_->left());
  member_->OnLeft(now_);
  member_->OnSchedulerLost(now_, "closed");
  EXPECT_TRUE(member_->left());
  EXPECT_FALSE(member_->failure());
}

TEST_F(MemberTest, AServerEndsWhenTold) {
  Make(Role::kServer);
  Join();
  Hear(Roster());
  EXPECT_FALSE(member_->shutdown_wanted());
  Hear({.kind = Kind::kShutdown});
  EXPECT_TRUE(member_->shutdown_wanted());
  Outputs out;
  member_->ShutDown(out);
  EXPECT_THAT(Kinds(out), ElementsAre(Kind::kShutdownDone));
  EXPECT_THAT(Hear({.kind = Kind::kShutdown}), ElementsAre(Kind::kShutdownDone));
  member_->OnSchedulerLost(now_, "closed");
  EXPECT_FALSE(member_->failure());
}

TEST_F(MemberTest, AWorkerIsNotShutDown) {
  Make(Role::kWorker);
  Join();
  Hear(Roster());
  Hear({.kind = Kind::kShutdown});
  EXPECT_FALSE(member_->shutdown_wanted());
}

TEST_F(MemberTest, TellsOfItsOwnEnd) {
  Make(Role::kWorker);
  Join();
  Hear(Roster());
  Outputs out;
  member_->Fail("its program threw std::bad_alloc", out);
  ASSERT_THAT(Kinds(out), ElementsAre(Kind::kPeerDown));
  FailureBody body;
  ASSERT_TRUE(Decode(out.messages[0].message.meta, &body));
  EXPECT_EQ(body.node, Worker(3));
  EXPECT_EQ(body.address, "10.0.0.1:1");
  EXPECT_EQ(body.why, "its program threw std::bad_alloc");
}

// What an exception says may be as long as it likes, and have lines.
TEST_F(MemberTest, TellsOfItsOwnEndInOneBoundedLine) {
  const auto told = [&](const std::string& why) {
    Make(Role::kWorker);
    Join();
    Hear(Roster());
    Outputs out;
    member_->Fail(why, out);
    FailureBody body;
    EXPECT_TRUE(out.messages.size() == 1 && Decode(out.messages[0].message.meta, &body));
    return body.why;
  };
  EXPECT_EQ(told("one\r\ntwo\x1b[31m\tthree"), "one two [31m three");
  EXPECT_EQ(told("ends \n"), "ends");
  EXPECT_EQ(told(std::string(1000, 'x')), std::string(1000, 'x'));
  EXPECT_EQ(told(std::string(1001, 'x')), std::string(1000, 'x') + "...");
  // Not in the midst of a letter: of the 334th of three bytes only one would have room.
  std::string letters;
  for (int i = 0; i < 100000; ++i) letters += "\u2713";
  EXPECT_EQ(told(letters), letters.substr(0, 999) + "...");
  EXPECT_EQ(told(std::string(5000, '\x80')).size(), 1003U);  // no text at all
}

TEST_F(MemberTest, TellsOfABadEndAlsoWhenItHasLeft) {
  Make(Role::kWorker);
  Join();
  Hear(Roster());
  member_->OnLeft(now_);
  Hear({.kind = Kind::kDone});
  ASSERT_TRUE(member_->left());
  Outputs out;
  member_->Fail("its process exited with status 3", out);
  EXPECT_THAT(Kinds(out), ElementsAre(Kind::kPeerDown));
}

TEST_F(MemberTest, ItsStateIsPutInWords) {
  Make(Role::kWorker);
  now_ += seconds(100);
  EXPECT_THAT(member_->DescribeState(now_),
              AllOf(HasSubstr("10.0.0.100:9, not reached so far"), Not(HasSubstr("last heard")),
                    Not(HasSubstr("waited"))));
  Join();
  now_ += seconds(2);
  EXPECT_THAT(member_->DescribeState(now_),
              AllOf(HasSubstr("a worker"), HasSubstr("10.0.0.100:9"),
                    HasSubstr("has waited 2.0 s for the job to begin")));
}

}  // namespace
}  // namespace heddle::kvstore::dist_test
