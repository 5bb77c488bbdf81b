// Threads that connect again to peers whose connection was cut: connecting waits.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <thread>

#include "base/mutex.h"

namespace heddle::kvstore::dist {

// Threads: every method from any thread.
class Redialer {
 public:
  Redialer() = default;
  ~Redialer() { Stop(); }
  Redialer(const Redialer&) = delete;
  Redialer& operator=(const Redialer&) = delete;

  // Calls `dial`, which must not throw, on a thread of its own; after Stop not at all.
  // std::system_error if the system has no thread to give.
  void Start(std::function<void()> dial) EXCLUDES(mutex_);
  // Returns when all have ended, which is the business of what they call.
  void Stop() EXCLUDES(mutex_);

 private:
  struct Call {
    std::atomic<bool> done{false};
    std::thread thread;
  };

  Mutex mutex_;
  bool stopped_ GUARDED_BY(mutex_) = false;
  std::list<Call> calls_ GUARDED_BY(mutex_);
};

}  // namespace heddle::kvstore::dist
