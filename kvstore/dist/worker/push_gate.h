// Which pushes the program has called that the node has not been given yet: their inputs are still
// being computed. A barrier comes after them.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "base/mutex.h"

namespace heddle::kvstore::dist {

// Threads: any.
class PushGate {
 public:
  // Held by a push until the node has its requests.
  using Entry = std::shared_ptr<const void>;

  Entry Enter() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return batch_;
  }
  // Calls `then`, which must not throw, once nothing is held that entered before: at once, or on
  // the thread that lets go of the last one.
  void WhenEmpty(std::function<void()> then) EXCLUDES(mutex_) {
    auto next = std::make_shared<Batch>();
    std::shared_ptr<Batch> entered;  // let go of after the lock
    MutexLock lock(mutex_);
    entered = std::exchange(batch_, std::move(next));
    entered->then = std::move(then);
    entered->next = batch_;
  }

 private:
  // What entered between two barriers. It goes with the last that holds it.
  struct Batch {
    Batch() = default;
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;
    ~Batch() {
      if (then) then();
    }

    std::function<void()> then;
    std::shared_ptr<Batch> next;  // cannot go before this one
  };

  Mutex mutex_;
  std::shared_ptr<Batch> batch_ GUARDED_BY(mutex_) = std::make_shared<Batch>();
};

}  // namespace heddle::kvstore::dist
