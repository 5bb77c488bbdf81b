#include "engine/doorman.h"

#include <utility>

#include "engine/scheduling.h"

namespace heddle::engine {

// Not a mutex and a condition variable: the woken thread would wait for the mutex that its waker
// holds, and be woken twice.

Doorman::Doorman(std::function<bool()> run) : run_(std::move(run)), thread_([this] { Loop(); }) {}

Doorman::~Doorman() {
  State parked = State::kParked;
  // seq_cst, as every change of state_ that notify_one follows: it looks for who waits after that
  while (!state_.compare_exchange_weak(parked, State::kStopping, std::memory_order_seq_cst)) {
    parked = State::kParked;
    std::this_thread::yield();
  }
  state_.notify_one();
  thread_.join();
  // acquire; pairs with the release in Wake: whoever woke it last may still be in notify_one
  while (wakers_.load(std::memory_order_acquire) > 0) std::this_thread::yield();
}

bool Doorman::Wake() noexcept {
  // Before the exchange, which lets the run begin: the destructor, which comes after the run, sees
  // this thread.
  wakers_.fetch_add(1, std::memory_order_relaxed);
  State parked = State::kParked;
  // Releases what the caller did to the run, and acquires the run before it.
  const bool woken =
      state_.compare_exchange_strong(parked, State::kBusy, std::memory_order_seq_cst);
  if (woken) state_.notify_one();
  wakers_.fetch_sub(1, std::memory_order_release);
  return woken;
}

void Doorman::Loop() {
  PreferPromptWakeups();
  while (true) {
    State state = State::kParked;
    while (state == State::kParked) {
      state_.wait(State::kParked, std::memory_order_acquire);
      state = state_.load(std::memory_order_acquire);
    }
    if (state == State::kStopping) return;
    while (run_()) std::this_thread::yield();
    // release; pairs with the exchange in Wake: the next run comes after this one
    state_.store(State::kParked, std::memory_order_release);
  }
}

}  // namespace heddle::engine
