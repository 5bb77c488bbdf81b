// What a server does with requests, with workers that keep to the protocol.
#include "kvstore/dist/protocol/server.h"

#include <heddle/error.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/protocol/wire.h"
#include "tests/kvstore/dist/integer_parts.h"
#include "tests/kvstore/dist/small_job.h"

namespace heddle::kvstore::dist {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using Values = std::vector<std::int64_t>;

TEST(ServerMachine, SumsARoundAndAnswersItsPulls) {
  SmallJob job(2);
  const auto init0 = job.Init(0, 0, {1, 2});
  const auto init1 = job.Init(1, 0, {5, 5});
  job.Run();
  EXPECT_EQ(job.ErrorOf(init0), "");
  EXPECT_EQ(job.ErrorOf(init1), "");
  const auto before = job.Pull(1, 0);
  const auto push = job.Push(0, 0, {10, 20});
  const auto pull = job.Pull(0, 0);
  job.Run();
  EXPECT_EQ(job.ValueOf(before), Values({1, 2})) << "rank 0's value counts";
  EXPECT_EQ(job.ErrorOf(push), "") << "acknowledged before the round is complete";
  EXPECT_FALSE(job.Answered(pull));
  const auto pushpull = job.PushPull(1, 0, {3, 4});
  job.Run();
  EXPECT_EQ(job.ValueOf(pull), Values({13, 24}));
  EXPECT_EQ(job.ValueOf(pushpull), Values({13, 24}));
}

TEST(ServerMachine, AddsInTheOrderOfRanksWhateverArrivesFirst) {
  SmallJob job(4);
  for (int rank = 0; rank < 4; ++rank) job.Init(rank, 0, {0});
  job.Run();
  for (const int rank : {2, 0, 3, 1}) {
    job.Push(rank, 0, {rank});
    job.Run();
  }
  EXPECT_THAT(job.parts().At(SmallJob::IdOf(0)).added, ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(job.parts().At(SmallJob::IdOf(0)).value, Values({6}));
}

// Every order of arrival of requests that were sent in sequence, with repetitions.
TEST(ServerMachine, TakesRequestsInSequenceAndOnce) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    SmallJob job(2);
    job.Init(0, 0, {0});
    job.Init(1, 0, {0});
    job.Run();
    std::vector<std::uint64_t> pulls;
    for (int rank = 0; rank < 2; ++rank) {
      for (int round = 1; round <= 2; ++round) {
        job.Push(rank, 0, {rank + 10 * round});
        pulls.push_back(job.Pull(rank, 0));
      }
    }
    std::vector<SmallJob::Envelope> sent(job.queue.begin(), job.queue.end());
    for (std::size_t i = 0; i < 4; ++i) sent.push_back(sent[random() % sent.size()]);
    std::shuffle(sent.begin(), sent.end(), random);
    job.queue.assign(sent.begin(), sent.end());
    job.Run();
    EXPECT_EQ(job.ValueOf(pulls[0]), Values({21})) << "seed " << seed;
    EXPECT_EQ(job.ValueOf(pulls[1]), Values({41})) << "seed " << seed;
    EXPECT_EQ(job.ValueOf(pulls[2]), Values({21})) << "seed " << seed;
    EXPECT_EQ(job.ValueOf(pulls[3]), Values({41})) << "seed " << seed;
    EXPECT_EQ(job.parts().At(SmallJob::IdOf(0)).updates, 2) << "seed " << seed;
  }
}

TEST(ServerMachine, AcknowledgesInOneMessageATurn) {
  SmallJob job(2);
  for (std::uint32_t part = 0; part < 10; ++part) job.Init(0, part, {0});
  job.Run();
  for (std::uint32_t part = 0; part < 10; ++part) job.Push(0, part, {1});
  while (!job.queue.empty()) {
    const SmallJob::Envelope envelope = job.queue.front();
    job.queue.pop_front();
    job.Deliver(envelope);
  }
  job.Do(ServerNodeOf(0), [&](Outputs& out) { job.server().EndTurn(out); });
  ASSERT_EQ(job.queue.size(), 1u);
  AcksBody acks;
  ASSERT_TRUE(Decode(job.queue.front().message.meta, &acks));
  EXPECT_EQ(acks.acks.size(), 10u);
}

TEST(ServerMachine, InitOfOtherRanksWaitsForRankZero) {
  SmallJob job(3);
  const auto early = job.Init(2, 0, {0});
  const auto push = job.Push(2, 0, {1});
  job.Run();
  EXPECT_FALSE(job.Answered(early));
  EXPECT_FALSE(job.Answered(push)) << "behind the init of its rank";
  job.Init(0, 0, {7});
  job.Run();
  EXPECT_EQ(job.ErrorOf(early), "");
  EXPECT_EQ(job.ErrorOf(push), "");
}

TEST(ServerMachine, InitsWithoutAValueFailOnceRankZeroHasLeft) {
  SmallJob job(3);
  const auto early = job.Init(2, 0, {0});
  job.Run();
  EXPECT_FALSE(job.Answered(early));
  job.Leave(0);
  job.Run();
  const auto late = job.Init(1, 0, {0});
  job.Run();
  EXPECT_THAT(job.ErrorOf(early),
              AllOf(HasSubstr("'a'"), HasSubstr("worker 0"), HasSubstr("left")));
  EXPECT_THAT(job.ErrorOf(late), HasSubstr("worker 0"));
  EXPECT_THROW(std::rethrow_exception(job.ExceptionOf(late)), InvalidState);
  job.Leave(1);
  job.Leave(2);
  job.Run();
}

TEST(ServerMachine, ShapeThatDiffersIsAnErrorOfTheRankThatDiffers) {
  SmallJob job(2);
  const auto given = job.Init(1, 0, {0, 0, 0});
  const auto expected = job.Init(0, 0, {0, 0});
  job.Run();
  EXPECT_EQ(job.ErrorOf(expected), "");
  EXPECT_THAT(job.ErrorOf(given),
              AllOf(HasSubstr("(2,)"), HasSubstr("(3,)"), HasSubstr("worker 1")));
  EXPECT_THROW(std::rethrow_exception(job.ExceptionOf(given)), InvalidArgument);
  const auto again = job.Init(0, 0, {9, 9});
  const auto pull = job.Pull(1, 0);
  job.Run();
  EXPECT_THAT(job.ErrorOf(again), HasSubstr("initialised already"));
  EXPECT_EQ(job.ValueOf(pull), Values({0, 0})) << "nothing changed";
}

TEST(ServerMachine, RequestsForAnUnknownKeyFailAndTheKeyCanBeMadeLater) {
  SmallJob job(1);
  const auto push = job.Push(0, 0, {1});
  const auto pull = job.Pull(0, 0);
  const auto describe = job.Submit(0, {.kind = Kind::kDescribe, .part = SmallJob::IdOf(0)});
  job.Run();
  EXPECT_THROW(std::rethrow_exception(job.ExceptionOf(push)), InvalidArgument);
  EXPECT_THAT(job.ErrorOf(pull), HasSubstr("never initialised"));
  EXPECT_THAT(job.ErrorOf(describe), HasSubstr("never initialised"));
  job.Init(0, 0, {1});
  // Failed pushes count for nothing: neither in rounds nor in credit.
  for (int i = 0; i < 5; ++i) job.Push(0, 0, {2});
  const auto value = job.Pull(0, 0);
  const auto known = job.Submit(0, {.kind = Kind::kDescribe, .part = SmallJob::IdOf(0)});
  job.Run();
  EXPECT_EQ(job.ValueOf(value), Values({2}));
  InitBody body;
  ASSERT_TRUE(Decode(job.AnswerOf(known).meta, &body));
  EXPECT_EQ(body.info, job.parts().At(SmallJob::IdOf(0)).info);
}

TEST(ServerMachine, AFailedInputFailsItsRoundForAllAndTheNextCures) {
  SmallJob job(3);
  for (int rank = 0; rank < 3; ++rank) job.Init(rank, 0, {5});
  job.Run();
  std::vector<std::uint64_t> failed;
  std::vector<std::uint64_t> good;
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == 1) {
      job.FailedPush(rank, 0, "op 'grad': out of luck");
    } else {
      job.Push(rank, 0, {100});
    }
    failed.push_back(job.Pull(rank, 0));
    job.Push(rank, 0, {rank});
    good.push_back(job.Pull(rank, 0));
  }
  job.Run();
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_THAT(job.ErrorOf(failed[rank]), AllOf(HasSubstr("worker 1"), HasSubstr("out of luck"),
                                                 HasSubstr("round 1"), HasSubstr("'a'")));
    EXPECT_EQ(job.ValueOf(good[rank]), Values({3}));
  }
  EXPECT_EQ(job.parts().At(SmallJob::IdOf(0)).updates, 1);
}

TEST(ServerMachine, OfSeveralFailedInputsTheLowestRanksIsTold) {
  SmallJob job(3);
  for (int rank = 0; rank < 3; ++rank) job.Init(rank, 0, {5});
  job.FailedPush(2, 0, "second");
  job.FailedPush(1, 0, "first");
  job.Push(0, 0, {1});
  const auto pull = job.Pull(0, 0);
  const auto value = job.Pull(2, 0);
  job.Run();
  EXPECT_THAT(job.ErrorOf(pull), AllOf(HasSubstr("first"), Not(HasSubstr("second"))));
  EXPECT_THAT(job.ErrorOf(value), HasSubstr("first"));
}

TEST(ServerMachine, APushThatDoesNotFitFailsItsRound) {
  SmallJob job(2);
  job.Init(0, 0, {5});
  job.Init(1, 0, {5});
  const auto wrong = job.Push(0, 0, {1, 2, 3});
  const auto right = job.Push(1, 0, {1});
  const auto pull = job.Pull(1, 0);
  job.Run();
  EXPECT_THAT(job.ErrorOf(wrong), AllOf(HasSubstr("expected 8"), HasSubstr("given 24")));
  EXPECT_EQ(job.ErrorOf(right), "");
  EXPECT_THAT(job.ErrorOf(pull), HasSubstr("worker 0"));
  EXPECT_EQ(job.parts().At(SmallJob::IdOf(0)).value, Values({5}));
}

