#include "engine/fork.h"

#include <heddle/error.h>

#include <string>

#include <pthread.h>

namespace heddle::engine {

std::atomic<bool> is_forked_child{false};

void WatchForks() {
  static const int watching = pthread_atfork(
      nullptr, nullptr, [] { is_forked_child.store(true, std::memory_order_relaxed); });
  (void)watching;
}

void ThrowForked(const char* call) {
  throw InvalidState(std::string(call) +
                     ": this process was forked from one that had made an engine, whose threads it "
                     "does not have: start it afresh (spawn), or fork before the first engine or "
                     "array is made");
}

}  // namespace heddle::engine
