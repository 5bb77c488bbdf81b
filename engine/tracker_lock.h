// The engine's lock: held for tens of nanoseconds, millions of times a second.
//
// Two atomic operations when free, a short spin when a holder is about to leave, sleep when the
// holder was preempted. Not fair; holders keep it short.
#pragma once

#include <atomic>
#include <thread>

#include "base/mutex.h"
#include "base/pause.h"

namespace heddle::engine {

class CAPABILITY("mutex") TrackerLock {
 public:
  void lock() ACQUIRE() {
    int expected = kFree;
    if (!state_.compare_exchange_strong(expected, kHeld, std::memory_order_acquire)) LockSlow();
  }
  bool try_lock() TRY_ACQUIRE(true) {
    int expected = kFree;
    return state_.compare_exchange_strong(expected, kHeld, std::memory_order_acquire);
  }
  bool try_lock_for(int pauses) TRY_ACQUIRE(true) {
    int expected = kFree;
    while (!state_.compare_exchange_strong(expected, kHeld, std::memory_order_acquire)) {
      if (pauses-- == 0) return false;
      expected = kFree;
      Pause();
    }
    return true;
  }
  void unlock() RELEASE() {
    if (state_.exchange(kFree, std::memory_order_release) == kContended) state_.notify_one();
  }
  void AssertHeld() const ASSERT_CAPABILITY(this) {}

 private:
  enum : int { kFree, kHeld, kContended };

  void LockSlow() {
    for (int i = 0; i < 100; ++i) {
      Pause();
      if (state_.load(std::memory_order_relaxed) == kFree) {
        int expected = kFree;
        if (state_.compare_exchange_strong(expected, kHeld, std::memory_order_acquire)) return;
      }
    }
    while (state_.exchange(kContended, std::memory_order_acquire) != kFree) {
      state_.wait(kContended, std::memory_order_relaxed);
    }
  }

  std::atomic<int> state_{kFree};
};

class SCOPED_CAPABILITY TrackerGuard {
 public:
  explicit TrackerGuard(TrackerLock& lock) ACQUIRE(lock) : lock_(lock) { lock_.lock(); }
  ~TrackerGuard() RELEASE() { lock_.unlock(); }
  TrackerGuard(const TrackerGuard&) = delete;
  TrackerGuard& operator=(const TrackerGuard&) = delete;

 private:
  TrackerLock& lock_;
};

}  // namespace heddle::engine
