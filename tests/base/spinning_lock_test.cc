#include "base/spinning_lock.h"

#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace heddle {
namespace {

TEST(SpinningLock, ExcludesThreadsWithEitherKindOfLock) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 2000;
  struct {
    Mutex mutex;
    int value GUARDED_BY(mutex) = 0;
  } counter;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < kRounds; ++round) {
        if (i % 2 == 0) {
          const SpinningLock lock(counter.mutex);
          ++counter.value;
        } else {
          const MutexLock lock(counter.mutex);
          ++counter.value;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const MutexLock lock(counter.mutex);
  EXPECT_EQ(counter.value, kThreads * kRounds);
}

// Which is longer than it looks on.
TEST(SpinningLock, SleepsThroughALongHold) {
  struct {
    Mutex mutex;
    CondVar changed;
    bool reached GUARDED_BY(mutex) = false;
  } gate;
  std::thread other;
  {
    const MutexLock lock(gate.mutex);
    other = std::thread([&gate] {
      const SpinningLock lock(gate.mutex);
      gate.reached = true;
      gate.changed.NotifyAll();
    });
    for (int i = 0; i < 10'000; ++i) std::this_thread::yield();
    EXPECT_FALSE(gate.reached);
    while (!gate.reached) gate.changed.Wait(gate.mutex);
  }
  other.join();
}

}  // namespace
}  // namespace heddle