// Looking at what a request holds may take memory as well.
TEST(ServerMachine, ARequestForWhichThereIsNoMemoryIsAnsweredSo) {
  SmallJob job(1);
  job.Init(0, 0, {5});
  job.Run();
  job.parts().no_memory = true;
  const auto pull = job.Pull(0, 0);
  job.Run();
  EXPECT_THROW(std::rethrow_exception(job.ExceptionOf(pull)), OutOfMemory);
  job.parts().no_memory = true;
  const auto push = job.Push(0, 0, {1});
  job.Run();
  EXPECT_THROW(std::rethrow_exception(job.ExceptionOf(push)), OutOfMemory);
  job.Push(0, 0, {2});
  const auto later = job.Pull(0, 0);
  job.Run();
  EXPECT_EQ(job.ValueOf(later), Values({2}));
}

TEST(ServerMachine, AFailedUpdatePoisonsUntilReset) {
  SmallJob job(1);
  job.Init(0, 0, {5});
  job.Run();
  job.parts().fail_update[SmallJob::IdOf(0)] = "singular";
  job.Push(0, 0, {1});
  const auto first = job.Pull(0, 0);
  job.Push(0, 0, {2});
  const auto second = job.Pull(0, 0);
  const auto reset =
      job.Submit(0, {.kind = Kind::kReset, .part = SmallJob::IdOf(0), .payload = PayloadOf({9})});
  const auto third = job.Pull(0, 0);
  job.Push(0, 0, {3});
  const auto fourth = job.Pull(0, 0);
  job.Run();
  EXPECT_THAT(job.ErrorOf(first), HasSubstr("singular"));
  EXPECT_THAT(job.ErrorOf(second), HasSubstr("singular"));
  EXPECT_EQ(job.ErrorOf(reset), "");
  EXPECT_EQ(job.ValueOf(third), Values({9}));
  EXPECT_EQ(job.ValueOf(fourth), Values({3}));
}

// What other ranks have pushed to the next round by then is theirs.
TEST(ServerMachine, AResetInTheMidstOfARoundKeepsItsPushes) {
  for (const bool leaves : {false, true}) {
    SmallJob job(2);
    for (int rank = 0; rank < 2; ++rank) job.Init(rank, 0, {5});
    job.Run();
    job.parts().fail_update[SmallJob::IdOf(0)] = "singular";
    for (int rank = 0; rank < 2; ++rank) job.Push(rank, 0, {1});
    job.Push(0, 0, {2});
    job.Run();
    const auto reset =
        job.Submit(1, {.kind = Kind::kReset, .part = SmallJob::IdOf(0), .payload = PayloadOf({9})});
    job.Run();
    EXPECT_EQ(job.ErrorOf(reset), "");
    if (leaves) {
      job.Submit(1, {.kind = Kind::kRemove, .part = SmallJob::IdOf(0)});
    } else {
      job.Push(1, 0, {3});
    }
    const auto pull = job.Pull(0, 0);
    job.Run();
    EXPECT_EQ(job.ValueOf(pull), leaves ? Values({2}) : Values({5}));
  }
}

TEST(ServerMachine, UpdatesThatGoOnElsewhereHoldTheirPartOnly) {
  SmallJob job(2);
  for (const std::uint32_t part : {0u, 1u}) {
    for (int rank = 0; rank < 2; ++rank) job.Init(rank, part, {0});
  }
  job.Run();
  job.parts().defer = [](const PartId& id) { return id.part == 0; };
  std::vector<std::uint64_t> slow;
  std::vector<std::uint64_t> quick;
  for (int rank = 0; rank < 2; ++rank) {
    for (int round = 0; round < 2; ++round) slow.push_back(job.PushPull(rank, 0, {1 + round}));
    quick.push_back(job.PushPull(rank, 1, {3}));
  }
  job.Run();
  EXPECT_EQ(job.ValueOf(quick[0]), Values({6}));
  EXPECT_FALSE(job.Answered(slow[0]));
  for (const std::int64_t value : {2, 4}) {
    job.parts().EndUpdate(SmallJob::IdOf(0));
    job.Do(ServerNodeOf(0),
           [&](Outputs& out) { job.server().OnUpdated(job.now, SmallJob::IdOf(0), nullptr, out); });
    job.Run();
    EXPECT_EQ(job.ValueOf(slow[value == 2 ? 0 : 1]), Values({value}));
  }
}

TEST(ServerMachine, LeavingRanksAreInTheRoundsThatTheyPushedTo) {
  SmallJob job(3);
  for (int rank = 0; rank < 3; ++rank) job.Init(rank, 0, {0});
  job.Run();
  // Rank r does 3 + r rounds.
  std::vector<std::uint64_t> leaves;
  std::vector<Values> seen(3);
  for (int round = 1; round <= 5; ++round) {
    std::vector<std::uint64_t> pulls;
    for (int rank = 0; rank < 3; ++rank) {
      pulls.push_back(round <= 3 + rank ? job.PushPull(rank, 0,
                                                       {round * (rank == 0   ? 1
                                                                 : rank == 1 ? 100
                                                                             : 10000)})
                                        : 0);
      if (round == 3 + rank) leaves.push_back(job.Leave(rank));
    }
    job.Run();
    for (int rank = 0; rank < 3; ++rank) {
      if (pulls[rank] != 0) seen[rank].push_back(job.ValueOf(pulls[rank])[0]);
    }
  }
  EXPECT_EQ(seen[0], Values({10101, 20202, 30303}));
  EXPECT_EQ(seen[1], Values({10101, 20202, 30303, 40400}));
  EXPECT_EQ(seen[2], Values({10101, 20202, 30303, 40400, 50000}));
  for (const std::uint64_t leave : leaves) EXPECT_EQ(job.ErrorOf(leave), "");
  EXPECT_EQ(job.to_scheduler.size(), 3u) << "kLeaveJob of each";
}

TEST(ServerMachine, RanksThatCloseTheStoreDoNotWaitForOneAnother) {
  SmallJob job(2);
  for (const std::uint32_t part : {0u, 1u}) {
    for (int rank = 0; rank < 2; ++rank) job.Init(rank, part, {0});
  }
  // Each has more pushes than go ahead of the other's rounds, which never come.
  std::vector<std::uint64_t> pulls;
  for (int push = 1; push <= 5; ++push) {
    pulls.push_back(job.PushPull(0, 0, {push}));
    pulls.push_back(job.PushPull(1, 1, {10 * push}));
  }
  job.Run();
  for (const std::uint64_t pull : pulls) EXPECT_FALSE(job.Answered(pull));
  job.CloseStore(0);
  job.Run();
  EXPECT_EQ(job.ValueOf(pulls.back()), Values({50})) << "worker 1 is alone with part 1";
  EXPECT_FALSE(job.Answered(pulls.front())) << "worker 1 may still push to part 0";
  job.CloseStore(1);
  job.Run();
  for (int push = 1; push <= 5; ++push) {
    EXPECT_EQ(job.ValueOf(pulls[static_cast<std::size_t>(2 * push - 2)]), Values({push}));
    EXPECT_EQ(job.ValueOf(pulls[static_cast<std::size_t>(2 * push - 1)]), Values({10 * push}));
  }
  for (int rank = 0; rank < 2; ++rank) job.Leave(rank);
  job.Run();
  EXPECT_EQ(job.to_scheduler.size(), 2u) << "kLeaveJob of each";
}

TEST(ServerMachine, WhatARankStillAsksForAfterItHasClosedTheStoreIsWhatItWouldHaveBeen) {
  SmallJob job(2);
  for (int rank = 0; rank < 2; ++rank) job.Init(rank, 0, {0});
  job.Push(1, 0, {100});
  job.CloseStore(1, {{0, 3}});
  std::vector<std::uint64_t> others;
  for (int round = 1; round <= 3; ++round) others.push_back(job.PushPull(0, 0, {round}));
  job.Run();
  EXPECT_EQ(job.ValueOf(others[0]), Values({101}));
  EXPECT_FALSE(job.Answered(others[1])) << "worker 1 has three more requests to make";
  const auto first = job.Pull(1, 0);
  job.Push(1, 0, {200});
  const auto second = job.Pull(1, 0);
  job.Run();
  EXPECT_EQ(job.ValueOf(first), Values({101}));
  EXPECT_EQ(job.ValueOf(second), Values({202}));
  EXPECT_EQ(job.ValueOf(others[1]), Values({202}));
  EXPECT_EQ(job.ValueOf(others[2]), Values({3}));
}

TEST(ServerMachine, ARankThatHasClosedTheStoreIsNotAwaitedForRequestsThatDoNotCome) {
  SmallJob job(2);
  for (const std::uint32_t part : {0u, 1u}) {
    for (int rank = 0; rank < 2; ++rank) job.Init(rank, part, {0});
  }
  job.Run();
  job.CloseStore(1, {{0, 2}, {1, 2}});
  const auto of_0 = job.PushPull(0, 0, {1});
  const auto of_1 = job.PushPull(0, 1, {2});
  job.Run();
  job.Push(1, 0, {10});
  job.Run();
  EXPECT_EQ(job.ValueOf(of_0), Values({11}));
  const auto next = job.PushPull(0, 0, {3});
  job.Run();
  for (const auto pull : {of_1, next}) EXPECT_FALSE(job.Answered(pull)) << "one more may come";
  job.StoreClosed(1);
  job.Run();
  EXPECT_EQ(job.ValueOf(of_1), Values({2}));
  EXPECT_EQ(job.ValueOf(next), Values({3}));
  job.StoreClosed(1);
  EXPECT_TRUE(job.queue.empty()) << "nothing is left to say";
}

TEST(ServerMachine, InitsWithoutAValueFailOnceRankZeroHasClosedTheStore) {
  SmallJob job(2);
  const auto init = job.Init(1, 0, {0});
  const auto other = job.Init(1, 1, {0});
  job.Run();
  job.CloseStore(0, {{1, 1}});
  job.Run();
  EXPECT_THAT(job.ErrorOf(init), AllOf(HasSubstr("worker 0"), HasSubstr("closed the store")));
  EXPECT_FALSE(job.Answered(other)) << "worker 0 still has a request to make";
  job.Init(0, 1, {5});
  job.Run();
  EXPECT_EQ(job.ErrorOf(other), "");
}

