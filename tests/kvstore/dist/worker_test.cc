// What a worker sends, holds back, sends again and answers.
#include "kvstore/dist/protocol/worker.h"

#include <heddle/error.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvstore/dist/protocol/bodies.h"
#include "tests/kvstore/dist/integer_parts.h"
#include "tests/kvstore/dist/small_job.h"

namespace heddle::kvstore::dist {
namespace {

using std::chrono::seconds;
using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;
using testing::Not;
using Values = std::vector<std::int64_t>;

std::size_t CountOf(const SmallJob& job, Kind kind) {
  return static_cast<std::size_t>(
      std::count_if(job.queue.begin(), job.queue.end(),
                    [&](const SmallJob::Envelope& e) { return e.message.kind == kind; }));
}

TEST(WorkerMachine, KeepsTwoPushesAheadOfTheRoundsThatItKnows) {
  SmallJob job(2);
  job.Init(0, 0, {0});
  job.Init(1, 0, {0});
  job.Run();
  for (int i = 0; i < 5; ++i) job.Push(0, 0, {i});
  const auto pull = job.Pull(0, 0);
  EXPECT_EQ(CountOf(job, Kind::kPush), 2u);
  EXPECT_EQ(CountOf(job, Kind::kPull), 0u) << "in order, behind the pushes";
  job.Run();
  for (int i = 0; i < 5; ++i) {
    EXPECT_FALSE(job.Answered(pull));
    job.Push(1, 0, {10 * i});
    job.Run();
  }
  EXPECT_EQ(job.ValueOf(pull), Values({44}));
}

TEST(WorkerMachine, KeepsToTheWindowOfAPart) {
  SmallJob job(1);
  job.Init(0, 0, {0});
  job.Run();
  std::vector<std::uint64_t> pulls;
  for (std::uint64_t i = 0; i < 3 * kRequestsAheadMax; ++i) pulls.push_back(job.Pull(0, 0));
  EXPECT_EQ(job.queue.size(), kRequestsAheadMax);
  job.Run();
  for (const std::uint64_t pull : pulls) EXPECT_EQ(job.ValueOf(pull), Values({0}));
}

TEST(WorkerMachine, UrgentRequestsLendTheirPriorityToThoseBeforeThem) {
  SmallJob job(2);
  job.Init(0, 0, {0});
  job.Init(1, 0, {0});
  job.Run();
  job.Push(0, 0, {1});
  job.Push(0, 0, {2});
  job.Push(0, 0, {3});
  job.Submit(0, {.kind = Kind::kPull, .part = SmallJob::IdOf(0), .priority = 9});
  job.Run();
  job.Push(1, 0, {1});
  while (!job.queue.empty() && CountOf(job, Kind::kPull) == 0) {
    const SmallJob::Envelope envelope = job.queue.front();
    job.queue.pop_front();
    job.Deliver(envelope);
  }
  const auto third =
      std::find_if(job.queue.begin(), job.queue.end(),
                   [](const SmallJob::Envelope& e) { return e.message.kind == Kind::kPush; });
  ASSERT_NE(third, job.queue.end());
  EXPECT_EQ(third->message.priority, 9);
}

// It may still lie behind others that wait to be sent.
TEST(WorkerMachine, UrgentRequestsLendTheirPriorityToWhatHasBeenSent) {
  SmallJob job(1);
  job.Init(0, 0, {0});
  job.Run();
  const auto push = job.Push(0, 0, {1});
  std::vector<Raised> raised;
  job.Do(WorkerNodeOf(0), [&](Outputs& out) {
    Request pull{.kind = Kind::kPull, .part = SmallJob::IdOf(0), .priority = 9};
    pull.token = 77;
    job.worker(0).Submit(job.now, std::move(pull), out);
    raised = out.raised;
  });
  ASSERT_EQ(raised.size(), 1u);
  EXPECT_EQ(raised[0].token, push);
  EXPECT_EQ(raised[0].to, ServerNodeOf(0));
  EXPECT_EQ(raised[0].priority, 9);
  job.Run();
}

TEST(WorkerMachine, AServerThatRefusesIsHeardOut) {
  SmallJob job(1);
  job.Do(WorkerNodeOf(0), [&](Outputs& out) {
    job.worker(0).OnMessage(
        job.now, ServerNodeOf(0),
        {.kind = Kind::kRefused, .meta = Encode(ErrorBody{.message = "you sent nonsense"})}, out);
  });
  EXPECT_THAT(job.log, Contains(AllOf(HasSubstr("server 0"), HasSubstr("you sent nonsense"))));
}

TEST(WorkerMachine, BarriersWaitForTheAcknowledgementsOfEarlierPushes) {
  SmallJob job(2);
  job.Init(0, 0, {0});
  job.Run();
  job.Push(0, 0, {1});
  const auto first = job.Barrier(0);
  job.Push(0, 0, {1});
  const auto second = job.Barrier(0);
  EXPECT_TRUE(job.to_scheduler.empty());
  job.Run();
  ASSERT_EQ(job.to_scheduler.size(), 2u);
  EXPECT_EQ(job.to_scheduler[0].message.kind, Kind::kBarrier);
  EXPECT_EQ(job.to_scheduler[0].message.sequence, 0u);
  EXPECT_EQ(job.to_scheduler[1].message.sequence, 1u);
  EXPECT_FALSE(job.Answered(first));
  job.Deliver({kSchedulerNode, WorkerNodeOf(0), {.kind = Kind::kBarrierDone, .sequence = 0}});
  EXPECT_EQ(job.ErrorOf(first), "");
  EXPECT_FALSE(job.Answered(second));
  // Once more changes nothing.
  job.Deliver({kSchedulerNode, WorkerNodeOf(0), {.kind = Kind::kBarrierDone, .sequence = 0}});
  job.Deliver({kSchedulerNode, WorkerNodeOf(0), {.kind = Kind::kBarrierDone, .sequence = 1}});
  EXPECT_EQ(job.ErrorOf(second), "");
}

TEST(WorkerMachine, BarrierSentOnceItsPushesAreAcknowledgedNotThoseAfterIt) {
  SmallJob job(2, 1);
  job.Init(0, 0, {0});
  job.Init(1, 0, {0});
  job.Run();
  job.Push(0, 0, {1});
  job.Push(0, 0, {1});
  job.Barrier(0);
  job.Push(0, 0, {1});  // has no credit
  job.Run();
  EXPECT_EQ(job.to_scheduler.size(), 1u);
}

TEST(WorkerMachine, BarriersAreSentInTheOrderInWhichTheyOpen) {
  SmallJob job(2);
  job.Init(0, 0, {0});
  job.Run();
  const auto first = job.CallBarrier(0, Time{0});
  job.CallBarrier(0, Time{0});
  job.Push(0, 0, {1});  // was called before the first one
  job.OpenBarrier(0);
  job.Push(0, 0, {1});  // before the second
  EXPECT_TRUE(job.to_scheduler.empty());
  job.Run();
  ASSERT_EQ(job.to_scheduler.size(), 1u);
  job.OpenBarrier(0);
  ASSERT_EQ(job.to_scheduler.size(), 2u);
  EXPECT_EQ(job.to_scheduler[1].message.sequence, 1u);
  job.Deliver({kSchedulerNode, WorkerNodeOf(0), {.kind = Kind::kBarrierDone, .sequence = 0}});
  EXPECT_EQ(job.ErrorOf(first), "");
}

TEST(WorkerMachine, ABarrierThatDoesNotOpenEndsAtItsDeadline) {
  SmallJob job(2);
  job.Init(0, 0, {0});
  job.Run();
  const auto barrier = job.CallBarrier(0, job.now + std::chrono::seconds(2));
  job.now += std::chrono::seconds(2);
  job.Do(WorkerNodeOf(0), [&](Outputs& out) { job.worker(0).OnTime(job.now, out); });
  EXPECT_THAT(job.ErrorOf(barrier), HasSubstr("gradients of earlier pushes are not there"));
  // The others count on it.
  job.to_scheduler.clear();
  job.OpenBarrier(0);
  ASSERT_EQ(job.to_scheduler.size(), 1u);
  EXPECT_EQ(job.to_scheduler[0].message.kind, Kind::kBarrier);
}

TEST(WorkerMachine, ABarrierThatDoesNotOpenIsToldOfAFailure) {
  SmallJob job(2);
  job.Init(0, 0, {0});
  job.Run();
  const auto barrier = job.CallBarrier(0, Time{0});
  job.Do(WorkerNodeOf(0), [&](Outputs& out) {
    job.worker(0).OnLost(job.now, ServerNodeOf(0), "host:900", "connection reset", out);
  });
  EXPECT_THAT(job.ErrorOf(barrier), HasSubstr("connection reset"));
  job.OpenBarrier(0);
  EXPECT_THAT(job.ErrorOf(job.Barrier(0)), HasSubstr("connection reset"));
}

TEST(WorkerMachine, AfterLeaveNothingIsTaken) {
  SmallJob job(1);
  job.Init(0, 0, {0});
  job.Push(0, 0, {1});
  const auto leave = job.Leave(0);
  const auto late = job.Pull(0, 0);
  const auto barrier = job.Barrier(0);
  EXPECT_THROW(std::rethrow_exception(job.ExceptionOf(late)), InvalidState);
  EXPECT_THAT(job.ErrorOf(barrier), HasSubstr("has left"));
  EXPECT_FALSE(job.Answered(leave));
  job.Run();
  EXPECT_EQ(job.ErrorOf(leave), "");
  EXPECT_TRUE(job.worker(0).left());
  ASSERT_EQ(job.to_scheduler.size(), 1u);
  EXPECT_EQ(job.to_scheduler[0].message.kind, Kind::kLeaveJob);
}

TEST(WorkerMachine, ALostServerFailsEverythingByName) {
  SmallJob job(2);
  job.Init(0, 0, {0});
  job.Init(1, 0, {0});
  job.Run();
  const auto pull = job.PushPull(0, 0, {1});
  const auto barrier = job.Barrier(0);
  job.Do(WorkerNodeOf(0), [&](Outputs& out) {
    job.worker(0).OnLost(job.now, ServerNodeOf(0), "host:900", "connection reset", out);
  });
  for (const std::uint64_t token : {pull, barrier, job.Pull(0, 0)}) {
    EXPECT_THROW(std::rethrow_exception(job.ExceptionOf(token)), NetworkError);
    EXPECT_THAT(job.ErrorOf(token),
                AllOf(HasSubstr("server 0"), HasSubstr("host:900"), HasSubstr("connection reset")));
  }
  ASSERT_EQ(job.to_scheduler.size(), 1u);
  EXPECT_EQ(job.to_scheduler[0].message.kind, Kind::kPeerDown);
}

TEST(WorkerMachine, AFailedJobFailsEverythingByName) {
  SmallJob job(2);
  job.Init(0, 0, {0});
  job.Init(1, 0, {0});
  job.Run();
  const auto pull = job.PushPull(0, 0, {1});
  job.Run();
  const FailureBody failure{
      .node = WorkerNodeOf(1), .address = "host:801", .why = "no sign of life for 3.0 s"};
  job.Deliver(
      {kSchedulerNode, WorkerNodeOf(0), {.kind = Kind::kJobFailed, .meta = Encode(failure)}});
  EXPECT_THAT(job.ErrorOf(pull),
              AllOf(HasSubstr("worker 1"), HasSubstr("host:801"), HasSubstr("no sign of life")));
}

TEST(WorkerMachine, AServerThatEndsBecauseTheJobHasFailedIsNotTheCause) {
  SmallJob job(2);
  job.Init(0, 0, {0});
  job.Init(1, 0, {0});
  job.Run();
  const auto pull = job.PushPull(0, 0, {1});
  job.Run();
  const FailureBody failure{.node = WorkerNodeOf(1), .address = "host:801", .why = "reset"};
  job.Deliver(
      {ServerNodeOf(0),
       WorkerNodeOf(0),
       {.kind = Kind::kJobFailed, .incarnation = job.IncarnationOf(0), .meta = Encode(failure)}});
  job.Do(WorkerNodeOf(0), [&](Outputs& out) {
    job.worker(0).OnLost(job.now, ServerNodeOf(0), "host:900", "it has closed", out);
  });
  for (const std::uint64_t token : {pull, job.Pull(0, 0)}) {
    EXPECT_THAT(job.ErrorOf(token), AllOf(HasSubstr("worker 1"), HasSubstr("host:801")));
  }
}

TEST(WorkerMachine, APushWhoseGradientComesAfterItsDeadlineSaysSo) {
  SmallJob job(1);
  job.Init(0, 0, {0});
  job.Run();
  const auto push = job.Submit(0, {.kind = Kind::kPush,
                                   .part = SmallJob::IdOf(0),
                                   .payload = PayloadOf({1}),
                                   .deadline = job.now - seconds(2),
                                   .what = "push key 'a'"});
  job.Advance(seconds(0));
  EXPECT_THROW(std::rethrow_exception(job.ExceptionOf(push)), TimeoutError);
  EXPECT_THAT(job.ErrorOf(push), AllOf(HasSubstr("push key 'a'"), HasSubstr("2.0 s after")));
}

TEST(WorkerMachine, AtTheDeadlineItSaysWhoIsMissing) {
  SmallJob job(3);
  for (int rank = 0; rank < 3; ++rank) job.Init(rank, 0, {0});
  job.Run();
  job.Push(2, 0, {1});
  job.Push(0, 0, {1});
  const auto pull = job.Submit(0, {.kind = Kind::kPull,
                                   .part = SmallJob::IdOf(0),
                                   .deadline = job.now + seconds(4),
                                   .what = "pull key 'a'"});
  job.Run();
  for (int i = 0; i < 3; ++i) job.Advance(seconds(1));
  EXPECT_FALSE(job.Answered(pull));
  job.Advance(seconds(1));
  EXPECT_THROW(std::rethrow_exception(job.ExceptionOf(pull)), TimeoutError);
  EXPECT_THAT(job.ErrorOf(pull),
              AllOf(HasSubstr("pull key 'a'"), HasSubstr("within 4.0 s"), HasSubstr("round 1"),
                    HasSubstr("arrived: workers 0, 2"), HasSubstr("missing: workers 1")));
  // The answer comes late, to nobody; the part goes on.
  job.Push(1, 0, {1});
  const auto next = job.Pull(0, 0);
  job.Run();
  EXPECT_EQ(job.ValueOf(next), Values({3}));
}

// The network has not taken the message yet; the program gets its array back all the same.
TEST(WorkerMachine, AtTheDeadlineItTakesThePayloadBack) {
  SmallJob job(2);
  for (int rank = 0; rank < 2; ++rank) job.Init(rank, 0, {0});
  job.Run();
  const auto push = job.Submit(0, {.kind = Kind::kPush,
                                   .part = SmallJob::IdOf(0),
                                   .payload = PayloadOf({100}),
                                   .deadline = job.now + seconds(2),
                                   .what = "push key 'a'"});
  ASSERT_EQ(job.queue.size(), 1u);
  const std::uint64_t sequence = job.queue.front().message.sequence;
  job.queue.clear();  // revoked
  for (int i = 0; i < 2; ++i) job.Advance(seconds(1));
  EXPECT_THROW(std::rethrow_exception(job.ExceptionOf(push)), TimeoutError);
  job.queue.clear();
  job.Dropped(0, 0, 0, sequence);
  ASSERT_EQ(job.queue.size(), 1u);
  const Message& instead = job.queue.front().message;
  EXPECT_EQ(instead.sequence, sequence);
  EXPECT_EQ(instead.flags & kFlagFailed, kFlagFailed);
  EXPECT_TRUE(instead.payload.empty());
  // The round has failed, for everyone; the next one is like any other.
  const auto other = job.PushPull(1, 0, {1});
  job.Run();
  EXPECT_THAT(job.ErrorOf(other), AllOf(HasSubstr("push key 'a'"), HasSubstr("within 2.0 s")));
  job.Push(0, 0, {3});
  const auto next = job.PushPull(1, 0, {4});
  job.Run();
  EXPECT_EQ(job.ValueOf(next), Values({7}));
}

namespace {

// Pushes that go, and one that times out before it has credit.
void PushTwiceAndLate(SmallJob& job, bool one_of_several) {
  job.Push(0, 0, {1});
  job.Push(0, 0, {1});
  const auto late = job.Submit(0, {.kind = Kind::kPush,
                                   .part = SmallJob::IdOf(0),
                                   .payload = PayloadOf({100}),
                                   .deadline = job.now + seconds(1),
                                   .what = "push key 'a'",
                                   .one_of_several = one_of_several});
  job.Run();
  job.Advance(seconds(2));
  EXPECT_THROW(std::rethrow_exception(job.ExceptionOf(late)), TimeoutError);
}

}  // namespace

// Else the worker's next one would be counted in its round, and all later ones a round early.
TEST(WorkerMachine, APushThatTimesOutBeforeItIsSentKeepsItsRound) {
  SmallJob job(2);
  for (int rank = 0; rank < 2; ++rank) job.Init(rank, 0, {0});
  job.Run();
  PushTwiceAndLate(job, /*one_of_several=*/false);
  job.Push(0, 0, {2});
  const auto fourth = job.Pull(0, 0);
  std::vector<std::uint64_t> rounds;
  for (int round = 0; round < 4; ++round) {
    rounds.push_back(job.PushPull(1, 0, {10}));
    job.Run();
  }
  EXPECT_EQ(job.ValueOf(rounds[0]), Values({11}));
  EXPECT_EQ(job.ValueOf(rounds[1]), Values({11}));
  EXPECT_THROW(std::rethrow_exception(job.ExceptionOf(rounds[2])), OpError);
  EXPECT_THAT(job.ErrorOf(rounds[2]), AllOf(HasSubstr("round 3"), HasSubstr("within 1.0 s")));
  EXPECT_EQ(job.ValueOf(rounds[3]), Values({12}));
  EXPECT_EQ(job.ValueOf(fourth), Values({12}));
}

// Of one whose array was in use for too long the program has been told before it comes here.
TEST(WorkerMachine, BarriersDoNotWaitForAFailedPushWhoseDeadlineHasPassed) {
  for (const std::string type : {"dist_sync", "dist_async"}) {
    SmallJob job(2, 1, {}, {}, type);
    for (int rank = 0; rank < 2; ++rank) job.Init(rank, 0, {0});
    job.Run();
    job.Advance(seconds(5));
    for (int i = 0; i < 2; ++i) job.Push(0, 0, {1});
    job.Submit(0, {.kind = Kind::kPush,
                   .part = SmallJob::IdOf(0),
                   .flags = kFlagFailed,
                   .meta = Encode(ErrorBody{.message = "too late"}),
                   .deadline = job.now - seconds(1)});
    const auto pull = job.Pull(0, 0);
    job.Advance(seconds(0));
    job.Barrier(0);
    EXPECT_EQ(job.to_scheduler.size(), 1u) << type;
    for (int i = 0; i < 3; ++i) job.Push(1, 0, {0});
    job.Run();
    EXPECT_THAT(job.ErrorOf(pull), HasSubstr("too late")) << type;
  }
}

// Worker 1 comes to the barrier before it pushes what the late push waits for.
TEST(WorkerMachine, BarriersDoNotWaitForAPushThatTimesOutBeforeItIsSent) {
  for (const bool one_of_several : {false, true}) {
    SmallJob job(2);
    for (int rank = 0; rank < 2; ++rank) job.Init(rank, 0, {0});
    job.Run();
    job.Barrier(0);
    EXPECT_EQ(job.to_scheduler.size(), 1u);
    PushTwiceAndLate(job, one_of_several);
    const auto barrier = job.Barrier(0);
    EXPECT_EQ(job.to_scheduler.size(), 2u) << "with the other two it is done";
    for (std::uint64_t number = 0; number < 2; ++number) {
      job.Deliver(
          {kSchedulerNode, WorkerNodeOf(0), {.kind = Kind::kBarrierDone, .sequence = number}});
    }
    EXPECT_EQ(job.ErrorOf(barrier), "");
    // The next one waits for what was pushed since, and for nothing before.
    job.Push(0, 0, {2});
    job.Barrier(0);
    EXPECT_EQ(job.to_scheduler.size(), 2u);
    EXPECT_THAT(job.worker(0).DescribeState(job.now),
                HasSubstr("the oldest is request of part 0, by server 0"));
    job.Push(1, 0, {0});
    job.Run();
    EXPECT_EQ(job.to_scheduler.size(), 2u);
    job.Push(1, 0, {0});
    job.Run();
    EXPECT_EQ(job.to_scheduler.size(), 3u);
  }
}

// The others may never come to its round.
TEST(WorkerMachine, AWorkerThatLeavesWaitsForNoPushThatHasTimedOutBeforeItWasSent) {
  for (const bool one_of_several : {false, true}) {
    SmallJob job(2);
    for (int rank = 0; rank < 2; ++rank) job.Init(rank, 0, {0});
    job.Run();
    PushTwiceAndLate(job, one_of_several);
    job.CloseStore(0);
    const auto leave = job.Leave(0);
    job.Run();
    EXPECT_EQ(job.ErrorOf(leave), "");
    std::vector<std::uint64_t> rounds;
    for (int round = 0; round < 4; ++round) {
      rounds.push_back(job.PushPull(1, 0, {10}));
      job.Run();
    }
    EXPECT_EQ(job.ValueOf(rounds[1]), Values({11}));
    // Other parts of the array may have had the push.
    EXPECT_EQ(job.ErrorOf(rounds[2]),
              !one_of_several
                  ? ""
                  : "request of part 0: round 3 of key 'a' failed: the push of worker 0: its "
                    "deadline passed before it could be sent, and the worker has left the job");
    EXPECT_EQ(job.ValueOf(rounds[3]), Values({10})) << "without the worker that has left";
    EXPECT_THAT(job.log, testing::IsEmpty());
  }
}

// All servers have to know what the pushes tell of that do not come.
TEST(WorkerMachine, ParametersGoBeforeAWorkerLeavesWithPushesThatHaveTimedOut) {
  SmallJob job(2);
  for (int rank = 0; rank < 2; ++rank) job.Init(rank, 0, {0});
  constexpr std::uint64_t kOptimizer = std::uint64_t{1} << 32;
  const std::string sum = Encode(OptimizerBody{.name = "sum"});
  const auto control = [&](Kind kind, std::string meta, std::uint64_t version = 0) {
    return job.Submit(0, {.kind = kind,
                          .part = ControlPart(1),
                          .version = version,
                          .meta = std::move(meta),
                          .deadline = job.now + seconds(1)});
  };
  control(Kind::kOpenStore, Encode(OpenStoreBody{.type = "dist_sync"}));
  control(Kind::kSetOptimizer, sum, kOptimizer);
  job.Run();
  job.control().deferred = true;
  control(Kind::kCommand, Encode(CommandBody{.body = "long"}));
  job.Run();
  control(Kind::kSetParameters, sum, kOptimizer + 1);
  PushTwiceAndLate(job, /*one_of_several=*/true);
  job.CloseStore(0);
  const auto leave = job.Leave(0);
  job.Run();
  EXPECT_FALSE(job.Answered(leave));
  job.Do(ServerNodeOf(0),
         [&](Outputs& out) { job.server(0).OnControlDone(job.now, job.control().last, {}, out); });
  job.Run();
  EXPECT_EQ(job.ErrorOf(leave), "");
}

TEST(WorkerMachine, AWorkerThatLeavesIsNotAwaitedForWhatItsCloseHasAnnounced) {
  SmallJob job(2);
  for (std::uint32_t part = 0; part < 2; ++part) {
    for (int rank = 0; rank < 2; ++rank) job.Init(rank, part, {0});
  }
  job.Run();
  for (std::uint32_t part = 0; part < 2; ++part) {
    for (int i = 0; i < 4; ++i) {
      job.Submit(0, {.kind = Kind::kPush,
                     .part = SmallJob::IdOf(part),
                     .payload = PayloadOf({1}),
                     .deadline = i >= 2 ? job.now + seconds(1) : Time{0},
                     .one_of_several = part == 1});
    }
    // It goes with the worker.
    job.Submit(
        0, {.kind = Kind::kRemove, .part = SmallJob::IdOf(part), .deadline = job.now + seconds(1)});
  }
  job.Run();
  job.Advance(seconds(2));
  job.CloseStore(0);
  const auto leave = job.Leave(0);
  job.Run();
  EXPECT_EQ(job.ErrorOf(leave), "");
  for (std::uint32_t part = 0; part < 2; ++part) {
    std::vector<std::uint64_t> rounds;
    for (int round = 0; round < 5; ++round) {
      rounds.push_back(job.PushPull(1, part, {10}));
      job.Run();
    }
    EXPECT_EQ(job.ValueOf(rounds[1]), Values({11}));
    for (const int late : {2, 3}) EXPECT_EQ(job.ErrorOf(rounds[late]).empty(), part == 0) << late;
    EXPECT_EQ(job.ValueOf(rounds[4]), Values({10}));
  }
  EXPECT_THAT(job.log, testing::IsEmpty());
}

// Which, if it went before the leave, would have a round go on without a push that other parts may
// have. The worker that leaves has not heard yet that it may send that push.
TEST(WorkerMachine, AKeyThatIsRemovedBehindPushesThatDoNotComeGoesWithTheWorker) {
  SmallJob job(2);
  for (int rank = 0; rank < 2; ++rank) job.Init(rank, 0, {0});
  job.Run();
  PushTwiceAndLate(job, /*one_of_several=*/true);
  std::vector<std::uint64_t> rounds;
  for (int round = 0; round < 3; ++round) {
    rounds.push_back(job.PushPull(1, 0, {10}));
    while (!job.queue.empty()) {
      SmallJob::Envelope envelope = std::move(job.queue.front());
      job.queue.pop_front();
      if (envelope.to != WorkerNodeOf(0)) job.Deliver(std::move(envelope));
    }
  }
  EXPECT_EQ(job.ValueOf(rounds[1]), Values({11}));
  EXPECT_FALSE(job.Answered(rounds[2]));
  const auto remove = job.Submit(0, {.kind = Kind::kRemove, .part = SmallJob::IdOf(0)});
  const auto leave = job.Leave(0);
  job.Run();
  EXPECT_EQ(job.ErrorOf(remove), "");
  EXPECT_EQ(job.ErrorOf(leave), "");
  EXPECT_THAT(job.ErrorOf(rounds[2]), HasSubstr("the push of worker 0"));
  const auto fourth = job.PushPull(1, 0, {10});
  job.Run();
  EXPECT_EQ(job.ValueOf(fourth), Values({10}));
  EXPECT_THAT(job.log, testing::IsEmpty());
}

TEST(WorkerMachine, WorkersThatLeaveWithPushesThatHaveTimedOutDoNotWaitForOneAnother) {
  SmallJob job(2);
  for (std::uint32_t part = 0; part < 2; ++part) {
    for (int rank = 0; rank < 2; ++rank) job.Init(rank, part, {0});
  }
  job.Run();
  for (int rank = 0; rank < 2; ++rank) {
    for (int i = 0; i < 3; ++i) {
      job.Submit(rank, {.kind = Kind::kPush,
                        .part = SmallJob::IdOf(static_cast<std::uint32_t>(rank)),
                        .payload = PayloadOf({1}),
                        .deadline = job.now + seconds(1),
                        .one_of_several = true});
    }
  }
  job.Run();
  job.Advance(seconds(2));
  for (int rank = 0; rank < 2; ++rank) {
    const auto leave = job.Leave(rank);
    job.Run();
    EXPECT_EQ(job.ErrorOf(leave), "") << rank;
  }
}

// There the server takes it as soon as it has acknowledged those before it.
TEST(WorkerMachine, InDistAsyncAPartOfSeveralThatHasTimedOutGoesBeforeTheWorkerLeaves) {
  SmallJob job(2, 1, {}, {}, "dist_async");
  for (int rank = 0; rank < 2; ++rank) job.Init(rank, 0, {0});
  job.Run();
  for (int i = 0; i < 3; ++i) {
    job.Submit(0, {.kind = Kind::kPush,
                   .part = SmallJob::IdOf(0),
                   .payload = PayloadOf({1}),
                   .deadline = i == 2 ? job.now + seconds(1) : Time{0},
                   .what = "push key 'a'",
                   .one_of_several = true});
  }
  job.now += seconds(2);
  job.Do(WorkerNodeOf(0), [&](Outputs& out) { job.worker(0).OnTime(job.now, out); });
  const auto leave = job.Leave(0);
  EXPECT_EQ(CountOf(job, Kind::kLeave), 0u);
  job.Run();
  EXPECT_EQ(job.ErrorOf(leave), "");
  const auto pull = job.Pull(1, 0);
  job.Run();
  EXPECT_THAT(job.ErrorOf(pull), AllOf(HasSubstr("worker 0"), HasSubstr("within 1.0 s")));
}

// More than are named in one message, and none of a round is of a worker that is still there.
TEST(WorkerMachine, AWorkerMayLeaveWithVeryManyPushesThatHaveTimedOut) {
  SmallJob job(2);
  for (int rank = 0; rank < 2; ++rank) job.Init(rank, 0, {0});
  job.Run();
  constexpr int kLate = 40'000;
  for (int i = 0; i < 2 + kLate; ++i) {
    job.Submit(0, {.kind = Kind::kPush,
                   .part = SmallJob::IdOf(0),
                   .payload = PayloadOf({1}),
                   .deadline = job.now + seconds(1),
                   .one_of_several = true});
  }
  job.Run();
  job.Advance(seconds(2));
  const auto leave = job.Leave(0);
  EXPECT_EQ(CountOf(job, Kind::kLeave), 1u) << "of a server one after the other";
  job.Run();
  EXPECT_EQ(job.ErrorOf(leave), "");
  const auto third = [&] {
    for (int round = 0; round < 2; ++round) job.Push(1, 0, {10});
    return job.PushPull(1, 0, {10});
  }();
  job.Run();
  EXPECT_THAT(job.ErrorOf(third), HasSubstr("worker 0"));
  job.Advance(seconds(1));  // from the end of a round to pushes that nobody has made
  const auto other = job.Leave(1);
  job.Run();
  EXPECT_EQ(job.ErrorOf(other), "");
  EXPECT_EQ(job.server().State().rounds, static_cast<std::uint64_t>(2 + kLate));
}

TEST(WorkerMachine, APullThatTimesOutBeforeItIsSentIsNotSent) {
  SmallJob job(2);
  for (int rank = 0; rank < 2; ++rank) job.Init(rank, 0, {0});
  job.Run();
  for (int i = 0; i < 3; ++i) job.Push(0, 0, {1});
  const auto pull = job.Submit(
      0, {.kind = Kind::kPull, .part = SmallJob::IdOf(0), .deadline = job.now + seconds(1)});
  job.Run();
  job.Advance(seconds(2));
  EXPECT_THROW(std::rethrow_exception(job.ExceptionOf(pull)), TimeoutError);
  job.Push(1, 0, {0});
  job.Run();
  EXPECT_EQ(job.server().DescribeState(job.now).find("pull"), std::string::npos);
}

// Pushes of this version may have gone, and wait for it at the server.
TEST(WorkerMachine, ParametersThatTimeOutBeforeTheyAreSentAreSentAllTheSame) {
  SmallJob job(1);
  constexpr std::uint64_t kOptimizer = std::uint64_t{1} << 32;
  job.Control(0, Kind::kSetOptimizer, Encode(OptimizerBody{.name = "sum"}), kOptimizer);
  job.Init(0, 0, {5});
  job.Run();
  job.control().deferred = true;
  job.Control(0, Kind::kCommand, Encode(CommandBody{.body = "long"}));
  job.Run();
  const auto parameters = job.Submit(0, {.kind = Kind::kSetParameters,
                                         .part = ControlPart(0),
                                         .version = kOptimizer + 1,
                                         .meta = Encode(OptimizerBody{.name = "sum"}),
                                         .deadline = job.now + seconds(1)});
  const auto push = job.Submit(0, {.kind = Kind::kPushPull,
                                   .part = SmallJob::IdOf(0),
                                   .version = kOptimizer + 1,
                                   .payload = PayloadOf({3})});
  job.Run();
  job.Advance(seconds(2));
  EXPECT_THROW(std::rethrow_exception(job.ExceptionOf(parameters)), TimeoutError);
  EXPECT_FALSE(job.Answered(push));
  job.Do(ServerNodeOf(0),
         [&](Outputs& out) { job.server(0).OnControlDone(job.now, job.control().last, {}, out); });
  job.Run();
  EXPECT_EQ(job.ValueOf(push), Values({8}));
}

namespace {

// What is set, and then taken back, behind a command that takes longer than both have time.
void SetAndTakeBackTooLate(Request request) {
  SmallJob job(1);
  job.control().deferred = true;
  job.Control(0, Kind::kCommand, Encode(CommandBody{.body = "long"}));
  job.Run();
  request.part = ControlPart(0);
  request.deadline = job.now + seconds(1);
  for (const std::uint8_t flags : {std::uint8_t{0}, kFlagFailed}) {
    request.flags = flags;
    job.Submit(0, request);
  }
  job.Advance(seconds(2));
  job.Do(ServerNodeOf(0),
         [&](Outputs& out) { job.server(0).OnControlDone(job.now, job.control().last, {}, out); });
  ASSERT_EQ(job.queue.size(), 1u) << "the command's answer";
  job.Deliver(job.queue.front());
  job.queue.pop_front();
  ASSERT_EQ(job.queue.size(), 1u);
  EXPECT_EQ(job.queue.front().message.kind, request.kind);
  EXPECT_EQ(job.queue.front().message.flags, kFlagFailed);
  job.Run();
  const auto& taken = job.control().calls;
  EXPECT_THAT(taken, testing::ElementsAre("open 0 dist_sync", "command long"));
  EXPECT_THAT(job.worker(0).DescribeState(job.now), HasSubstr("0 open requests"));
}

}  // namespace

// It may be set yet, if the deadline is over, and would be in the way of the next one.
TEST(WorkerMachine, AnOptimizerIsTakenBackThoughTheDeadlineHasPassed) {
  SetAndTakeBackTooLate({.kind = Kind::kSetOptimizer,
                         .version = std::uint64_t{1} << 32,
                         .meta = Encode(OptimizerBody{.name = "sum"})});
}

TEST(WorkerMachine, ACompressionIsTakenBackThoughTheDeadlineHasPassed) {
  SetAndTakeBackTooLate({.kind = Kind::kSetCompression,
                         .meta = Encode(CompressionBody{{.type = "1bit", .threshold = 1}})});
}

// Otherwise the rounds of its array's parts would be out of step from then on.
TEST(WorkerMachine, APartOfSeveralThatTimesOutBeforeItIsSentKeepsItsRound) {
  SmallJob job(2);
  for (int rank = 0; rank < 2; ++rank) job.Init(rank, 0, {0});
  job.Run();
  job.Push(0, 0, {1});
  job.Push(0, 0, {2});
  const auto third = job.Submit(0, {.kind = Kind::kPush,
                                    .part = SmallJob::IdOf(0),
                                    .payload = PayloadOf({100}),
                                    .deadline = job.now + seconds(1),
                                    .one_of_several = true});
  job.Run();
  job.Advance(seconds(2));
  EXPECT_THROW(std::rethrow_exception(job.ExceptionOf(third)), TimeoutError);
  job.Push(0, 0, {3});
  std::vector<std::uint64_t> rounds;
  for (int round = 0; round < 4; ++round) {
    rounds.push_back(job.PushPull(1, 0, {10}));
    job.Run();
  }
  EXPECT_EQ(job.ValueOf(rounds[0]), Values({11}));
  EXPECT_EQ(job.ValueOf(rounds[1]), Values({12}));
  EXPECT_THAT(job.ErrorOf(rounds[2]), HasSubstr("within 1.0 s"));
  EXPECT_EQ(job.ValueOf(rounds[3]), Values({13}));
}

TEST(WorkerMachine, WarnsWithWhatTheServerSays) {
  SmallJob job(2);
  job.Init(0, 0, {0});
  job.Init(1, 0, {0});
  job.Run();
  job.PushPull(0, 0, {1});
  job.Run();
  for (int i = 0; i < 10; ++i) job.Advance(seconds(1));
  EXPECT_THAT(job.log, Contains(AllOf(HasSubstr("request of part 0 has waited 10.0 s"),
                                      HasSubstr("server 0 (host:900)"), HasSubstr("key 'a'"),
                                      HasSubstr("missing: workers 1"))));
  EXPECT_THAT(job.worker(0).DescribeState(job.now), HasSubstr("request of part 0"));
}

namespace {

// What the machine has asked for since the last look.
int QuestionsTo(NodeId to, const Outputs& out) {
  return static_cast<int>(std::ranges::count_if(out.messages, [&](const Outgoing& each) {
    return each.to == to && each.message.kind == Kind::kStatus;
  }));
}

}  // namespace

// Asked and answered at once: what an answer to an earlier question said may be wrong by now.
TEST(WorkerMachine, ABarrierWarnsWithWhatTheSchedulerSaysThen) {
  SmallJob job(2);
  job.CallBarrier(0, Time{0});
  job.OpenBarrier(0);
  WorkerMachine& worker = job.worker(0);
  const auto answer = [&](const std::string& text) {
    Outputs out;
    worker.OnMessage(job.now, kTheScheduler,
                     {.kind = Kind::kStatusReply, .meta = Encode(TextBody{text})}, out);
    return out;
  };
  for (const std::string text : {"missing: worker 1, worker 2", "missing: worker 2"}) {
    job.now += seconds(10);
    Outputs out;
    worker.OnTime(job.now, out);
    EXPECT_TRUE(out.log.empty()) << out.log[0].second;
    EXPECT_EQ(QuestionsTo(kTheScheduler, out), 1);
    const Outputs said = answer(text);
    ASSERT_EQ(said.log.size(), 1u);
    EXPECT_THAT(said.log[0].second, AllOf(HasSubstr("barrier 0 has waited"), HasSubstr(text)));
    EXPECT_TRUE(answer(text).log.empty());  // nobody has asked
    EXPECT_THAT(worker.DescribeState(job.now), HasSubstr("barrier 0: since"));
    EXPECT_THAT(worker.DescribeState(job.now), HasSubstr(text));
  }
  // The scheduler is silent.
  Outputs out;
  worker.OnTime(job.now += seconds(10), out);
  EXPECT_TRUE(out.log.empty());
  worker.OnTime(job.now += seconds(10), out);
  ASSERT_EQ(out.log.size(), 1u);
  EXPECT_THAT(out.log[0].second,
              AllOf(HasSubstr("has waited 40.0 s"), HasSubstr("does not say why")));
}

// What the scheduler says is of the first.
TEST(WorkerMachine, ALaterBarrierIsSaidToWaitForTheFirst) {
  SmallJob job(2);
  for (int i = 0; i < 2; ++i) {
    job.CallBarrier(0, Time{0});
    job.OpenBarrier(0);
  }
  WorkerMachine& worker = job.worker(0);
  Outputs out;
  worker.OnTime(job.now += seconds(10), out);
  worker.OnMessage(
      job.now, kTheScheduler,
      {.kind = Kind::kStatusReply, .meta = Encode(TextBody{"come: worker 0; missing: worker 1"})},
      out);
  ASSERT_EQ(out.log.size(), 2u);
  EXPECT_EQ(out.log[0].second, "barrier 0 has waited 10.0 s: come: worker 0; missing: worker 1");
  EXPECT_EQ(
      out.log[1].second,
      "barrier 1 has waited 10.0 s: barrier 0 is not done: come: worker 0; missing: worker 1");
}

// The scheduler may be a barrier ahead, where the news of the end of the last one are lost; and a
// barrier behind, where they have overtaken what it has said before.
TEST(WorkerMachine, WhatTheSchedulerSaysOfAnotherBarrierIsNotShown) {
  SmallJob job(2);
  for (int i = 0; i < 3; ++i) {
    job.CallBarrier(0, Time{0});
    job.OpenBarrier(0);
  }
  WorkerMachine& worker = job.worker(0);
  const auto hear = [&](Kind kind, std::uint64_t sequence, const std::string& text = {}) {
    Outputs out;
    worker.OnMessage(job.now, kTheScheduler,
                     {.kind = kind,
                      .sequence = sequence,
                      .meta = text.empty() ? std::string() : Encode(TextBody{text})},
                     out);
    return out;
  };
  hear(Kind::kBarrierDone, 0);
  Outputs out;
  worker.OnTime(job.now += seconds(10), out);
  for (const std::uint64_t other : {0, 2}) {
    EXPECT_TRUE(hear(Kind::kStatusReply, other, "missing: worker 5").log.empty()) << other;
  }
  EXPECT_THAT(worker.DescribeState(job.now), Not(HasSubstr("worker 5")));
  const Outputs said = hear(Kind::kStatusReply, 1, "missing: worker 1");
  ASSERT_EQ(said.log.size(), 2u);
  EXPECT_EQ(said.log[0].second, "barrier 1 has waited 10.0 s: missing: worker 1");
}

TEST(WorkerMachine, TheFactsOfATimeoutAreAskedForAgainCloseToTheDeadline) {
  SmallJob job(2);
  job.Init(0, 0, {0});
  job.Init(1, 0, {0});
  job.Run();
  const auto late = job.Submit(0, {.kind = Kind::kPushPull,
                                   .part = SmallJob::IdOf(0),
                                   .payload = PayloadOf({1}),
                                   .deadline = job.now + seconds(8),
                                   .what = "pushpull key 'a'"});
  job.CallBarrier(0, job.now + seconds(8));
  job.OpenBarrier(0);
  int questions = 0;
  for (int tenths = 1; tenths < 80; ++tenths) {
    job.now += std::chrono::milliseconds(100);
    Outputs out;
    job.worker(0).OnTime(job.now, out);
    questions += QuestionsTo(TheServer(0), out);
    EXPECT_EQ(questions, tenths < 40 ? 0 : tenths < 75 ? 1 : 2) << tenths;
  }
  EXPECT_FALSE(job.Answered(late));
}

TEST(WorkerMachine, WhoAsksForItsStateIsToldOfThePartsThatHaveWaitedLongest) {
  SmallJob job(2);
  Outputs none;
  EXPECT_FALSE(job.worker(0).AskWhatWaits(none));
  job.Init(0, 0, {0});
  job.Init(1, 0, {0});
  job.Run();
  job.PushPull(0, 0, {1});
  job.Run();
  job.now += seconds(3);  // nobody has been warned yet
  EXPECT_THAT(job.worker(0).DescribeState(job.now), testing::Not(HasSubstr("missing: workers 1")));
  job.Do(WorkerNodeOf(0), [&](Outputs& out) { EXPECT_TRUE(job.worker(0).AskWhatWaits(out)); });
  job.Run();
  EXPECT_THAT(job.worker(0).DescribeState(job.now), HasSubstr("missing: workers 1"));
  EXPECT_TRUE(job.log.empty());
}

// A look is at all that is open: it would have no time left, once many that have been pushed one
// after the other have waited for the warning time.
TEST(WorkerMachine, LooksAtVeryManyThatWaitNoMoreOftenThanAtOne) {
  SmallJob job(2);
  job.Init(0, 0, {0});
  job.Init(1, 0, {0});
  job.Run();
  const Time begun = job.now;
  for (int i = 0; i < 2000; ++i) {
    job.Push(0, 0, {i});
    job.now += std::chrono::milliseconds(1);
  }
  job.Run();
  const Time end = begun + 2 * WorkerOptions().warn_after;
  int looks = 0;
  while (job.worker(0).next_time() < end) {
    job.now = *job.worker(0).next_time();
    job.Do(WorkerNodeOf(0), [&](Outputs& out) { job.worker(0).OnTime(job.now, out); });
    job.Run();
    ++looks;
  }
  EXPECT_THAT(job.log, Contains(HasSubstr("has waited 10.")));
  EXPECT_LE(looks, 40);
}

// Heartbeats come from the thread that looks.
TEST(WorkerMachine, ALookAtVeryManyThatWaitTakesNoTime) {
  constexpr int kPushes = 100'000;
  SmallJob job(2);
  job.Init(0, 0, {0});
  job.Init(1, 0, {0});
  job.Run();
  for (int i = 0; i < kPushes; ++i) job.Push(0, 0, {i});
  job.Run();
  auto shortest = std::chrono::steady_clock::duration::max();
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(job.worker(0).next_time().has_value());
    job.now = *job.worker(0).next_time();
    Outputs out;
    const auto begun = std::chrono::steady_clock::now();
    job.worker(0).OnTime(job.now, out);
    shortest = std::min(shortest, std::chrono::steady_clock::now() - begun);
  }
  EXPECT_LT(shortest, std::chrono::microseconds(200));
}

// The server answers nothing, not even who is missing: what the worker knows itself is said.
TEST(WorkerMachine, OfASilentServerItSaysTheRoundAndWhenItWasLastHeard) {
  SmallJob job(1);
  job.Init(0, 0, {0});
  job.Run();
  job.PushPull(0, 0, {1});
  job.Run();
  const auto late = [&](Request request) {
    request.part = request.part == PartId{} ? SmallJob::IdOf(0) : request.part;
    request.deadline = job.now + seconds(20);
    return job.Submit(0, std::move(request));
  };
  const auto push = late({.kind = Kind::kPush, .payload = PayloadOf({1}), .what = "push key 'a'"});
  const auto command = late({.kind = Kind::kCommand, .part = ControlPart(0), .what = "command 5"});
  const auto barrier = job.CallBarrier(0, job.now + seconds(20));
  job.OpenBarrier(0);
  for (int i = 0; i < 20; ++i) {
    job.queue.clear();
    job.now += seconds(1);
    job.Do(WorkerNodeOf(0), [&](Outputs& out) { job.worker(0).OnTime(job.now, out); });
  }
  const auto names_it = AllOf(HasSubstr("push key 'a'"), HasSubstr("server 0 (host:900)"),
                              HasSubstr("1 rounds known complete"), HasSubstr("last heard 20.0 s"));
  EXPECT_THAT(job.ErrorOf(push), names_it);
  EXPECT_THAT(job.ErrorOf(barrier), AllOf(HasSubstr("barrier 0"), names_it));
  EXPECT_THAT(job.ErrorOf(command), AllOf(HasSubstr("command 5"), HasSubstr("last heard 20.0 s")));
  EXPECT_THAT(job.log, Contains(AllOf(HasSubstr("push key 'a' has waited 20.0 s"),
                                      HasSubstr("last heard 20.0 s"))));
}

// A part that always has requests open used to keep what was said of an earlier round.
TEST(WorkerMachine, WhatAnEarlierRoundWaitedForIsNotSaidOfALaterOne) {
  SmallJob job(2);
  for (int rank = 0; rank < 2; ++rank) job.Init(rank, 0, {0});
  job.Run();
  job.PushPull(0, 0, {1});
  job.Run();
  for (int i = 0; i < 10; ++i) job.Advance(seconds(1));  // it asks
  const auto second = job.Submit(0, {.kind = Kind::kPushPull,
                                     .part = SmallJob::IdOf(0),
                                     .payload = PayloadOf({1}),
                                     .deadline = job.now + seconds(4),
                                     .what = "pushpull key 'a'"});
  job.PushPull(1, 0, {1});
  job.Run();
  ASSERT_FALSE(job.Answered(second));
  for (int i = 0; i < 4; ++i) {
    job.queue.clear();
    job.now += seconds(1);
    job.Do(WorkerNodeOf(0), [&](Outputs& out) { job.worker(0).OnTime(job.now, out); });
  }
  EXPECT_THAT(job.ErrorOf(second), AllOf(HasSubstr("1 rounds known complete"),
                                         testing::Not(HasSubstr("round 1 has waited"))));
}

TEST(WorkerMachine, AfterACutItSendsAgainWhatIsUnanswered) {
  SmallJob job(2, 1, {.answers_kept = 8});
  job.Init(0, 0, {0});
  job.Init(1, 0, {0});
  job.Run();
  const auto first = job.PushPull(0, 0, {1});
  const auto second = job.PushPull(0, 0, {2});
  job.queue.clear();  // the cut
  job.Do(WorkerNodeOf(0), [&](Outputs& out) { job.worker(0).OnReconnected(job.now, 0, out); });
  EXPECT_EQ(CountOf(job, Kind::kPushPull), 2u);
  job.Run();
  job.PushPull(1, 0, {10});
  job.PushPull(1, 0, {20});
  // Answers of the server are lost, and asked for again.
  while (!job.queue.empty()) {
    const SmallJob::Envelope envelope = job.queue.front();
    job.queue.pop_front();
    if (envelope.to == WorkerNodeOf(0)) continue;
    job.Deliver(envelope);
  }
  EXPECT_FALSE(job.Answered(first));
  job.Do(WorkerNodeOf(0), [&](Outputs& out) { job.worker(0).OnReconnected(job.now, 0, out); });
  job.Run();
  EXPECT_EQ(job.ValueOf(first), Values({11})) << "the value of its round, not of a later one";
  EXPECT_EQ(job.ValueOf(second), Values({22}));
}

TEST(WorkerMachine, BeyondTheByteCapItAsksAndTheLowestMissingRankIsLetIn) {
  ServerOptions server;
  WorkerOptions worker;
  server.unfinished_bytes_max = worker.unfinished_bytes_max = 100;
  SmallJob job(3, 1, server, worker);
  constexpr std::uint32_t kParts = 20;
  for (std::uint32_t part = 0; part < kParts; ++part) {
    for (int rank = 0; rank < 3; ++rank) job.Init(rank, part, Values(4, 0));
  }
  job.Run();
  // 32 bytes each: three fit. Workers push the parts in different orders, which without grants
  // would wait for one another for ever.
  std::vector<std::uint64_t> pulls;
  for (int round = 1; round <= 3; ++round) {
    for (std::uint32_t i = 0; i < kParts; ++i) {
      for (int rank = 0; rank < 3; ++rank) {
        const std::uint32_t part = rank == 0 ? i : (rank == 1 ? kParts - 1 - i : (i * 7) % kParts);
        job.Push(rank, part, Values(4, round * (rank + 1)));
        if (round == 3) pulls.push_back(job.Pull(rank, part));
      }
    }
  }
  std::uint64_t bytes[3] = {};
  for (const SmallJob::Envelope& envelope : job.queue) {
    bytes[envelope.from.rank] += envelope.message.payload.bytes();
  }
  for (const std::uint64_t sent : bytes) EXPECT_EQ(sent, 96u);
  EXPECT_GT(CountOf(job, Kind::kAsk), 0u);
  job.Run();
  for (const std::uint64_t pull : pulls) EXPECT_EQ(job.ValueOf(pull), Values(4, 18));
}

TEST(WorkerMachine, APullGoesOnceAPushBeforeItHasWaitedForBytesInVain) {
  ServerOptions server;
  WorkerOptions worker;
  server.unfinished_bytes_max = worker.unfinished_bytes_max = 40;  // one push
  SmallJob job(2, 1, server, worker);
  for (std::uint32_t part = 0; part < 2; ++part) {
    for (int rank = 0; rank < 2; ++rank) job.Init(rank, part, Values(4, 9));
  }
  job.Run();
  job.Push(1, 0, Values(4, 1));  // whose round worker 0 does not come to
  const auto push = job.Submit(1, {.kind = Kind::kPush,
                                   .part = SmallJob::IdOf(1),
                                   .payload = PayloadOf(Values(4, 1)),
                                   .deadline = job.now + seconds(1)});
  const auto pull = job.Pull(1, 1);
  job.Run();
  EXPECT_FALSE(job.Answered(pull));
  job.Advance(seconds(2));
  EXPECT_NE(job.ErrorOf(push), "");
  job.Push(0, 1, Values(4, 1));
  job.Run();
  EXPECT_THAT(job.ErrorOf(pull), HasSubstr("round 1"));
}

// ---- Pushes that await their values

PushValue ValueOf(std::vector<std::int64_t> values) {
  return {.payload = PayloadOf(std::move(values)), .failure = {}};
}

TEST(WorkerMachine, APushThatAwaitsItsValueHoldsUpItsPartAndNoOther) {
  SmallJob job(1);
  for (std::uint32_t part = 0; part < 2; ++part) job.Init(0, part, {0});
  job.Run();
  const auto first = job.AwaitingPush(0, 0);
  const auto second = job.Push(0, 0, {7});
  const auto pull = job.Pull(0, 0);
  const auto other = job.AwaitingPush(0, 1);
  job.Supply(0, 1, other, ValueOf({5}));
  job.Barrier(0);
  job.Run();
  EXPECT_EQ(job.ErrorOf(other), "");
  for (const auto waiting : {first, second, pull}) EXPECT_FALSE(job.Answered(waiting));
  EXPECT_TRUE(job.to_scheduler.empty()) << "the barrier waits for it";
  EXPECT_THAT(job.worker(0).DescribeState(job.now), HasSubstr("being copied from the GPU"));
  job.Supply(0, 0, first, ValueOf({6}));
  EXPECT_EQ(CountOf(job, Kind::kPush), 2u);
  job.Run();
  EXPECT_EQ(job.ErrorOf(first), "");
  EXPECT_EQ(job.ValueOf(pull), Values({7}));
  EXPECT_EQ(job.to_scheduler.size(), 1u);
  job.Supply(0, 0, first, ValueOf({100}));  // it has ended
  EXPECT_TRUE(job.queue.empty());
}

TEST(WorkerMachine, AValueThatCannotBeHadIsAFailedPush) {
  SmallJob job(2);
  for (int rank = 0; rank < 2; ++rank) job.Init(rank, 0, {3});
  job.Run();
  const auto push = job.AwaitingPush(0, 0);
  const auto pull = job.PushPull(1, 0, {1});
  job.Run();
  job.Supply(0, 0, push, {.payload = {}, .failure = ErrorBody{.message = "no gradient"}});
  job.Run();
  EXPECT_THAT(job.ErrorOf(pull), HasSubstr("no gradient"));
  job.Push(0, 0, {1});
  const auto next = job.PushPull(1, 0, {1});
  job.Run();
  EXPECT_EQ(job.ValueOf(next), Values({2}));
}

TEST(WorkerMachine, TheBytesOfAValueCountWhenItComes) {
  WorkerOptions worker;
  worker.unfinished_bytes_max = 20;
  SmallJob job(2, 1, {}, worker);
  for (std::uint32_t part = 0; part < 2; ++part) {
    for (int rank = 0; rank < 2; ++rank) job.Init(rank, part, {0, 0});
  }
  job.Run();
  const auto late = job.AwaitingPush(0, 0);
  job.Push(0, 1, {1, 1});  // 16 bytes
  job.Supply(0, 0, late, ValueOf({2, 2}));
  EXPECT_EQ(CountOf(job, Kind::kPush), 1u) << "16 more are too many";
  EXPECT_EQ(CountOf(job, Kind::kAsk), 1u);
  job.Push(1, 1, {1, 1});
  const auto pull = job.PushPull(1, 0, {1, 1});
  job.Run();
  EXPECT_EQ(job.ValueOf(pull), Values({3, 3}));
}

// Its place goes to the next request, and its bytes to other pushes.
TEST(WorkerMachine, APushThatTimesOutAfterItsGrantLeavesNoBytesReserved) {
  for (const bool removes : {false, true}) {
    ServerOptions server;
    WorkerOptions worker;
    server.unfinished_bytes_max = worker.unfinished_bytes_max = 20;
    SmallJob job(2, 1, server, worker);
    for (std::uint32_t part = 0; part < 3; ++part) {
      for (int rank = 0; rank < 2; ++rank) job.Init(rank, part, {0, 0});
    }
    job.Run();
    job.Push(0, 0, {1, 1});  // 16 bytes
    job.Submit(0, {.kind = Kind::kPush,
                   .part = SmallJob::IdOf(1),
                   .payload = PayloadOf({2, 2}),
                   .deadline = job.now + seconds(1)});
    EXPECT_EQ(CountOf(job, Kind::kAsk), 1u);
    // The lowest rank that part 1 waits for is let in, but the grant is on its way for too long.
    std::deque<SmallJob::Envelope> grants;
    while (!job.queue.empty()) {
      SmallJob::Envelope envelope = std::move(job.queue.front());
      job.queue.pop_front();
      if (envelope.message.kind == Kind::kGrant) {
        grants.push_back(std::move(envelope));
      } else {
        job.Deliver(std::move(envelope));
      }
    }
    EXPECT_EQ(grants.size(), 1u);
    EXPECT_EQ(job.server().State().waiting, 32u);
    job.Advance(seconds(2));
    if (removes) {
      job.Submit(0, {.kind = Kind::kRemove, .part = SmallJob::IdOf(1)});
    } else {
      job.Pull(0, 1);
    }
    job.Run();
    EXPECT_EQ(job.server().State().waiting, 16u) << removes;
    for (SmallJob::Envelope& grant : grants) job.Deliver(std::move(grant));
    job.Push(1, 0, {1, 1});
    job.Run();
    EXPECT_EQ(job.server().State().waiting, 0u) << removes;
  }
}

// Other parts of the array may have gone: this one, and what it held up, keep their places, as
// pushes that failed. The round after these is like any other.
TEST(WorkerMachine, AValueThatTimesOutKeepsItsPlace) {
  SmallJob job(2);
  for (int rank = 0; rank < 2; ++rank) job.Init(rank, 0, {0});
  job.Run();
  const Time deadline = job.now + seconds(1);
  const auto late = job.AwaitingPush(0, 0, deadline);
  const auto behind = job.Submit(0, {.kind = Kind::kPush,
                                     .part = SmallJob::IdOf(0),
                                     .payload = PayloadOf({50}),
                                     .deadline = deadline});
  const auto pull =
      job.Submit(0, {.kind = Kind::kPull, .part = SmallJob::IdOf(0), .deadline = deadline});
  std::vector<std::uint64_t> rounds;
  for (int round = 0; round < 2; ++round) rounds.push_back(job.PushPull(1, 0, {1}));
  job.Run();
  job.Advance(seconds(2));
  EXPECT_THAT(job.ErrorOf(late), HasSubstr("copy of its values"));
  for (const auto token : {late, behind, pull}) {
    EXPECT_THROW(std::rethrow_exception(job.ExceptionOf(token)), TimeoutError);
  }
  EXPECT_THAT(job.ErrorOf(rounds[0]), HasSubstr("copy of its values"));
  EXPECT_THAT(job.ErrorOf(rounds[1]), HasSubstr("within 1.0 s"));
  job.Supply(0, 0, late, ValueOf({100}));  // too late
  job.Push(0, 0, {3});
  const auto next = job.PushPull(1, 0, {4});
  const auto barrier = job.Barrier(0);
  job.Run();
  EXPECT_EQ(job.ValueOf(next), Values({7}));
  EXPECT_EQ(job.to_scheduler.size(), 1u) << "barrier " << barrier;
}

TEST(WorkerMachine, AfterAFailureValuesAreDropped) {
  SmallJob job(1);
  job.Init(0, 0, {0});
  job.Run();
  const auto push = job.AwaitingPush(0, 0);
  job.Do(WorkerNodeOf(0), [&](Outputs& out) {
    job.worker(0).OnLost(job.now, ServerNodeOf(0), "host:900", "gone", out);
  });
  EXPECT_THAT(job.ErrorOf(push), HasSubstr("gone"));
  job.Supply(0, 0, push, ValueOf({1}));
  EXPECT_TRUE(job.queue.empty());
}

TEST(WorkerMachine, FindNamesTheOpenRequestOfAnAnswer) {
  SmallJob job(1, 2);
  job.Init(0, 0, {0});
  job.Run();
  const auto pull = job.Pull(0, 0);
  const Request* found = job.worker(0).Find(0, SmallJob::IdOf(0), 1);
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->token, pull);
  EXPECT_EQ(job.worker(0).Find(1, SmallJob::IdOf(0), 1), nullptr) << "another server";
  EXPECT_EQ(job.worker(0).Find(0, SmallJob::IdOf(0), 2), nullptr);
  EXPECT_EQ(job.worker(0).Find(7, SmallJob::IdOf(0), 1), nullptr);
  job.Run();
  EXPECT_EQ(job.worker(0).Find(0, SmallJob::IdOf(0), 1), nullptr);
}

}  // namespace
}  // namespace heddle::kvstore::dist
