// A mutex whose use Clang checks (-Wthread-safety), and the annotations for it.
//
//   Mutex mutex_;
//   std::deque<Waiter> waiting_ GUARDED_BY(mutex_);
//   std::vector<Op*> StartReadyLocked() REQUIRES(mutex_);
//
// GCC sees plain std::mutex code. Clang's checks do not follow lambdas: give such a lambda REQUIRES
// of its own, or write the loop out (while (!ready_) cond_.Wait(mutex_)).
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define HEDDLE_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define HEDDLE_THREAD_ANNOTATION(x)
#endif

#define CAPABILITY(name) HEDDLE_THREAD_ANNOTATION(capability(name))
#define SCOPED_CAPABILITY HEDDLE_THREAD_ANNOTATION(scoped_lockable)
#define GUARDED_BY(mutex) HEDDLE_THREAD_ANNOTATION(guarded_by(mutex))
#define PT_GUARDED_BY(mutex) HEDDLE_THREAD_ANNOTATION(pt_guarded_by(mutex))
#define ACQUIRED_BEFORE(...) HEDDLE_THREAD_ANNOTATION(acquired_before(__VA_ARGS__))
#define ACQUIRED_AFTER(...) HEDDLE_THREAD_ANNOTATION(acquired_after(__VA_ARGS__))
#define REQUIRES(...) HEDDLE_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) HEDDLE_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) HEDDLE_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define TRY_ACQUIRE(...) HEDDLE_THREAD_ANNOTATION(try_acquire_capability(__VA_ARGS__))
#define RELEASE(...) HEDDLE_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
#define ASSERT_CAPABILITY(mutex) HEDDLE_THREAD_ANNOTATION(assert_capability(mutex))
#define RETURN_CAPABILITY(mutex) HEDDLE_THREAD_ANNOTATION(lock_returned(mutex))
#define NO_THREAD_SAFETY_ANALYSIS HEDDLE_THREAD_ANNOTATION(no_thread_safety_analysis)

namespace heddle {

class CondVar;

// Not recursive. Prefer MutexLock to Lock and Unlock.
class CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void Lock() ACQUIRE() { mutex_.lock(); }
  void Unlock() RELEASE() { mutex_.unlock(); }
  [[nodiscard]] bool TryLock() TRY_ACQUIRE(true) { return mutex_.try_lock(); }
  // Tells Clang, without a check at run time, that the caller holds the mutex.
  void AssertHeld() const ASSERT_CAPABILITY(this) {}

 private:
  friend class CondVar;
  std::mutex mutex_;
};

// Holds a mutex from here to the end of the scope.
class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.Lock(); }
  ~MutexLock() RELEASE() { mutex_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// Waits may return without a notification: wait in a loop over the condition.
class CondVar {
 public:
  CondVar() = default;
  CondVar(const CondVar&) = delete;
  CondVar& operator=(const CondVar&) = delete;

  // Releases the mutex while waiting; holds it again on return.
  void Wait(Mutex& mutex) REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    cond_.wait(lock);
    lock.release();
  }
  // False once `deadline` has passed.
  template <class Clock, class Duration>
  bool WaitUntil(Mutex& mutex, std::chrono::time_point<Clock, Duration> deadline) REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    const bool in_time = cond_.wait_until(lock, deadline) == std::cv_status::no_timeout;
    lock.release();
    return in_time;
  }
  void NotifyOne() { cond_.notify_one(); }
  void NotifyAll() { cond_.notify_all(); }

 private:
  std::condition_variable cond_;
};

}  // namespace heddle
