// For GPU ops that wait on their stream for more than the engine knows of.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <utility>

namespace heddle::engine {

// Says that what was issued may never end, and why.
class GivenUp {
 public:
  // Once. Threads: any.
  void Set(std::exception_ptr error) {
    error_ = std::move(error);
    since_ = std::chrono::steady_clock::now();
    set_.store(true, std::memory_order_release);  // pairs with the acquire in error()
  }
  // Null: not yet. Threads: any.
  std::exception_ptr error() const {
    return set_.load(std::memory_order_acquire) ? error_ : nullptr;
  }
  // When it was set; only if it is.
  std::chrono::steady_clock::time_point since() const { return since_; }

 private:
  std::exception_ptr error_;
  std::chrono::steady_clock::time_point since_;
  std::atomic<bool> set_{false};
};

// From the body of a GPU op, once: when `given_up` says so, the engine waits for the op's end for
// the driver's patience and no longer. Then the op fails with that error, and its stream is lost.
void EndsOrIsGivenUp(std::shared_ptr<const GivenUp> given_up) noexcept;

}  // namespace heddle::engine