TEST(ServerMachine, AStoreIsClosedByAsManyMessagesAsItsPartsTake) {
  constexpr std::uint32_t kParts = 40'000;  // 24 bytes each
  SmallJob job(2);
  for (int rank = 0; rank < 2; ++rank) job.Init(rank, 0, {0});
  job.Run();
  std::map<std::uint32_t, std::uint64_t> to_come;
  for (std::uint32_t part = 1; part < kParts; ++part) to_come[part] = 1;
  const auto pull = job.PushPull(0, 0, {1});
  job.CloseStore(1, to_come);
  job.Run();
  EXPECT_EQ(job.ValueOf(pull), Values({1}));
}

TEST(ServerMachine, RequestsBeyondThoseThatAClosedStoreHasAnnouncedAreRefused) {
  SmallJob job(2);
  for (int rank = 0; rank < 2; ++rank) job.Init(rank, 0, {0});
  job.CloseStore(1, {{0, 1}});
  job.Run();
  job.Push(1, 0, {10});
  const auto push = job.Push(1, 0, {100});
  const auto pull = job.Pull(1, 0);
  const auto sum = job.PushPull(0, 0, {1});
  const auto next = job.PushPull(0, 0, {2});
  job.Run();
  for (const auto late : {push, pull}) {
    EXPECT_THAT(job.ErrorOf(late), AllOf(HasSubstr("worker 1"), HasSubstr("closed the store")));
  }
  EXPECT_EQ(job.ValueOf(sum), Values({11}));
  EXPECT_EQ(job.ValueOf(next), Values({2}));
}

TEST(ServerMachine, ACloseThatCannotBeIsRefused) {
  SmallJob job(2);
  for (int rank = 0; rank < 2; ++rank) job.Init(rank, 0, {0});
  const auto pull = job.PushPull(0, 0, {1});
  job.Run();
  // No program makes such a request, and none is told of the answer.
  const auto answer_to = [&](std::string meta) {
    job.Control(1, Kind::kCloseStore, std::move(meta));
    SmallJob::Envelope request = std::move(job.queue.front());
    job.queue.pop_front();
    job.Deliver(std::move(request));
    ErrorBody error;
    EXPECT_TRUE(Decode(job.queue.back().message.meta, &error));
    job.Run();
    return error.message;
  };
  const PartId of_another_store{.store = 1, .part = 0, .key = 7};
  EXPECT_THAT(answer_to(Encode(CloseStoreBody{.parts = {{.part = of_another_store, .count = 1}}})),
              HasSubstr("the close of store 0 names part 0 of store 1"));
  EXPECT_THAT(answer_to("garbage"), HasSubstr("cannot be read"));
  EXPECT_FALSE(job.Answered(pull)) << "worker 1 is still in the rounds";
  job.CloseStore(1);
  job.Run();
  EXPECT_TRUE(job.Answered(pull));
  const PartId of_this{SmallJob::IdOf(0)};
  EXPECT_THAT(answer_to(Encode(CloseStoreBody{.parts = {{.part = of_this, .count = 9}}})),
              HasSubstr("worker 1 has closed the store, and announces more requests"));
}

TEST(ServerMachine, ARoundIsCompleteWhenTheLastMissingRankLeaves) {
  SmallJob job(2);
  job.Init(0, 0, {0});
  job.Init(1, 0, {0});
  const auto pull = job.PushPull(0, 0, {4});
  job.Run();
  EXPECT_FALSE(job.Answered(pull));
  job.Leave(1);
  job.Run();
  EXPECT_EQ(job.ValueOf(pull), Values({4}));
}

TEST(ServerMachine, WorkersThatOnlyPushHearOfCompleteRounds) {
  SmallJob job(3);
  for (int rank = 0; rank < 3; ++rank) job.Init(rank, 0, {0});
  job.Run();
  std::vector<std::uint64_t> pushes;
  for (int round = 0; round < 50; ++round) {
    for (int rank = 0; rank < 3; ++rank) pushes.push_back(job.Push(rank, 0, {1}));
    if (round % 7 == 0) job.Run();
  }
  job.Run();
  for (const std::uint64_t push : pushes) EXPECT_EQ(job.ErrorOf(push), "");
  EXPECT_EQ(job.parts().At(SmallJob::IdOf(0)).updates, 50);
}

TEST(ServerMachine, AStaleIncarnationIsRefusedByName) {
  SmallJob job(2);
  job.Init(0, 0, {0});
  job.Init(1, 0, {0});
  job.Run();
  Message stale{.kind = Kind::kPush,
                .rank = 1,
                .incarnation = 0xdead,
                .part = SmallJob::IdOf(0),
                .sequence = 1,
                .payload = PayloadOf({1000})};
  job.Deliver({WorkerNodeOf(1), ServerNodeOf(0), stale});
  ASSERT_EQ(job.queue.size(), 1u);
  const Message answer = job.queue.front().message;
  ErrorBody error;
  ASSERT_TRUE(Decode(answer.meta, &error));
  EXPECT_EQ(error.code, ErrorBody::Code::kInvalidState);
  EXPECT_EQ(answer.incarnation, 0xdeadu) << "the worker of today does not take it for its own";
  EXPECT_THAT(error.message, AllOf(HasSubstr("worker 1"), HasSubstr("dead"), HasSubstr("65")));
  const auto pull0 = job.PushPull(0, 0, {1});
  const auto pull1 = job.PushPull(1, 0, {2});
  job.Run();
  EXPECT_EQ(job.ValueOf(pull0), Values({3}));
  EXPECT_EQ(job.ValueOf(pull1), Values({3}));
}

TEST(ServerMachine, RefusesWhatIsNotARequest) {
  SmallJob job(2);
  job.Init(0, 0, {0});
  job.Run();
  const auto refused = [&](Message message, std::int32_t from) {
    job.Deliver({WorkerNodeOf(from), ServerNodeOf(0), std::move(message)});
    EXPECT_EQ(job.queue.size(), 1u);
    if (job.queue.empty()) return std::string();
    ErrorBody error;
    EXPECT_TRUE(Decode(job.queue.front().message.meta, &error));
    job.queue.clear();
    return error.message;
  };
  const Message good{.kind = Kind::kPull,
                     .rank = 0,
                     .incarnation = SmallJob::IncarnationOf(0),
                     .part = SmallJob::IdOf(0),
                     .sequence = 1};
  Message other_rank = good;
  other_rank.rank = 1;
  EXPECT_THAT(refused(other_rank, 0), HasSubstr("as worker 1"));
  EXPECT_THAT(refused(good, 7), HasSubstr("of 2 workers"));
  Message kind = good;
  kind.kind = Kind::kJoin;
  EXPECT_THAT(refused(kind, 0), HasSubstr("kind 10"));
  Message about_server = good;
  about_server.kind = Kind::kCommand;
  EXPECT_THAT(refused(about_server, 0), HasSubstr("about a part"));
  Message far = good;
  far.sequence = 1 + kRequestsAheadMax;
  EXPECT_THAT(refused(far, 0), HasSubstr("comes before request 1"));
  Message init = good;
  init.kind = Kind::kInit;
  init.meta = "rubbish";
  EXPECT_THAT(refused(init, 0), HasSubstr("cannot be read"));
}

TEST(ServerMachine, StoresOfDifferentTypesAreAnErrorThatNamesBoth) {
  SmallJob job(2, 1, {}, {}, "");
  const auto first = job.OpenStore(0, 0, "dist_sync");
  const auto second = job.OpenStore(1, 0, "dist_async");
  job.Run();
  EXPECT_EQ(job.ErrorOf(first), "");
  EXPECT_THAT(job.ErrorOf(second), AllOf(HasSubstr("'dist_sync'"), HasSubstr("'dist_async'"),
                                         HasSubstr("worker 0"), HasSubstr("worker 1")));
}

TEST(ServerMachine, RequestsWaitForTheirStoreAndTheRoster) {
  SmallJob job(1, 1, {}, {}, "");
  const auto init = job.Init(0, 0, {3});
  const auto pull = job.Pull(0, 0);
  job.Run();
  EXPECT_FALSE(job.Answered(init));
  job.OpenStore(0, 0, "dist_sync");
  job.Run();
  EXPECT_EQ(job.ValueOf(pull), Values({3}));

  IntegerParts parts;
  RecordedControl control;
  ServerMachine server({}, parts, control);
  Outputs out;
  server.OnMessage(job.now, WorkerNodeOf(0),
                   {.kind = Kind::kOpenStore,
                    .incarnation = 1,
                    .part = ControlPart(0),
                    .meta = Encode(OpenStoreBody{"dist_sync"})},
                   out);
  EXPECT_TRUE(out.messages.empty());
  server.OnRoster(
      job.now, {.num_workers = 1, .num_servers = 1, .nodes = {{WorkerNodeOf(0), 1, "h:1"}}}, out);
  ASSERT_EQ(out.messages.size(), 1u);
  EXPECT_EQ(out.messages[0].message.kind, Kind::kDone);
}

// Versions of the optimizer.

constexpr std::uint64_t Version(std::uint64_t generation, std::uint64_t revision) {
  return generation << 32 | revision;
}

TEST(ServerMachine, PushesWaitForTheOptimizerThatTheyCountOn) {
  SmallJob job(2);
  job.Init(0, 0, {0});
  job.Init(1, 0, {0});
  job.Run();
  const auto push = job.Push(0, 0, {1}, Version(1, 0));
  const auto other = job.Push(1, 0, {2}, Version(1, 0));
  const auto pull = job.Pull(1, 0);
  job.Run();
  EXPECT_FALSE(job.Answered(push));
  const OptimizerBody sgd{.name = "sgd", .parameters = {{"learning_rate", 0.1}, {"momentum", 0.9}}};
  job.Control(0, Kind::kSetOptimizer, Encode(sgd), Version(1, 0));
  job.Run();
  EXPECT_EQ(job.ErrorOf(push), "");
  EXPECT_EQ(job.ErrorOf(other), "");
  EXPECT_EQ(job.ValueOf(pull), Values({3}));
  EXPECT_EQ(job.parts().At(SmallJob::IdOf(0)).by.version, Version(1, 0));

  job.Push(0, 0, {1}, Version(1, 1));
  job.Push(1, 0, {1}, Version(1, 0));
  const auto later = job.Pull(1, 0);
  job.Run();
  EXPECT_FALSE(job.Answered(later));
  job.Control(0, Kind::kSetParameters, Encode(sgd), Version(1, 1));
  job.Run();
  EXPECT_EQ(job.ValueOf(later), Values({5}));
  EXPECT_EQ(job.parts().At(SmallJob::IdOf(0)).by.version, Version(1, 1));
  // Versions never go back.
  job.Push(0, 0, {1}, Version(1, 0));
  job.Push(1, 0, {1}, Version(1, 0));
  job.Run();
  EXPECT_EQ(job.parts().At(SmallJob::IdOf(0)).by.version, Version(1, 1));
}

