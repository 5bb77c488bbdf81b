#include "engine/doorman.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/unique_fd.h"
#include "engine/worker_host.h"
#include "tests/engine/support.h"
#include "tests/sanitized.h"

namespace heddle::engine_test {
namespace {

using engine::Doorman;
using std::chrono::microseconds;

constexpr microseconds kAtOnce{0};

// Of the n-th call to wake a doorman: at once, or a little later.
microseconds DelayOf(int n) { return n % 3 * microseconds(20); }

// With the timer that it sleeps by, and as in a process that can have none.
class DoormanTest : public testing::TestWithParam<bool> {
 protected:
  static UniqueFd Timer() { return GetParam() ? Doorman::NewTimer() : UniqueFd(); }
};
INSTANTIATE_TEST_SUITE_P(All, DoormanTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "Timer" : "NoTimer"; });

void WaitUntil(const std::function<bool()>& reached) {
  while (!reached()) std::this_thread::yield();
}

// Plain data: a run comes after what its waker did, and after the run before it.
TEST_P(DoormanTest, RunsOnceForEachWake) {
  const int count = Scaled(300);
  std::vector<int> given(static_cast<std::size_t>(count), 0), taken;
  {
    Doorman doorman([&] { taken.push_back(given[taken.size()]); }, Timer());
    for (int i = 0; i < count; ++i) {
      given[static_cast<std::size_t>(i)] = i + 1;
      WaitUntil([&] { return doorman.Wake(DelayOf(i)); });
    }
  }
  EXPECT_EQ(taken, given);
}

TEST_P(DoormanTest, IsNotWokenWhileAtWork) {
  std::latch started(1), released(1);
  Doorman doorman(
      [&] {
        started.count_down();
        released.wait();
      },
      Timer());
  ASSERT_TRUE(doorman.Wake(kAtOnce));
  EXPECT_FALSE(doorman.Wake(kAtOnce));
  started.wait();
  EXPECT_FALSE(doorman.Wake(kAtOnce));
  released.count_down();
}

// Who has asked for nothing may still look.
TEST_P(DoormanTest, AfterItsEndItIsNotComing) {
  std::atomic<int> runs = 0;
  Doorman doorman([&] { ++runs; }, Timer());
  ASSERT_TRUE(doorman.Wake(kAtOnce));
  doorman.End();
  EXPECT_EQ(runs, 1);
  EXPECT_FALSE(doorman.IsComing());
  EXPECT_FALSE(doorman.Wake(kAtOnce));
  doorman.End();
}

// Several threads ask at once; each that was told yes counts on a run of its own.
TEST_P(DoormanTest, EveryWakeThatSucceedsIsFollowedByARun) {
  std::atomic<int> wakes = 0, runs = 0;
  {
    Doorman doorman([&] { ++runs; }, Timer());
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        for (int k = 0; k < Scaled(1000); ++k) {
          if (doorman.Wake(DelayOf(k))) ++wakes;
          if (k % 7 == 0) std::this_thread::yield();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_EQ(runs, wakes);
  EXPECT_GT(runs, 0);
}

// A run says that it is about to leave, stays or not; whoever wakes it in between is owed a run.
TEST_P(DoormanTest, EveryWakeIsFollowedByARunAlsoWhileOneIsAboutToLeave) {
  std::atomic<int> wakes = 0;
  int runs = 0, owed = 0;
  {
    std::atomic<Doorman*> self = nullptr;
    Doorman doorman(
        [&] {
          Doorman& own = *self.load();
          ++runs;
          for (int k = runs % 5; k > 0; --k) {
            own.AboutToLeave();
            if (k % 2 == 0) std::this_thread::yield();
            if (own.Stay()) ++owed;
          }
          if (runs % 3 != 0) own.AboutToLeave();
          if (runs % 7 == 0) std::this_thread::yield();
        },
        Timer());
    self = &doorman;
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        for (int k = 0; k < Scaled(1000); ++k) {
          if (doorman.Wake(DelayOf(k))) ++wakes;
          doorman.AboutToLeave();  // not the doorman's thread: nothing happens
          EXPECT_FALSE(doorman.Stay());
          if (k % 7 == 0) std::this_thread::yield();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_EQ(runs + owed, wakes);
  EXPECT_GT(runs, 0);
}

TEST_P(DoormanTest, IsWokenWhileARunIsAboutToLeave) {
  std::atomic<Doorman*> self = nullptr;
  std::atomic<int> step = 0, runs = 0;
  const auto await = [&](int value) { WaitUntil([&, value] { return step == value; }); };
  Doorman doorman(
      [&] {
        Doorman& own = *self.load();
        if (++runs == 2) return;
        own.AboutToLeave();
        EXPECT_FALSE(own.Stay());
        step = 1;
        await(2);
        own.AboutToLeave();
        step = 3;
        await(4);
        EXPECT_TRUE(own.Stay());
        step = 5;
        await(6);
        own.AboutToLeave();
        step = 7;
        await(8);
        EXPECT_EQ(runs, 1);
      },
      Timer());
  self = &doorman;
  ASSERT_TRUE(doorman.Wake(kAtOnce));
  await(1);
  EXPECT_FALSE(doorman.Wake(kAtOnce));
  EXPECT_FALSE(doorman.IsComing());
  step = 2;
  await(3);
  EXPECT_FALSE(doorman.IsComing());
  EXPECT_TRUE(doorman.Wake(kAtOnce));
  EXPECT_TRUE(doorman.IsComing());
  EXPECT_FALSE(doorman.Wake(kAtOnce));
  step = 4;
  await(5);
  EXPECT_FALSE(doorman.Wake(kAtOnce));
  EXPECT_FALSE(doorman.IsComing());
  step = 6;
  await(7);
  EXPECT_TRUE(doorman.Wake(kAtOnce));
  EXPECT_TRUE(doorman.IsComing());
  step = 8;
  WaitUntil([&] { return runs == 2; });
  EXPECT_FALSE(doorman.IsComing());
}

// As an engine does: it goes when the run has begun to end, its waker perhaps not yet back.
TEST_P(DoormanTest, MayGoBeforeItsWakerIsBack) {
  for (int i = 0; i < Scaled(100); ++i) {
    std::atomic<int> runs = 0;
    auto doorman = std::make_unique<Doorman>([&] { ++runs; }, Timer());
    std::thread waker([woken = doorman.get()] { EXPECT_TRUE(woken->Wake(kAtOnce)); });
    WaitUntil([&] { return runs == 1; });
    doorman.reset();
    waker.join();
  }
}

TEST_P(DoormanTest, MayGoUnasked) {
  for (int i = 0; i < Scaled(100); ++i) {
    Doorman doorman([] {}, Timer());
  }
}

class WorkerHostTest : public testing::TestWithParam<WorkerHost> {};
INSTANTIATE_TEST_SUITE_P(All, WorkerHostTest,
                         testing::Values(WorkerHost::kTbb, WorkerHost::kThreads),
                         [](const auto& info) {
                           return info.param == WorkerHost::kTbb ? "tbb" : "threads";
                         });

// A thread that has pushed while another stops the engine asks this last: the host must be there.
TEST_P(WorkerHostTest, EndsAfterTheRunsThatWereAskedForAndIsNotComingThen) {
  if (GetParam() == WorkerHost::kTbb && !kTbbAllowed) GTEST_SKIP() << "no oneTBB here";
  std::atomic<int> runs = 0;
  const auto run = [&](engine::WorkerThread thread) {
    EXPECT_EQ(thread, engine::WorkerThread::kOwn);  // the first worker always
    ++runs;
    return false;
  };
  const auto host =
      GetParam() == WorkerHost::kTbb ? engine::MakeTbbHost(2, run) : engine::MakeThreadHost(2, run);
  host->RequestWorker(engine::WorkerHost::When::kSoon);
  host->End();
  EXPECT_EQ(runs, 1);
  EXPECT_FALSE(host->IsComing());
}

// A further worker is oneTBB's: its turns end, and it comes again.
TEST(TbbHost, CallsAGuestAgainAsLongAsItSaysSo) {
  if (!kTbbAllowed) GTEST_SKIP() << "no oneTBB here";
  std::atomic<int> turns = 0;
  std::latch guest_done(1);
  const auto host = engine::MakeTbbHost(2, [&](engine::WorkerThread thread) {
    if (thread == engine::WorkerThread::kOwn) {
      guest_done.wait();
      return false;
    }
    if (++turns < 3) return true;
    guest_done.count_down();
    return false;
  });
  host->RequestWorker(engine::WorkerHost::When::kNow);
  host->RequestWorker(engine::WorkerHost::When::kNow);  // the doorman is at work
  guest_done.wait();
  host->End();
  EXPECT_EQ(turns, 3);
}

}  // namespace
}  // namespace heddle::engine_test
