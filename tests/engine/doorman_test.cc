#include "engine/doorman.h"

#include <atomic>
#include <functional>
#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tests/engine/support.h"

namespace heddle::engine_test {
namespace {

using engine::Doorman;

void WaitUntil(const std::function<bool()>& reached) {
  while (!reached()) std::this_thread::yield();
}

// Plain data: a run comes after what its waker did, and after the run before it.
TEST(DoormanTest, RunsOnceForEachWake) {
  const int count = Scaled(300);
  std::vector<int> given(static_cast<std::size_t>(count), 0), taken;
  {
    Doorman doorman([&] {
      taken.push_back(given[taken.size()]);
      return false;
    });
    for (int i = 0; i < count; ++i) {
      given[static_cast<std::size_t>(i)] = i + 1;
      WaitUntil([&] { return doorman.Wake(); });
    }
  }
  EXPECT_EQ(taken, given);
}

TEST(DoormanTest, RunsAgainWhileItIsToldTo) {
  std::atomic<int> runs = 0;
  {
    Doorman doorman([&] { return ++runs % 5 != 0; });
    ASSERT_TRUE(doorman.Wake());
    WaitUntil([&] { return doorman.Wake(); });
  }
  EXPECT_EQ(runs, 10);
}

TEST(DoormanTest, IsNotWokenWhileAtWork) {
  std::latch started(1), released(1);
  Doorman doorman([&] {
    started.count_down();
    released.wait();
    return false;
  });
  ASSERT_TRUE(doorman.Wake());
  EXPECT_FALSE(doorman.Wake());
  started.wait();
  EXPECT_FALSE(doorman.Wake());
  released.count_down();
}

// Several threads ask at once; each that was told yes counts on a run of its own.
TEST(DoormanTest, EveryWakeThatSucceedsIsFollowedByARun) {
  std::atomic<int> wakes = 0, runs = 0;
  {
    Doorman doorman([&] {
      ++runs;
      return false;
    });
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        for (int k = 0; k < Scaled(1000); ++k) {
          if (doorman.Wake()) ++wakes;
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
TEST(DoormanTest, EveryWakeIsFollowedByARunAlsoWhileOneIsAboutToLeave) {
  std::atomic<int> wakes = 0;
  int runs = 0, owed = 0;
  {
    std::atomic<Doorman*> self = nullptr;
    Doorman doorman([&] {
      Doorman& own = *self.load();
      ++runs;
      for (int k = runs % 5; k > 0; --k) {
        own.AboutToLeave();
        if (k % 2 == 0) std::this_thread::yield();
        if (own.Stay()) ++owed;
      }
      if (runs % 3 != 0) own.AboutToLeave();
      if (runs % 7 == 0) std::this_thread::yield();
      return false;
    });
    self = &doorman;
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        for (int k = 0; k < Scaled(1000); ++k) {
          if (doorman.Wake()) ++wakes;
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

TEST(DoormanTest, IsWokenWhileARunIsAboutToLeave) {
  std::atomic<Doorman*> self = nullptr;
  std::atomic<int> step = 0, runs = 0;
  const auto await = [&](int value) { WaitUntil([&, value] { return step == value; }); };
  Doorman doorman([&] {
    Doorman& own = *self.load();
    if (++runs == 2) return false;
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
    return false;
  });
  self = &doorman;
  ASSERT_TRUE(doorman.Wake());
  await(1);
  EXPECT_FALSE(doorman.Wake());
  EXPECT_FALSE(doorman.IsComing());
  step = 2;
  await(3);
  EXPECT_FALSE(doorman.IsComing());
  EXPECT_TRUE(doorman.Wake());
  EXPECT_TRUE(doorman.IsComing());
  EXPECT_FALSE(doorman.Wake());
  step = 4;
  await(5);
  EXPECT_FALSE(doorman.Wake());
  EXPECT_FALSE(doorman.IsComing());
  step = 6;
  await(7);
  EXPECT_TRUE(doorman.Wake());
  EXPECT_TRUE(doorman.IsComing());
  step = 8;
  WaitUntil([&] { return runs == 2; });
  EXPECT_FALSE(doorman.IsComing());
}

// As an engine does: it goes when the run has begun to end, its waker perhaps not yet back.
TEST(DoormanTest, MayGoBeforeItsWakerIsBack) {
  for (int i = 0; i < Scaled(100); ++i) {
    std::atomic<int> runs = 0;
    auto doorman = std::make_unique<Doorman>([&] {
      ++runs;
      return false;
    });
    std::thread waker([woken = doorman.get()] { EXPECT_TRUE(woken->Wake()); });
    WaitUntil([&] { return runs == 1; });
    doorman.reset();
    waker.join();
  }
}

TEST(DoormanTest, MayGoUnasked) {
  for (int i = 0; i < Scaled(100); ++i) {
    Doorman doorman([] { return false; });
  }
}

}  // namespace
}  // namespace heddle::engine_test
