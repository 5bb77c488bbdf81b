#include "engine/doorman.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include <sys/ioctl.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "engine/scheduling.h"
#include "engine/tls.h"

namespace heddle::engine {
namespace {

// TFD_IOC_SET_TICKS, but <linux/timerfd.h> and <sys/timerfd.h> exclude each other.
constexpr unsigned long kSetTicks = _IOW('T', 0, std::uint64_t);

HEDDLE_TLS const Doorman* tls_doorman = nullptr;  // that this thread is

}  // namespace

// Not a mutex and a condition variable: the woken thread would wait for the mutex that its waker
// holds, and be woken twice.

Doorman::Doorman(std::function<void()> run, UniqueFd timer)
    : run_(std::move(run)), timer_(std::move(timer)), thread_([this] { Loop(); }) {}

UniqueFd Doorman::NewTimer() noexcept {
  return UniqueFd(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC));
}

void Doorman::End() noexcept {
  if (!thread_.joinable()) return;
  State parked = State::kParked;
  // seq_cst, as every change of state_ that notify_one follows: it looks for who waits after that
  while (!state_.compare_exchange_weak(parked, State::kStopping, std::memory_order_seq_cst)) {
    parked = State::kParked;
    std::this_thread::yield();
  }
  EndSleep(std::chrono::nanoseconds(0));
  thread_.join();
  // acquire; pairs with the release in Wake: whoever woke it last may still be in EndSleep
  while (wakers_.load(std::memory_order_acquire) > 0) std::this_thread::yield();
}

bool Doorman::Wake(std::chrono::nanoseconds delay) noexcept {
  // Before the exchange, which lets the run begin: End(), which comes after the run, sees this
  // thread.
  wakers_.fetch_add(1, std::memory_order_relaxed);
  State parked = State::kParked;
  // Releases what the caller did to the run, and acquires the run before it.
  const bool woken =
      state_.compare_exchange_strong(parked, State::kCalled, std::memory_order_seq_cst);
  if (woken) EndSleep(delay);
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

// No wake-up is lost: whoever changes state_ calls this after that, and each call makes the next
// Sleep, or the one in progress, return: at once, or when the timer expires. A later call may set
// the timer anew before that; then it is the later one's time that counts. The loop finds what
// state_ has become. Where the doorman has seen that before it slept, a Sleep returns for nothing.
void Doorman::EndSleep(std::chrono::nanoseconds delay) noexcept {
  // As if it had expired, which spares the timer's interrupt. Not every kernel can do that.
  const std::uint64_t expirations = 1;
  if (delay.count() == 0 && ioctl(timer_.get(), kSetTicks, &expirations) == 0) return;
  itimerspec time{};
  time.it_value.tv_nsec = std::max<std::int64_t>(delay.count(), 1);  // 0 would stop it
  // Without a timer both sides use state_.
  if (timerfd_settime(timer_.get(), 0, &time, nullptr) != 0) state_.notify_one();
}

void Doorman::Sleep() noexcept {
  std::uint64_t expirations = 0;
  if (read(timer_.get(), &expirations, sizeof(expirations)) >= 0 || errno == EINTR) return;
  state_.wait(State::kParked, std::memory_order_acquire);
}

void Doorman::Loop() {
  tls_doorman = this;
  PreferPromptWakeups();
  while (true) {
    State state = state_.load(std::memory_order_acquire);
    while (state == State::kParked) {
      Sleep();
      state = state_.load(std::memory_order_acquire);
    }
    if (state == State::kStopping) return;
    state_.store(State::kBusy, std::memory_order_seq_cst);  // before the run looks; see IsComing
    run_();
    if (std::exchange(parked_early_, false)) continue;
    // seq_cst: released to the exchange in Wake, since the next run comes after this one
    state_.store(State::kParked, std::memory_order_seq_cst);
  }
}

}  // namespace heddle::engine
