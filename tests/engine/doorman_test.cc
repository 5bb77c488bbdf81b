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
