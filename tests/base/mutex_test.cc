#include "base/mutex.h"

#include <chrono>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace heddle {
namespace {

TEST(Mutex, LockExcludesOtherThreads) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 2000;
  struct {
    Mutex mutex;
    int value GUARDED_BY(mutex) = 0;
  } counter;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        MutexLock lock(counter.mutex);
        ++counter.value;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  MutexLock lock(counter.mutex);
  EXPECT_EQ(counter.value, kThreads * kRounds);
}

TEST(Mutex, TryLockFailsWhileHeldAndSucceedsAfter) {
  Mutex mutex;
  const auto try_elsewhere = [&mutex] {
    bool got = false;
    std::thread([&] {
      if (mutex.TryLock()) {
        got = true;
        mutex.Unlock();
      }
    }).join();
    return got;
  };
  {
    MutexLock lock(mutex);
    EXPECT_FALSE(try_elsewhere());
  }
  EXPECT_TRUE(try_elsewhere());
}

// Two threads take turns: each turn is a notification that must not get lost.
TEST(CondVar, NotificationsPassTurnsBetweenThreads) {
  constexpr int kTurns = 2000;
  struct {
    Mutex mutex;
    CondVar changed;
    int turn GUARDED_BY(mutex) = 0;
  } game;
  const auto play = [&game](int remainder) {
    for (int turn = remainder; turn < kTurns; turn += 2) {
      MutexLock lock(game.mutex);
      while (game.turn != turn) game.changed.Wait(game.mutex);
      ++game.turn;
      game.changed.NotifyOne();
    }
  };
  std::thread odd(play, 1);
  play(0);
  odd.join();
  MutexLock lock(game.mutex);
  EXPECT_EQ(game.turn, kTurns);
}

TEST(CondVar, NotifyAllWakesEveryWaiter) {
  struct {
    Mutex mutex;
    CondVar changed;
    bool open GUARDED_BY(mutex) = false;
  } gate;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&gate] {
      MutexLock lock(gate.mutex);
      while (!gate.open) gate.changed.Wait(gate.mutex);
    });
  }
  {
    MutexLock lock(gate.mutex);
    gate.open = true;
  }
  gate.changed.NotifyAll();
  for (std::thread& thread : threads) thread.join();
}

TEST(CondVar, WaitUntilReturnsFalseOnceTheDeadlineHasPassed) {
  Mutex mutex;
  CondVar never;
  MutexLock lock(mutex);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(1);
  while (never.WaitUntil(mutex, deadline)) {  // spurious wake-ups return true
  }
  EXPECT_GE(std::chrono::steady_clock::now(), deadline);
}

}  // namespace
}  // namespace heddle