TEST(ServerMachine, AfterAnOptimizerThatCannotBeSetAnotherOneCan) {
  SmallJob job(2);
  job.control().fail = "optimizer 1 custom";
  const auto refused =
      job.Control(0, Kind::kSetOptimizer, Encode(OptimizerBody{.name = "custom"}), Version(1, 0));
  job.Run();
  EXPECT_THAT(job.ErrorOf(refused), HasSubstr("refused"));
  const OptimizerBody sgd{.name = "sgd"};
  const auto next = job.Control(0, Kind::kSetOptimizer, Encode(sgd), Version(1, 0));
  const auto equal = job.Control(1, Kind::kSetOptimizer, Encode(sgd), Version(1, 0));
  const auto other =
      job.Control(1, Kind::kSetOptimizer, Encode(OptimizerBody{.name = "adam"}), Version(1, 0));
  job.Run();
  EXPECT_EQ(job.ErrorOf(next), "");
  EXPECT_EQ(job.ErrorOf(equal), "");
  EXPECT_THAT(job.ErrorOf(other), HasSubstr("as worker 0 has set it"));
}

// The states of one would serve as the other's.
TEST(ServerMachine, ParametersOfAnotherOptimizerAreRefused) {
  SmallJob job(1);
  job.Init(0, 0, {0});
  job.Control(0, Kind::kSetOptimizer, Encode(OptimizerBody{.name = "sgd"}), Version(1, 0));
  const auto refused =
      job.Control(0, Kind::kSetParameters, Encode(OptimizerBody{.name = "adam"}), Version(1, 1));
  job.Push(0, 0, {1}, Version(1, 1));
  const auto pull = job.Pull(0, 0);
  job.Run();
  EXPECT_THAT(job.ErrorOf(refused), HasSubstr("expected sgd"));
  EXPECT_EQ(job.control().calls.back(), "optimizer 1 sgd");
  EXPECT_EQ(job.ValueOf(pull), Values({1}));
}

TEST(ServerMachine, EqualOptimizersAreOneAndDifferentOnesAnError) {
  SmallJob job(3);
  const OptimizerBody a{.name = "sgd", .parameters = {{"learning_rate", 0.1}, {"momentum", 0.9}}};
  const OptimizerBody same{.name = "sgd",
                           .parameters = {{"momentum", 0.9}, {"learning_rate", 0.5}}};
  const OptimizerBody b{.name = "sgd", .parameters = {{"learning_rate", 0.1}, {"momentum", 0.8}}};
  const auto first = job.Control(0, Kind::kSetOptimizer, Encode(a), Version(1, 0));
  const auto second = job.Control(1, Kind::kSetOptimizer, Encode(same), Version(1, 0));
  const auto third = job.Control(2, Kind::kSetOptimizer, Encode(b), Version(1, 0));
  job.Run();
  EXPECT_EQ(job.ErrorOf(first), "");
  EXPECT_EQ(job.ErrorOf(second), "");
  EXPECT_THAT(job.ErrorOf(third), AllOf(HasSubstr("worker 0"), HasSubstr("worker 2"),
                                        HasSubstr("momentum=0.9"), HasSubstr("momentum=0.8")));
  EXPECT_THAT(job.control().calls, ElementsAre("open 0 dist_sync", "optimizer 1 sgd"));
}

namespace {

std::uint64_t TakeBack(SmallJob& job, std::int32_t rank, const OptimizerBody& optimizer,
                       std::uint64_t generation) {
  return job.Submit(rank, {.kind = Kind::kSetOptimizer,
                           .part = ControlPart(0),
                           .flags = kFlagFailed,
                           .version = Version(generation, 0),
                           .meta = Encode(optimizer)});
}

}  // namespace

// Another server has refused it.
TEST(ServerMachine, AnOptimizerThatIsTakenBackMakesRoomForAnother) {
  for (const std::string type : {"dist_sync", "dist_async"}) {
    SmallJob job(2, 1, {}, {}, type);
    const OptimizerBody first{.name = "sgd"};
    const OptimizerBody refused{.name = "adam"};
    const OptimizerBody other{.name = "lamb"};
    for (const int rank : {0, 1}) job.Init(rank, 0, {0});
    job.Control(0, Kind::kSetOptimizer, Encode(first), Version(1, 0));
    job.Control(0, Kind::kSetOptimizer, Encode(refused), Version(2, 0));
    job.Run();
    job.Push(1, 0, {1});  // has set none
    job.Run();
    TakeBack(job, 0, refused, 2);
    job.Push(0, 0, {1}, Version(1, 0));
    job.Run();
    job.Push(1, 0, {1});
    job.Push(0, 0, {1}, Version(1, 0));
    job.Run();
    EXPECT_EQ(job.parts().At(SmallJob::IdOf(0)).by.version, Version(1, 0)) << type;
    const auto again = job.Control(0, Kind::kSetOptimizer, Encode(other), Version(2, 0));
    const auto by_another = job.Control(1, Kind::kSetOptimizer, Encode(first), Version(1, 0));
    job.Push(0, 0, {1}, Version(2, 0));
    job.Push(1, 0, {1}, Version(1, 0));
    const auto pull = job.Pull(0, 0);
    job.Run();
    EXPECT_EQ(job.ErrorOf(again), "") << type;
    EXPECT_EQ(job.ErrorOf(by_another), "") << type;
    EXPECT_EQ(job.ErrorOf(pull), "") << type;
    EXPECT_THAT(job.control().calls,
                ElementsAre("open 0 " + type, "optimizer 1 sgd", "optimizer 2 adam",
                            "drop optimizer 2", "optimizer 2 lamb"));
  }
}

TEST(ServerMachine, AnOptimizerIsTakenBackForTheRankAlone) {
  SmallJob job(2);
  const OptimizerBody sgd{.name = "sgd"};
  const OptimizerBody adam{.name = "adam"};
  std::vector<std::uint64_t> requests = {TakeBack(job, 0, sgd, 1)};  // it has never come here
  for (const int rank : {0, 1}) {
    requests.push_back(job.Control(rank, Kind::kSetOptimizer, Encode(sgd), Version(1, 0)));
  }
  requests.push_back(TakeBack(job, 1, adam, 1));  // which was refused
  requests.push_back(TakeBack(job, 0, sgd, 1));
  requests.push_back(TakeBack(job, 0, sgd, 1));  // once more
  requests.push_back(job.Control(1, Kind::kSetOptimizer, Encode(adam), Version(2, 0)));
  requests.push_back(TakeBack(job, 1, sgd, 1));  // a later one counts on it
  job.Run();
  for (const auto request : requests) EXPECT_EQ(job.ErrorOf(request), "");
  const auto different = job.Control(0, Kind::kSetOptimizer, Encode(adam), Version(1, 0));
  job.Run();
  EXPECT_THAT(job.ErrorOf(different), HasSubstr("optimizer 1 of the store is sgd"));
  EXPECT_THAT(job.control().calls,
              ElementsAre("open 0 dist_sync", "optimizer 1 sgd", "optimizer 2 adam"));
}

TEST(ServerMachine, EqualCompressionsAreOneAndDifferentOnesAnError) {
  SmallJob job(3);
  const auto set = [&](int rank, const std::string& type, double threshold) {
    return job.Control(rank, Kind::kSetCompression,
                       Encode(CompressionBody{{.type = type, .threshold = threshold}}));
  };
  job.control().fail = "compression 2bit";
  const auto failed = set(2, "2bit", 7);
  job.Run();
  EXPECT_THAT(job.ErrorOf(failed), HasSubstr("refused")) << "and is not what others must set";
  job.control().fail = "";
  const auto first = set(1, "1bit", 0.5);
  const auto same = set(2, "1bit", 0.5);
  const auto other_type = set(0, "2bit", 0.5);
  job.Run();
  EXPECT_EQ(job.ErrorOf(first), "");
  EXPECT_EQ(job.ErrorOf(same), "");
  EXPECT_THAT(
      job.ErrorOf(other_type),
      HasSubstr("gradient compression of the store is type 1bit, threshold 0.5, as worker 1 "
                "has set it; worker 0 sets type 2bit, threshold 0.5"));
  EXPECT_THROW(std::rethrow_exception(job.ExceptionOf(other_type)), InvalidArgument);
  const auto other_threshold = set(0, "1bit", 0.25);
  const auto at_last = set(0, "1bit", 0.5);
  job.Run();
  EXPECT_THAT(job.ErrorOf(other_threshold), HasSubstr("threshold 0.25"));
  EXPECT_EQ(job.ErrorOf(at_last), "");
  EXPECT_THAT(job.control().calls, ElementsAre("open 0 dist_sync", "compression 1bit"));
}

// Likewise.
TEST(ServerMachine, ACompressionThatIsTakenBackMakesRoomForAnother) {
  SmallJob job(2);
  const auto submit = [&](int rank, const std::string& type, std::uint8_t flags) {
    return job.Submit(rank, {.kind = Kind::kSetCompression,
                             .part = ControlPart(0),
                             .flags = flags,
                             .meta = Encode(CompressionBody{{.type = type, .threshold = 0.5}})});
  };
  std::vector<std::uint64_t> requests = {submit(0, "1bit", kFlagFailed)};  // has never come here
  for (const int rank : {0, 1}) requests.push_back(submit(rank, "1bit", 0));
  requests.push_back(submit(1, "2bit", kFlagFailed));  // which was refused
  requests.push_back(submit(0, "1bit", kFlagFailed));
  requests.push_back(submit(0, "1bit", kFlagFailed));  // once more
  job.Run();
  const auto different = submit(0, "2bit", 0);
  job.Run();
  EXPECT_THAT(job.ErrorOf(different), HasSubstr("is type 1bit, threshold 0.5, as worker 1 has set"))
      << "another rank has it";
  requests.push_back(submit(1, "1bit", kFlagFailed));
  job.Run();
  requests.push_back(submit(0, "2bit", 0));
  job.Run();
  for (const auto request : requests) EXPECT_EQ(job.ErrorOf(request), "");
  EXPECT_THAT(job.control().calls, ElementsAre("open 0 dist_sync", "compression 1bit",
                                               "drop compression", "compression 2bit"));
}

