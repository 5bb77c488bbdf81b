// The last request of a rank about a part: who goes on, and when the value goes.
#include <heddle/error.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "kvstore/dist/protocol/bodies.h"
#include "tests/kvstore/dist/small_job.h"

namespace heddle::kvstore::dist {
namespace {

using Values = std::vector<std::int64_t>;

std::uint64_t Remove(SmallJob& job, std::int32_t rank) {
  return job.Submit(rank, {.kind = Kind::kRemove, .part = SmallJob::IdOf(0)});
}
void InitAll(SmallJob& job, std::int32_t workers) {
  for (std::int32_t rank = 0; rank < workers; ++rank) job.Init(rank, 0, {5});
  job.Run();
}
std::vector<Key> KeysAt(SmallJob& job, std::int32_t rank) {
  const auto token = job.Control(rank, Kind::kKeys, {});
  job.Run();
  KeysBody body;
  EXPECT_TRUE(Decode(job.AnswerOf(token).meta, &body));
  return body.keys;
}

TEST(RemoveMachine, RoundsGoOnWithoutThoseThatHaveRemovedThePart) {
  SmallJob job(3);
  InitAll(job, 3);
  for (std::int32_t rank = 0; rank < 3; ++rank) job.Push(rank, 0, {1 + rank});
  const auto last = job.Pull(1, 0);
  const auto removed = Remove(job, 1);
  job.Push(0, 0, {10});
  job.Push(2, 0, {30});
  const auto later = job.Pull(0, 0);
  job.Run();
  EXPECT_EQ(job.ErrorOf(removed), "");
  EXPECT_EQ(job.ValueOf(last), (Values{6}));
  EXPECT_EQ(job.ValueOf(later), (Values{40}));
  EXPECT_TRUE(job.parts().Has(SmallJob::IdOf(0)));
  EXPECT_TRUE(KeysAt(job, 1).empty());
  EXPECT_EQ(KeysAt(job, 0), (std::vector<Key>{"a"}));
}

TEST(RemoveMachine, ARoundThatWaitsForTheRankAloneIsCompletedByItsRemoval) {
  SmallJob job(2);
  InitAll(job, 2);
  job.Push(0, 0, {7});
  const auto pulled = job.Pull(0, 0);
  job.Run();
  EXPECT_FALSE(job.Answered(pulled));
  Remove(job, 1);
  job.Run();
  EXPECT_EQ(job.ValueOf(pulled), (Values{7}));
}

// The program has forgotten the key by then; the others would wait for its pushes for ever.
TEST(RemoveMachine, ARemovalThatTimesOutBeforeItIsSentIsSentAllTheSame) {
  SmallJob job(2);
  InitAll(job, 2);
  for (int round = 0; round < 3; ++round) {  // the third waits for rank 1's first
    job.Submit(0, {.kind = Kind::kPush,
                   .part = SmallJob::IdOf(0),
                   .payload = PayloadOf({1}),
                   .deadline = job.now + std::chrono::seconds(1)});
  }
  const auto removed = job.Submit(0, {.kind = Kind::kRemove,
                                      .part = SmallJob::IdOf(0),
                                      .deadline = job.now + std::chrono::seconds(1)});
  job.Run();
  EXPECT_FALSE(job.Answered(removed));
  job.Advance(std::chrono::seconds(2));
  EXPECT_THROW(std::rethrow_exception(job.ExceptionOf(removed)), TimeoutError);
  std::vector<std::uint64_t> rounds;
  for (int round = 0; round < 4; ++round) {
    rounds.push_back(job.PushPull(1, 0, {10}));
    job.Run();
  }
  EXPECT_EQ(job.ValueOf(rounds[0]), Values({11}));
  EXPECT_EQ(job.ValueOf(rounds[1]), Values({11}));
  EXPECT_THROW(std::rethrow_exception(job.ExceptionOf(rounds[2])), OpError);  // of the third push
  EXPECT_EQ(job.ValueOf(rounds[3]), Values({10}));
  Remove(job, 1);
  job.Run();
  EXPECT_FALSE(job.parts().Has(SmallJob::IdOf(0)));
}

TEST(RemoveMachine, TheValueGoesWhenAllHaveRemovedItOrLeft) {
  for (const std::string type : {"dist_sync", "dist_async"}) {
    SmallJob job(3, 1, {}, {}, type);
    InitAll(job, 3);
    for (std::int32_t rank = 0; rank < 3; ++rank) job.Push(rank, 0, {1});
    Remove(job, 0);
    Remove(job, 2);
    job.Run();
    EXPECT_TRUE(job.parts().Has(SmallJob::IdOf(0))) << type;
    job.Leave(1);
    job.Run();
    EXPECT_FALSE(job.parts().Has(SmallJob::IdOf(0))) << type;
  }
}

TEST(RemoveMachine, AnUpdateUnderWayEndsFirst) {
  for (const std::string type : {"dist_sync", "dist_async"}) {
    SmallJob job(1, 1, {}, {}, type);
    InitAll(job, 1);
    job.parts().defer = [](const PartId&) { return true; };
    job.Push(0, 0, {3});
    const auto pulled = job.Pull(0, 0);
    const auto removed = Remove(job, 0);
    job.Run();
    EXPECT_TRUE(job.parts().Has(SmallJob::IdOf(0))) << type;
    job.parts().EndUpdate(SmallJob::IdOf(0));
    job.Do(ServerNodeOf(0),
           [&](Outputs& out) { job.server().OnUpdated(job.now, SmallJob::IdOf(0), nullptr, out); });
    job.Run();
    EXPECT_EQ(job.ValueOf(pulled), (Values{3})) << type;
    EXPECT_EQ(job.ErrorOf(removed), "") << type;
    EXPECT_FALSE(job.parts().Has(SmallJob::IdOf(0))) << type;
  }
}

TEST(RemoveMachine, WhatComesAgainOrLaterChangesNothing) {
  SmallJob job(1);
  InitAll(job, 1);
  std::vector<SmallJob::Envelope> sent;
  const auto remember = [&] { sent.insert(sent.end(), job.queue.begin(), job.queue.end()); };
  job.Push(0, 0, {3});
  remember();
  job.Run();
  const auto removed = Remove(job, 0);
  remember();
  job.Run();
  EXPECT_EQ(job.ErrorOf(removed), "");
  for (const SmallJob::Envelope& envelope : sent) job.Deliver(envelope);
  job.Run();
  EXPECT_FALSE(job.parts().Has(SmallJob::IdOf(0)));
  const auto pulled = job.Pull(0, 0);
  const auto again = job.Init(0, 0, {5});
  job.Run();
  EXPECT_NE(job.ErrorOf(pulled).find("was removed before"), std::string::npos);
  EXPECT_NE(job.ErrorOf(again).find("was removed before"), std::string::npos);
  EXPECT_FALSE(job.parts().Has(SmallJob::IdOf(0)));
}

// It is not one that waits for rank 0.
TEST(RemoveMachine, AnInitAfterTheRemovalIsRefusedThoughTheValueIsGone) {
  SmallJob job(2);
  InitAll(job, 2);
  Remove(job, 0);
  Remove(job, 1);
  job.Run();
  const auto again = job.Init(1, 0, {5});
  job.Run();
  EXPECT_NE(job.ErrorOf(again).find("was removed before"), std::string::npos) << job.ErrorOf(again);
}

TEST(RemoveMachine, TheValuesOfAStoreGoWhenAllHaveClosedIt) {
  for (const char* const type : {"dist_sync", "dist_async"}) {
    SmallJob job(3, 1, {}, {}, type);
    for (int rank = 0; rank < 3; ++rank) job.Init(rank, 0, {7});
    job.Run();
    for (int rank = 0; rank < 2; ++rank) job.Push(rank, 0, {1});
    const auto pull = job.Pull(0, 0);
    job.CloseStore(0);
    job.CloseStore(1);
    job.Run();
    EXPECT_TRUE(job.parts().Has(SmallJob::IdOf(0))) << "worker 2 still has the store";
    job.CloseStore(2);
    job.Run();
    EXPECT_FALSE(job.parts().Has(SmallJob::IdOf(0)));
    EXPECT_EQ(job.ValueOf(pull), Values({std::string_view(type) == "dist_sync" ? 2 : 1}));
  }
}

// Servers end with their job; what they have until then may be looked at.
TEST(RemoveMachine, TheValuesOfAJobThatEndsStay) {
  SmallJob job(2);
  for (int rank = 0; rank < 2; ++rank) job.Init(rank, 0, {7});
  job.Run();
  for (int rank = 0; rank < 2; ++rank) job.Leave(rank);
  job.Run();
  EXPECT_TRUE(job.parts().Has(SmallJob::IdOf(0)));
}

}  // namespace
}  // namespace heddle::kvstore::dist
