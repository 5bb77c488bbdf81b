#include "engine/doorman.h"

#include <utility>

#include "engine/scheduling.h"
#include "engine/tls.h"

namespace heddle::engine {
namespace {

HEDDLE_TLS const Doorman* tls_doorman = nullptr;  // that this thread is

}  // namespace

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
      state_.compare_exchange_strong(parked, State::kCalled, std::memory_order_seq_cst);
  if (woken) state_.notify_one();
  wakers_.fetch_sub(1, std::memory_order_release);
  return woken;
}

void Doorman::AboutToLeave() noexcept {
  if (tls_doorman != this || parked_early_) return;
  parked_early_ = true;
  // seq_cst: before whatever the run does next that makes others call Wake
  state_.store(State::kParked, std::memory_order_seq_cst);
}

bool Doorman::Stay() noexcept {
  if (tls_doorman != this || !parked_early_) return false;
  State state = State::kParked;
  // seq_cst: whoever still found kCalled before is seen by what the run looks at next
  while (!state_.compare_exchange_weak(state, State::kBusy, std::memory_order_seq_cst)) {
    if (state == State::kStopping) return false;
  }
  parked_early_ = false;
  return state == State::kCalled;
}

void Doorman::Loop() {
  tls_doorman = this;
  PreferPromptWakeups();
  while (true) {
    State state = State::kParked;
    while (state == State::kParked) {
      state_.wait(State::kParked, std::memory_order_acquire);
      state = state_.load(std::memory_order_acquire);
    }
    if (state == State::kStopping) return;
    state_.store(State::kBusy, std::memory_order_seq_cst);  // before the run looks; see IsComing
    const bool again = run_();
    if (std::exchange(parked_early_, false)) continue;
    // seq_cst: released to the exchange in Wake, since the next run comes after this one
    state_.store(again ? State::kCalled : State::kParked, std::memory_order_seq_cst);
    if (again) std::this_thread::yield();
  }
}

}  // namespace heddle::engine