TEST(ServerMachine, PushesOfAnOptimizerThatCannotBeSetFail) {
  SmallJob job(2);
  job.control().fail = "optimizer";
  job.Init(0, 0, {0});
  job.Init(1, 0, {0});
  const auto set =
      job.Control(0, Kind::kSetOptimizer, Encode(OptimizerBody{.name = "x"}), Version(1, 0));
  const auto push = job.Push(0, 0, {1}, Version(1, 0));
  job.Push(1, 0, {1}, Version(1, 0));
  const auto pull = job.Pull(1, 0);
  job.Run();
  EXPECT_THAT(job.ErrorOf(set), HasSubstr("refused"));
  EXPECT_THAT(job.ErrorOf(push), HasSubstr("refused"));
  EXPECT_THAT(job.ErrorOf(pull), HasSubstr("refused"));
}

Request PushWithRates(double rate, std::uint64_t version, std::int64_t value) {
  return {.kind = Kind::kPush,
          .part = SmallJob::IdOf(0),
          .flags = kFlagRates,
          .version = version,
          .meta = Encode(RatesBody{{.learning_rate = rate, .weight_decay = 0.5}}),
          .payload = PayloadOf({value})};
}

TEST(ServerMachine, RatesAreOfTheLowestRankWithTheLatestVersion) {
  SmallJob job(3);
  for (int rank = 0; rank < 3; ++rank) job.Init(rank, 0, {0});
  job.Control(0, Kind::kSetOptimizer, Encode(OptimizerBody{.name = "sgd"}), Version(1, 0));
  job.Control(0, Kind::kSetParameters, Encode(OptimizerBody{.name = "sgd"}), Version(1, 3));
  job.Run();
  const auto rate = [&] { return job.parts().At(SmallJob::IdOf(0)).by.rates->learning_rate; };
  job.Submit(2, PushWithRates(0.3, Version(1, 3), 1));
  job.Submit(0, PushWithRates(0.1, Version(1, 0), 1));
  job.Submit(1, PushWithRates(0.2, Version(1, 3), 1));
  job.Run();
  EXPECT_EQ(rate(), 0.2);
  // A push without rates has those that its rank sent last.
  for (int rank = 0; rank < 3; ++rank) job.Push(rank, 0, {1}, Version(1, 0));
  job.Run();
  EXPECT_EQ(rate(), 0.1);
  // What a rank sends ahead does not count before its round.
  job.Submit(0, PushWithRates(0.7, Version(1, 0), 1));
  job.Submit(0, PushWithRates(0.8, Version(1, 0), 1));
  job.Push(1, 0, {1}, Version(1, 0));
  job.Push(2, 0, {1}, Version(1, 0));
  job.Run();
  EXPECT_EQ(rate(), 0.7);
}

TEST(ServerMachine, ControlRequestsHappenOnceAndAreAnsweredAgain) {
  SmallJob job(1);
  const auto command =
      job.Control(0, Kind::kCommand, Encode(CommandBody{.head = 3, .body = "hello"}));
  const SmallJob::Envelope request = job.queue.front();
  job.queue.push_back(request);
  job.Run();
  EXPECT_EQ(job.AnswerOf(command).meta, "done");
  job.queue.push_back(request);
  job.Run();
  EXPECT_THAT(job.control().calls, ElementsAre("open 0 dist_sync", "command hello"));

  job.control().deferred = true;
  const auto slow = job.Control(0, Kind::kCommand, Encode(CommandBody{.body = "slow"}));
  job.Run();
  EXPECT_FALSE(job.Answered(slow));
  job.Do(ServerNodeOf(0), [&](Outputs& out) {
    job.server().OnControlDone(job.now, job.control().last, {.error = nullptr, .meta = "late"},
                               out);
  });
  job.Run();
  EXPECT_EQ(job.AnswerOf(slow).meta, "late");

  job.Init(0, 0, {1});
  const auto keys = job.Control(0, Kind::kKeys, "");
  job.Run();
  KeysBody body;
  ASSERT_TRUE(Decode(job.AnswerOf(keys).meta, &body));
  EXPECT_THAT(body.keys, ElementsAre(Key(std::string("a"))));
}

