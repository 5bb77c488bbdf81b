// A lock for mutexes that are held for microseconds by several busy threads.
#pragma once

#include "base/mutex.h"
#include "base/pause.h"

namespace heddle {

// Holds a mutex as MutexLock does, but looks on for tens of microseconds before it sleeps: putting
// a thread to sleep and waking it takes both threads longer than such a hold.
class SCOPED_CAPABILITY SpinningLock {
 public:
  explicit SpinningLock(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { Acquire(mutex); }
  ~SpinningLock() RELEASE() { mutex_.Unlock(); }
  SpinningLock(const SpinningLock&) = delete;
  SpinningLock& operator=(const SpinningLock&) = delete;

 private:
  static constexpr int kLooks = 1500;

  static void Acquire(Mutex& mutex) ACQUIRE(mutex) {
    for (int i = 0; i < kLooks; ++i) {
      if (mutex.TryLock()) return;
      Pause();
    }
    mutex.Lock();
  }

  Mutex& mutex_;
};

}  // namespace heddle
