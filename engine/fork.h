// Children of fork(). They have none of their parent's threads, and whatever lock another thread
// held at that moment is held in them for ever. So in a child of a process that had made an engine
// every call on engines, arrays, stores and optimizers fails with InvalidState at once, before it
// takes a lock; what is dropped is left alone. A process may fork freely before it makes its first
// engine.
#pragma once

#include <atomic>

#include "base/mutex.h"

namespace heddle::engine {

extern std::atomic<bool> is_forked_child;  // for the next

// relaxed: set by fork() itself, before any code of the child runs
inline bool InForkedChild() noexcept { return is_forked_child.load(std::memory_order_relaxed); }

// Called by every engine that is made: children forked from now on know it.
void WatchForks();

// Throws InvalidState, naming the call, in such a child.
[[noreturn]] void ThrowForked(const char* call);
inline void CheckNotForked(const char* call) {
  if (InForkedChild()) [[unlikely]]
    ThrowForked(call);
}

// Holds a mutex that calls lock from here to the end of the scope, or throws as CheckNotForked.
class SCOPED_CAPABILITY CallLock {
 public:
  CallLock(Mutex& mutex, const char* call) ACQUIRE(mutex) : mutex_(mutex) {
    CheckNotForked(call);
    mutex_.Lock();
  }
  ~CallLock() RELEASE() { mutex_.Unlock(); }
  CallLock(const CallLock&) = delete;
  CallLock& operator=(const CallLock&) = delete;

 private:
  Mutex& mutex_;
};

}  // namespace heddle::engine