// And those that this worker has removed are none of its own.
TEST(ServerMachine, MoreKeysThanAMessageHoldsAreToldOneMessageAfterTheOther) {
  SmallJob job(1);
  std::vector<Key> expected;
  for (std::uint64_t number = 0; number < 30; ++number) {
    const Key key = std::string(100'000, static_cast<char>('a' + number));
    job.Submit(
        0, {.kind = Kind::kInit,
            .part = {.store = 0, .part = 0, .key = number},
            .meta = Encode(InitBody{{.key = key, .shape = {1}, .dtype = DType::kInt64, .end = 1}}),
            .payload = PayloadOf({1})});
    if (number % 10 == 9) {
      job.Submit(0, {.kind = Kind::kRemove, .part = {.store = 0, .part = 0, .key = number}});
    } else {
      expected.push_back(key);
    }
  }
  job.Run();
  std::vector<Key> keys;
  for (KeysBody body;;) {
    const auto asked =
        job.Control(0, Kind::kKeys, keys.empty() ? "" : Encode(KeysBody{{keys.back()}}));
    job.Run();
    ASSERT_EQ(job.ErrorOf(asked), "");
    ASSERT_TRUE(Decode(job.AnswerOf(asked).meta, &body));
    if (body.keys.empty()) break;
    EXPECT_LE(body.keys.size(), 10u);
    keys.insert(keys.end(), body.keys.begin(), body.keys.end());
  }
  EXPECT_EQ(keys, expected);
  for (const std::string& wrong : {std::string("noise"), Encode(KeysBody{})}) {
    EXPECT_THAT(job.ErrorOf([&] {
      const auto asked = job.Control(0, Kind::kKeys, wrong);
      job.Run();
      return asked;
    }()),
                HasSubstr("cannot be read"));
  }
}

TEST(ServerMachine, MoreThanAMessageHoldsIsAnErrorRatherThanALostConnection) {
  SmallJob job(1);
  const std::string much(kMetaBytesMax, 'x');
  const auto command = job.Control(0, Kind::kCommand, Encode(CommandBody{.body = much}));
  EXPECT_THAT(job.ErrorOf(command), HasSubstr("expected at most 1048576"));
  EXPECT_THROW(std::rethrow_exception(job.ExceptionOf(command)), InvalidArgument);

  job.control().deferred = true;
  const auto answer = job.Control(0, Kind::kCommand, Encode(CommandBody{.body = "a"}));
  job.Run();
  job.Do(ServerNodeOf(0), [&](Outputs& out) {
    job.server().OnControlDone(job.now, job.control().last, {.error = nullptr, .meta = much + "y"},
                               out);
  });
  job.Run();
  EXPECT_THAT(job.ErrorOf(answer), HasSubstr("1048577 bytes"));
}

// dist_async.

TEST(ServerMachine, AsyncAppliesEachPushOnArrival) {
  SmallJob job(2, 1, {}, {}, "dist_async");
  job.Init(0, 0, {0});
  job.Init(1, 0, {0});
  job.Control(0, Kind::kSetOptimizer, Encode(OptimizerBody{.name = "sgd"}), Version(1, 0));
  job.Run();
  const auto push = job.Push(0, 0, {1}, Version(1, 0));
  const auto pull = job.Pull(0, 0);
  job.Run();
  EXPECT_EQ(job.ErrorOf(push), "");
  EXPECT_EQ(job.ValueOf(pull), Values({1}));
  for (int i = 0; i < 20; ++i) job.Push(1, 0, {10}, Version(1, 0));
  const auto after = job.Pull(1, 0);
  job.Run();
  EXPECT_EQ(job.ValueOf(after), Values({201}));
}

TEST(ServerMachine, AsyncUpdatesOfAPartAreOneAtATime) {
  SmallJob job(2, 1, {}, {}, "dist_async");
  job.Init(0, 0, {0});
  job.Init(1, 0, {0});
  job.Control(0, Kind::kSetOptimizer, Encode(OptimizerBody{.name = "sgd"}), Version(1, 0));
  job.Run();
  job.parts().defer = [](const PartId&) { return true; };
  const auto first = job.Push(0, 0, {1}, Version(1, 0));
  const auto pull0 = job.Pull(0, 0);
  const auto second = job.Push(1, 0, {2}, Version(1, 0));
  const auto pull1 = job.Pull(1, 0);
  job.Run();
  EXPECT_FALSE(job.Answered(first)) << "acknowledged when applied";
  const auto end = [&] {
    job.parts().EndUpdate(SmallJob::IdOf(0));
    job.Do(ServerNodeOf(0),
           [&](Outputs& out) { job.server().OnUpdated(job.now, SmallJob::IdOf(0), nullptr, out); });
    job.Run();
  };
  end();
  EXPECT_EQ(job.ErrorOf(first), "");
  EXPECT_FALSE(job.Answered(second));
  end();
  EXPECT_EQ(job.ErrorOf(second), "");
  EXPECT_EQ(job.ValueOf(pull0), Values({1})) << "came before the second push";
  EXPECT_EQ(job.ValueOf(pull1), Values({3}));
}

TEST(ServerMachine, AsyncFailedInputLastsUntilTheNextGoodPush) {
  SmallJob job(2, 1, {}, {}, "dist_async");
  job.Init(0, 0, {4});
  job.Init(1, 0, {4});
  job.Run();
  job.FailedPush(0, 0, "nan");
  const auto failed = job.Pull(0, 0);
  job.Run();
  EXPECT_THAT(job.ErrorOf(failed), AllOf(HasSubstr("nan"), HasSubstr("worker 0")));
  job.Push(1, 0, {9});
  const auto good = job.Pull(1, 0);
  job.Run();
  EXPECT_EQ(job.ValueOf(good), Values({9}));
}

TEST(ServerMachine, AsyncRatesAreRankZerosOnceItHasSentSome) {
  SmallJob job(2, 1, {}, {}, "dist_async");
  job.Init(0, 0, {0});
  job.Init(1, 0, {0});
  job.Control(0, Kind::kSetOptimizer, Encode(OptimizerBody{.name = "sgd"}), Version(1, 0));
  job.Run();
  const auto rate = [&] { return job.parts().At(SmallJob::IdOf(0)).by.rates->learning_rate; };
  job.Submit(1, PushWithRates(0.2, Version(1, 0), 1));
  job.Run();
  EXPECT_EQ(rate(), 0.2);
  job.Submit(0, PushWithRates(0.1, Version(1, 0), 1));
  job.Run();
  job.Submit(1, PushWithRates(0.3, Version(1, 0), 1));
  job.Run();
  EXPECT_EQ(rate(), 0.1);
  const std::string other = Encode(OptimizerBody{.name = "adam"});
  for (const int rank : {0, 1}) job.Control(rank, Kind::kSetOptimizer, other, Version(2, 0));
  job.Submit(1, PushWithRates(0.4, Version(2, 0), 1));
  job.Run();
  EXPECT_EQ(rate(), 0.4) << "rank 0 has sent none for this optimizer";
  job.Submit(0, PushWithRates(0.5, Version(2, 0), 1));
  job.Submit(1, PushWithRates(0.6, Version(2, 0), 1));
  job.Run();
  EXPECT_EQ(rate(), 0.5);
  job.Leave(0);
  job.Run();
  job.Submit(1, PushWithRates(0.7, Version(2, 0), 1));
  job.Run();
  EXPECT_EQ(rate(), 0.7) << "rank 0 has left";
}

TEST(ServerMachine, AsyncRatesOfAnotherOptimizerDoNotCount) {
  SmallJob job(2, 1, {}, {}, "dist_async");
  for (const int rank : {0, 1}) job.Init(rank, 0, {0});
  job.Control(1, Kind::kSetOptimizer, Encode(OptimizerBody{.name = "sgd"}), Version(1, 0));
  job.Submit(1, PushWithRates(0.2, Version(1, 0), 1));
  job.Control(1, Kind::kSetOptimizer, Encode(OptimizerBody{.name = "adam"}), Version(2, 0));
  job.Run();
  job.Push(0, 0, {1});  // has set none
  job.Run();
  EXPECT_EQ(job.parts().At(SmallJob::IdOf(0)).by.version, Version(2, 0));
  EXPECT_FALSE(job.parts().At(SmallJob::IdOf(0)).by.rates);
}

// Published scripts set the optimizer from every worker, or from rank 0 alone.
TEST(ServerMachine, AsyncWorkersThatHaveSetNoOptimizerGoByTheOthers) {
  SmallJob job(2, 1, {}, {}, "dist_async");
  for (const std::uint32_t part : {0u, 1u}) {
    for (const int rank : {0, 1}) job.Init(rank, part, {5});
  }
  job.Control(0, Kind::kSetOptimizer, Encode(OptimizerBody{.name = "sgd"}), Version(1, 0));
  job.Run();
  const auto by = [&](std::uint32_t part) { return job.parts().At(SmallJob::IdOf(part)).by; };
  job.Push(1, 0, {10});
  const auto pull = job.Pull(1, 0);
  job.Run();
  EXPECT_EQ(job.ValueOf(pull), Values({15})) << "a gradient, not a value";
  EXPECT_EQ(by(0).version, Version(1, 0));
  EXPECT_FALSE(by(0).rates) << "nobody has sent any";
  job.Submit(0, PushWithRates(0.1, Version(1, 0), 1));
  job.Push(1, 0, {1});
  job.Run();
  ASSERT_TRUE(by(0).rates);
  EXPECT_EQ(by(0).rates->learning_rate, 0.1);
  job.Push(0, 1, {7});  // before rank 0's own SetOptimizer
  job.Run();
  EXPECT_EQ(by(1).version, 0u);
}

TEST(ServerMachine, RoundsGoOnWithTheOptimizerOfARankThatHasLeft) {
  SmallJob job(2);
  for (const int rank : {0, 1}) job.Init(rank, 0, {0});
  job.Control(0, Kind::kSetOptimizer, Encode(OptimizerBody{.name = "sgd"}), Version(1, 0));
  job.Run();
  job.Submit(0, PushWithRates(0.1, Version(1, 0), 1));
  job.Push(1, 0, {1});
  job.Run();
  job.Leave(0);
  job.Push(1, 0, {1});
  job.Run();
  const UpdateBy& by = job.parts().At(SmallJob::IdOf(0)).by;
  EXPECT_EQ(job.parts().At(SmallJob::IdOf(0)).updates, 2);
  EXPECT_EQ(by.version, Version(1, 0));
  ASSERT_TRUE(by.rates);
  EXPECT_EQ(by.rates->learning_rate, 0.1);
}

TEST(ServerMachine, AFailedRoundTellsOfTheOptimizerOfARankThatHasLeft) {
  SmallJob job(2);
  for (const int rank : {0, 1}) job.Init(rank, 0, {0});
  job.Control(0, Kind::kSetOptimizer, Encode(OptimizerBody{.name = "sgd"}), Version(1, 0));
  job.Run();
  job.Submit(0, {.kind = Kind::kPush,
                 .part = SmallJob::IdOf(0),
                 .flags = kFlagFailed,
                 .version = Version(1, 0),
                 .meta = Encode(ErrorBody{.message = "nan"})});
  job.Push(1, 0, {1});
  job.Run();
  job.Leave(0);
  job.Push(1, 0, {1});
  job.Run();
  EXPECT_EQ(job.parts().At(SmallJob::IdOf(0)).updates, 1);
  EXPECT_EQ(job.parts().At(SmallJob::IdOf(0)).by.version, Version(1, 0));
}

// As one that has come, and failed.
TEST(ServerMachine, APushThatDoesNotComeTellsOfTheOptimizerOfARankThatHasLeft) {
  SmallJob job(2);
  for (const int rank : {0, 1}) job.Init(rank, 0, {0});
  for (int i = 0; i < 2; ++i) job.Push(0, 0, {1});
  job.Control(0, Kind::kSetOptimizer, Encode(OptimizerBody{.name = "sgd"}), Version(1, 0));
  job.Run();
  job.Submit(0, {.kind = Kind::kPush,
                 .part = SmallJob::IdOf(0),
                 .version = Version(1, 0),
                 .payload = PayloadOf({1}),
                 .deadline = job.now + seconds(1),
                 .one_of_several = true});
  job.Advance(seconds(2));
  job.Leave(0);
  job.Run();
  for (int i = 0; i < 4; ++i) {
    job.Push(1, 0, {1});
    job.Run();
  }
  EXPECT_EQ(job.parts().At(SmallJob::IdOf(0)).updates, 3) << "the third round failed";
  EXPECT_EQ(job.parts().At(SmallJob::IdOf(0)).by.version, Version(1, 0));
}

TEST(ServerMachine, ALeaveThatNamesWhatCannotBeMissingIsRefused) {
  for (const std::string type : {"dist_sync", "dist_async"}) {
    SmallJob job(2, 1, {}, {}, type);
    for (const int rank : {0, 1}) job.Init(rank, 0, {0});
    job.Run();
    const auto refused = [&](std::uint64_t sequence, std::string meta) {
      job.Do(ServerNodeOf(0), [&](Outputs& out) {
        job.server().OnMessage(job.now, WorkerNodeOf(1),
                               {.kind = Kind::kLeave,
                                .rank = 1,
                                .incarnation = SmallJob::IncarnationOf(1),
                                .part = ControlPart(0),
                                .sequence = sequence,
                                .meta = std::move(meta)},
                               out);
      });
      ASSERT_EQ(job.queue.size(), 1u);
      EXPECT_EQ(job.queue.front().message.kind, Kind::kError) << sequence;
      job.queue.clear();
    };
    const auto body = [](const PartId& part, std::uint64_t version) {
      return Encode(LeaveBody{.missing = {{part, version}}});
    };
    refused(1, "noise");
    refused(2, body(ControlPart(0), 0));
    refused(3, body({.store = 7, .part = 0, .key = 7}, 0));
    refused(4, body(SmallJob::IdOf(0), Version(1, 0)));
    if (type == "dist_async") refused(5, body(SmallJob::IdOf(0), 0));
    EXPECT_EQ(job.server().DescribeState(job.now).find("has left"), std::string::npos) << type;
  }
}

// Whoever names pushes to what is not there, or without end, takes no memory for it.
TEST(ServerMachine, PushesThatDoNotComeAreOfPartsThatAreThereAndNotWithoutEnd) {
  SmallJob job(2);
  for (const int rank : {0, 1}) job.Init(rank, 0, {0});
  job.Run();
  std::uint64_t sequence = 1;
  const auto leave = [&](const LeaveBody& body) {
    job.Do(ServerNodeOf(0), [&](Outputs& out) {
      job.server().OnMessage(job.now, WorkerNodeOf(1),
                             {.kind = Kind::kLeave,
                              .rank = 1,
                              .incarnation = SmallJob::IncarnationOf(1),
                              .part = ControlPart(0),
                              .sequence = sequence++,
                              .meta = Encode(body)},
                             out);
    });
    EXPECT_EQ(job.queue.size(), 1u);
    ErrorBody error;
    if (job.queue.front().message.kind == Kind::kError) {
      EXPECT_TRUE(Decode(job.queue.front().message.meta, &error));
    }
    job.queue.clear();
    return error.message;
  };
  EXPECT_THAT(leave({.more = true, .missing = {{SmallJob::IdOf(1), 0}}}), HasSubstr("part 1"));
  LeaveBody many{.more = true, .missing = {}};
  many.missing.assign(32768, {SmallJob::IdOf(0), 0});
  for (std::uint64_t named = 0; named < kMissingPushesMax; named += many.missing.size()) {
    EXPECT_EQ(leave(many), "") << named;
  }
  EXPECT_THAT(leave({.more = true, .missing = {{SmallJob::IdOf(0), 0}}}),
              HasSubstr("1048577 pushes as missing: expected at most 1048576"));
}

// Warnings.

TEST(ServerMachine, APushThatWaitsForItsOptimizerBehindALateOneIsNamed) {
  SmallJob job(1);
  job.Init(0, 0, {0});
  job.Run();
  job.Push(0, 0, {1});
  job.Submit(0, PushWithRates(0.1, Version(1, 0), 1));
  ASSERT_EQ(job.queue.size(), 2u);
  std::swap(job.queue[0], job.queue[1]);
  job.Run();
  job.Advance(seconds(16));
  EXPECT_THAT(job.log, Contains(HasSubstr("waits for optimizer 1.0")));
}

TEST(ServerMachine, AStallIsToldInFewWordsWhateverFailed) {
  SmallJob job(2);
  for (const int rank : {0, 1}) job.Init(rank, 0, {0});
  job.Run();
  job.parts().fail_update[SmallJob::IdOf(0)] = std::string(2 << 20, 'x');
  for (const int rank : {0, 1}) job.Push(rank, 0, {1});
  job.Push(0, 0, {1});
  job.Run();
  job.Advance(seconds(16));
  const std::string stall = job.server().State().stall;
  EXPECT_THAT(stall, HasSubstr("its update failed: xxx"));
  EXPECT_LT(stall.size(), 5000u);
}

TEST(ServerMachine, AStallIsLoggedWithKeyRoundAndRanks) {
  SmallJob job(3);
  for (int rank = 0; rank < 3; ++rank) job.Init(rank, 0, {0});
  job.Run();
  for (int rank = 0; rank < 3; ++rank) job.Push(rank, 0, {0});
  job.Push(0, 0, {1});
  job.Push(2, 0, {1});
  job.Run();
  job.Advance(seconds(16));
  ASSERT_THAT(
      job.log,
      Contains(AllOf(HasSubstr("key 'a'"), HasSubstr("round 2"), HasSubstr("arrived: workers 0, 2"),
                     HasSubstr("missing: workers 1 (host:801, last request 16.0"))));
  EXPECT_THAT(job.server().DescribeState(job.now), HasSubstr("round 2"));
  job.Push(1, 0, {1});
  job.Run();
  job.log.clear();
  for (int i = 0; i < 5; ++i) job.Advance(seconds(10));
  EXPECT_TRUE(job.log.empty()) << "nothing waits";
}

// A worker asks why something waits, which says nothing of when it has pushed.
TEST(ServerMachine, AQuestionIsNoRequest) {
  SmallJob job(1);
  job.Init(0, 0, {0});
  job.Run();
  job.now += std::chrono::seconds(5);
  job.queue.push_back({WorkerNodeOf(0),
                       ServerNodeOf(0),
                       {.kind = Kind::kStatus,
                        .rank = 0,
                        .incarnation = SmallJob::IncarnationOf(0),
                        .part = SmallJob::IdOf(0)}});
  job.Run();
  EXPECT_THAT(job.server().DescribeState(job.now), HasSubstr("last request 5.0 s ago"));
}

// Where more workers share a machine than it has CPUs, one of them is the last for some rounds now
// and then.
TEST(ServerMachine, ARankThatIsLateForAMomentIsNotNamed) {
  SmallJob job(4);
  for (int rank = 0; rank < 4; ++rank) job.Init(rank, 0, {0});
  job.Run();
  constexpr int kRounds = 300, kTurns = 15;  // 0.1 s each: one rank's turn is 1.5 s
  for (int round = 0; round < kRounds; ++round) {
    const int last = round / kTurns % 4;
    const Time begin = job.now;
    for (int i = 1; i <= 4; ++i) {
      job.now = begin + (i == 4 ? milliseconds(100) : milliseconds(40));
      job.PushPull((last + i) % 4, 0, {1});
      job.Run();
    }
  }
  EXPECT_TRUE(job.log.empty()) << job.log[0];
}

TEST(ServerMachine, ASlowRankIsNamedAndNobodyInABalancedRun) {
  for (const bool slow : {false, true}) {
    std::mt19937 random(3);
    SmallJob job(4);
    for (int rank = 0; rank < 4; ++rank) job.Init(rank, 0, {0});
    job.Run();
    for (int round = 0; round < 40; ++round) {
      // Everybody's step takes 100 to 150 ms, rank 2's 400.
      std::vector<std::pair<milliseconds, int>> arrivals;
      for (int rank = 0; rank < 4; ++rank) {
        const milliseconds step(100 + static_cast<int>(random() % 50));
        arrivals.emplace_back(slow && rank == 2 ? milliseconds(400) : step, rank);
      }
      std::sort(arrivals.begin(), arrivals.end());
      const Time begin = job.now;
      for (const auto& [step, rank] : arrivals) {
        job.now = begin + step;
        job.PushPull(rank, 0, {1});
        job.Run();
      }
    }
    if (slow) {
      ASSERT_EQ(job.log.size(), 1u);
      EXPECT_THAT(job.log[0], AllOf(HasSubstr("worker 2"), HasSubstr("slow")));
    } else {
      EXPECT_TRUE(job.log.empty());
    }
  }
}

TEST(ServerMachine, ALostWorkerIsReportedUnlessItHasLeft) {
  SmallJob job(2);
  job.Leave(0);
  job.Run();
  job.to_scheduler.clear();
  for (const int rank : {0, 1}) {
    job.Do(ServerNodeOf(0), [&](Outputs& out) {
      job.server().OnLost(job.now, WorkerNodeOf(rank), "host:80", "connection reset", out);
    });
  }
  ASSERT_EQ(job.to_scheduler.size(), 1u);
  FailureBody failure;
  ASSERT_TRUE(Decode(job.to_scheduler[0].message.meta, &failure));
  EXPECT_EQ(failure.node, WorkerNodeOf(1));
}

// Part 0 of an array on server 0, part 1 on server 1.
class WholeArrays : public testing::Test {
 protected:
  static constexpr std::uint64_t kVersion = std::uint64_t{1} << 32;

  WholeArrays() {
    for (const std::int32_t server : {0, 1}) {
      job.parts(server).whole = [server](const PartId&) {
        return WholeArray{.parts_here = 1, .others = {1 - server}};
      };
      for (const std::int32_t rank : {0, 1}) {
        job.Submit(rank, {.kind = Kind::kSetOptimizer,
                          .server = server,
                          .part = ControlPart(0),
                          .version = kVersion,
                          .meta = Encode(OptimizerBody{.name = "sum"})});
        Request init{.kind = Kind::kInit,
                     .server = server,
                     .part = PartOf(server),
                     .flags = rank == 0 ? std::uint8_t{0} : kFlagNoValue,
                     .meta = Encode(InitBody{{.key = std::string("a"),
                                              .shape = {2},
                                              .dtype = DType::kInt64,
                                              .num_parts = 2,
                                              .begin = server,
                                              .end = server + 1}})};
        if (rank == 0) init.payload = PayloadOf({0});
        job.Submit(rank, std::move(init));
      }
    }
    job.Run();
  }
  static PartId PartOf(std::int32_t server) {
    return SmallJob::IdOf(static_cast<std::uint32_t>(server));
  }
  void Link() {
    for (const std::int32_t server : {0, 1}) {
      job.Do(ServerNodeOf(server),
             [&](Outputs& out) { job.server(server).OnLinked(1 - server, out); });
    }
    job.Run();
  }
  std::uint64_t Push(std::int32_t rank, std::int32_t server, std::vector<std::int64_t> values) {
    return job.Submit(rank, {.kind = Kind::kPush,
                             .server = server,
                             .part = PartOf(server),
                             .version = kVersion,
                             .payload = PayloadOf(std::move(values))});
  }
  std::uint64_t Pull(std::int32_t rank, std::int32_t server) {
    return job.Submit(rank, {.kind = Kind::kPull, .server = server, .part = PartOf(server)});
  }
  void PushAll() {
    for (const std::int32_t server : {0, 1}) {
      for (const std::int32_t rank : {0, 1}) Push(rank, server, {1 + server});
    }
  }

  SmallJob job{2, 2};
};

TEST_F(WholeArrays, AreUpdatedOnceAllServersHaveTheirSums) {
  Link();
  for (const std::int32_t rank : {0, 1}) Push(rank, 0, {1});
  const auto pull = Pull(0, 0);
  job.Run();
  EXPECT_FALSE(job.Answered(pull));
  EXPECT_THAT(job.server(0).DescribeState(job.now), HasSubstr("it needs sums of server 1"));
  for (const std::int32_t rank : {0, 1}) Push(rank, 1, {2});
  job.Run();
  // Sums 2 and 4: 6 in the first pass, (2 ^ 6) + (4 ^ 6) in the second.
  EXPECT_EQ(job.ValueOf(pull), Values({2 + 6}));
  EXPECT_EQ(job.parts(1).At(PartOf(1)).value, Values({4 + 6}));
}

// What is saved is of one step, and what is loaded frees no state that an update works with.
TEST_F(WholeArrays, StatesAreLeftAloneBetweenThePasses) {
  PushAll();  // the update has begun, and the other server cannot be told yet
  const auto pull = Pull(0, 0);
  std::vector<std::uint64_t> requests;
  for (const Kind kind : {Kind::kSaveStates, Kind::kLoadStates}) {
    requests.push_back(job.Control(kind == Kind::kSaveStates ? 0 : 1, kind, ""));
  }
  job.Run();
  EXPECT_THAT(job.control().calls, Not(Contains("states")));
  for (const std::uint64_t request : requests) EXPECT_FALSE(job.Answered(request));
  Link();
  EXPECT_EQ(job.ValueOf(pull), Values({2 + 6}));
  EXPECT_EQ(std::ranges::count(job.control().calls, "states"), 2);
  for (const std::uint64_t request : requests) EXPECT_EQ(job.ErrorOf(request), "");
}

// They may be of no one step, and a reset would forget those that are loaded.
TEST(ServerMachine, StatesOfAnUpdateThatHasFailedAreNeitherSavedNorLoaded) {
  SmallJob job(2);
  for (int rank = 0; rank < 2; ++rank) job.Init(rank, 0, {0});
  job.Run();
  // The update under way fails while the states wait for its end.
  job.control().deferred = true;
  job.parts().defer = [](const PartId&) { return true; };
  const auto early = job.Control(0, Kind::kSaveStates, "");
  for (int rank = 0; rank < 2; ++rank) job.Push(rank, 0, {1});
  job.Run();
  EXPECT_EQ(std::ranges::count(job.control().calls, "states"), 1);
  job.Do(ServerNodeOf(0), [&](Outputs& out) {
    job.parts().EndUpdate(SmallJob::IdOf(0));
    job.server().OnUpdated(job.now, SmallJob::IdOf(0),
                           std::make_exception_ptr(InvalidState("out of luck")), out);
    job.server().OnControlDone(job.now, job.control().last,
                               {.error = nullptr, .meta = "half a step"}, out);
  });
  job.Run();
  EXPECT_THAT(job.ErrorOf(early), HasSubstr("an update of key 'a' failed"));
  job.control().deferred = false;
  const auto load = job.Control(1, Kind::kLoadStates, "");
  const auto save = job.Control(0, Kind::kSaveStates, "");
  job.Run();
  for (const auto request : {load, save}) {
    EXPECT_THROW(std::rethrow_exception(job.ExceptionOf(request)), OpError);
    EXPECT_THAT(job.ErrorOf(request), HasSubstr("out of luck"));
  }
  EXPECT_EQ(std::ranges::count(job.control().calls, "states"), 2) << "none that is loaded";
  // Who has removed the key has no part in it, and a reset cures it.
  job.Submit(1, {.kind = Kind::kRemove, .part = SmallJob::IdOf(0)});
  const auto without = job.Control(1, Kind::kSaveStates, "");
  job.Run();
  EXPECT_EQ(job.ErrorOf(without), "");
  job.Submit(0, {.kind = Kind::kReset, .part = SmallJob::IdOf(0), .payload = PayloadOf({0})});
  const auto cured = job.Control(0, Kind::kLoadStates, "");
  job.Run();
  EXPECT_EQ(job.ErrorOf(cured), "");
}

TEST_F(WholeArrays, WaitForTheLinkBetweenTheirServers) {
  PushAll();
  const auto pull = Pull(0, 0);
  job.Run();
  EXPECT_FALSE(job.Answered(pull));
  Link();
  EXPECT_EQ(job.ValueOf(pull), Values({2 + 6}));
}

TEST_F(WholeArrays, FailOnAllServersIfTheyFailOnOneUntilAReset) {
  Link();
  job.parts(1).fail_update[PartOf(1)] = "out of luck";
  PushAll();
  const std::vector<std::uint64_t> pulls = {Pull(0, 0), Pull(1, 1)};
  job.Run();
  EXPECT_THAT(job.ErrorOf(pulls[0]), HasSubstr("server 1: out of luck"));
  EXPECT_THAT(job.ErrorOf(pulls[1]), HasSubstr("out of luck"));
  for (const std::int32_t server : {0, 1}) {
    Request reset{.kind = Kind::kReset, .server = server, .part = PartOf(server)};
    reset.payload = PayloadOf({100});
    job.Submit(0, std::move(reset));
  }
  job.Run();
  PushAll();
  const auto cured = Pull(0, 0);
  job.Run();
  EXPECT_EQ(job.ValueOf(cured), Values({100 + 2 + 6}));
}

TEST_F(WholeArrays, FailIfTheRoundOfOnePartFails) {
  Link();
  Push(0, 0, {1});
  Push(1, 0, {1});
  Push(0, 1, {1, 2, 3});  // does not fit
  Push(1, 1, {2});
  const auto pull = Pull(0, 0);
  job.Run();
  EXPECT_THAT(job.ErrorOf(pull), AllOf(HasSubstr("server 1"), HasSubstr("expected 8 bytes")));
}

// Pushes of which one does not fit fail their round on all servers, and no other.
TEST_F(WholeArrays, AFailedInputOfOnePartLeavesNoTrace) {
  Link();
  for (const std::int32_t server : {0, 1}) {
    for (const std::int32_t rank : {0, 1}) Push(rank, server, {1 + server});
  }
  job.Run();
  for (const std::int32_t bad : {1, 0}) {
    for (const std::int32_t rank : {0, 1}) Push(rank, 1 - bad, {1});
    job.Run();
    Push(0, bad, {1, 2, 3});
    Push(1, bad, {1});
    const std::vector<std::uint64_t> failed = {Pull(0, 0), Pull(1, 1)};
    job.Run();
    for (const std::uint64_t pull : failed) {
      EXPECT_THAT(job.ErrorOf(pull), HasSubstr("the push of worker 0"));
    }
    for (const std::int32_t server : {0, 1}) {
      EXPECT_EQ(job.parts(server).At(PartOf(server)).updates, 1);
    }
  }
  PushAll();
  const std::vector<std::uint64_t> pulls = {Pull(0, 0), Pull(0, 1)};
  job.Run();
  EXPECT_EQ(job.ValueOf(pulls[0]), Values({2 * (2 + 6)}));
  EXPECT_EQ(job.ValueOf(pulls[1]), Values({2 * (4 + 6)}));
}

// A pass changes the states of its parts: none begins while a round may still fail elsewhere.
TEST_F(WholeArrays, NoPassBeginsBeforeAllServersHaveTheirSums) {
  Link();
  bool has_begun = false;
  job.parts(0).defer_pass = [&](const PartId&) {
    has_begun = true;
    return false;
  };
  for (const std::int32_t rank : {0, 1}) Push(rank, 0, {1});
  job.Run();
  EXPECT_FALSE(has_begun);
  for (const std::int32_t rank : {0, 1}) Push(rank, 1, {2});
  job.Run();
  EXPECT_TRUE(has_begun);
}

TEST_F(WholeArrays, SumsOfAServerThatHasNoPartsAreRefused) {
  Link();
  job.parts(0).whole = [](const PartId&) { return WholeArray{.parts_here = 1, .others = {}}; };
  const auto send = [&](std::uint64_t round) {
    Message sums{.kind = Kind::kBlockSums, .rank = 1, .incarnation = 1001, .part = PartOf(0)};
    sums.sequence = round;
    sums.version = 1;
    sums.payload = PayloadOf({1000});
    job.Deliver({ServerNodeOf(1), ServerNodeOf(0), sums});
  };
  send(1);  // before it is known who has parts
  for (int round = 1; round <= 2; ++round) {
    for (const std::int32_t rank : {0, 1}) Push(rank, 0, {1});
    const auto pull = Pull(0, 0);
    job.Run();
    EXPECT_EQ(job.ValueOf(pull), Values({2 * round}));
    send(2);
  }
  EXPECT_THAT(job.log, Contains(HasSubstr("of which it has no parts")));
}

// One part fails by the push of a rank that does not know the optimizer yet, the other does not.
TEST_F(WholeArrays, FailTogetherWhateverThePushKnewThatFailed) {
  Link();
  for (const std::int32_t server : {0, 1}) {
    Request push{.kind = Kind::kPush, .server = server, .part = PartOf(server)};
    push.payload = server == 1 ? PayloadOf({1, 2, 3}) : PayloadOf({1});  // does not fit
    job.Submit(0, std::move(push));
    Push(1, server, {2});
  }
  const auto pull = Pull(0, 0);
  job.Run();
  EXPECT_THAT(job.ErrorOf(pull), AllOf(HasSubstr("server 1"), HasSubstr("expected 8 bytes")));
}

// Rounds that fail wait for nobody: one server may be any number of them ahead.
TEST_F(WholeArrays, EndWhereOneServerIsManyFailedRoundsAhead) {
  Link();
  constexpr int kRounds = 40;
  const auto push_to = [&](std::int32_t server) {
    for (int round = 0; round < kRounds; ++round) {
      for (const std::int32_t rank : {0, 1}) Push(rank, server, {1, 2, 3});  // does not fit
    }
    for (const std::int32_t rank : {0, 1}) Push(rank, server, {1 + server});
    job.Run();
  };
  push_to(1);
  push_to(0);
  const std::vector<std::uint64_t> pulls = {Pull(0, 0), Pull(1, 1)};
  job.Run();
  EXPECT_EQ(job.ValueOf(pulls[0]), Values({2 + 6}));
  EXPECT_EQ(job.ValueOf(pulls[1]), Values({4 + 6}));
}

// What a worker says of a part may be wrong. That is the error of the update, and no others'.
TEST_F(WholeArrays, ThatAreCutOtherwiseThanAPartSaysFailTheirUpdate) {
  Link();
  bool is_asked = false;
  job.parts(0).whole = [&](const PartId&) -> std::optional<WholeArray> {
    if (std::exchange(is_asked, true)) throw InvalidArgument("part 0 of an array of 0 parts");
    return WholeArray{.parts_here = 1, .others = {1}};
  };
  for (const std::int32_t rank : {0, 1}) Push(rank, 0, {1});
  const auto pull = Pull(0, 0);
  job.Run();
  EXPECT_THAT(job.ErrorOf(pull), HasSubstr("part 0 of an array of 0 parts"));
}

TEST_F(WholeArrays, APartThatIsElsewhereFailsThoseThatAreThere) {
  Link();
  const PartId stray = SmallJob::IdOf(2);
  for (const std::int32_t rank : {0, 1}) {
    Request init{.kind = Kind::kInit,
                 .part = stray,
                 .flags = rank == 0 ? std::uint8_t{0} : kFlagNoValue,
                 .meta = Encode(InitBody{{.key = std::string("a"),
                                          .shape = {2},
                                          .dtype = DType::kInt64,
                                          .num_parts = 2,
                                          .begin = 0,
                                          .end = 1}})};
    if (rank == 0) init.payload = PayloadOf({0});
    job.Submit(rank, std::move(init));
  }
  job.Run();
  int asked = 0;  // once whether it is updated whole, and then where its parts are
  job.parts(0).whole = [&](const PartId& id) -> std::optional<WholeArray> {
    if (id == stray && asked++ % 2 == 1) throw InvalidArgument("part 2 of an array of 2 parts");
    return WholeArray{.parts_here = 2, .others = {1}};
  };
  for (const std::int32_t rank : {0, 1}) {
    job.Submit(
        rank, {.kind = Kind::kPush, .part = stray, .version = kVersion, .payload = PayloadOf({1})});
  }
  job.Run();
  PushAll();
  const std::vector<std::uint64_t> pulls = {Pull(0, 0), Pull(0, 1)};
  job.Run();
  for (const std::uint64_t pull : pulls) {
    EXPECT_THAT(job.ErrorOf(pull), HasSubstr("part 2 of an array of 2 parts"));
  }
}

TEST_F(WholeArrays, SumsOfAnEarlierProcessOfAServerChangeNothing) {
  Link();
  for (const std::int32_t rank : {0, 1}) Push(rank, 0, {1});
  const auto pull = Pull(0, 0);
  job.Run();
  Message stale{.kind = Kind::kBlockSums, .rank = 1, .incarnation = 5, .part = PartOf(0)};
  stale.sequence = 1;
  stale.payload = PayloadOf({1000});
  job.Deliver({ServerNodeOf(1), ServerNodeOf(0), stale});
  job.Run();
  for (const std::int32_t rank : {0, 1}) Push(rank, 1, {2});
  job.Run();
  EXPECT_EQ(job.ValueOf(pull), Values({2 + 6}));
}

}  // namespace
}  // namespace heddle::kvstore::dist
