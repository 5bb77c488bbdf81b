// Completion: how an asynchronous op says that it has finished.
#pragma once

#include <exception>
#include <system_error>
#include <utility>

namespace heddle {

namespace internal {
struct AsyncState;
void RetainAsync(AsyncState* state) noexcept;
void ReleaseAsync(AsyncState* state) noexcept;  // the last release of an uncalled one fails the op
void CompleteAsync(AsyncState* state, std::exception_ptr error) noexcept;
}  // namespace internal

// Handed to the body of Engine::PushAsync. The op finishes when its body has returned and the
// completion has been called, from any thread. The first call wins; later ones are counted and
// logged. Destroying the last copy uncalled fails the op with OpError, so a lost callback never
// hangs anyone. A call never runs op bodies: dependents run on the engine's workers. Threads:
// copies may be used from any thread; one object from one thread at a time.
class Completion {
 public:
  Completion(const Completion& other) noexcept : state_(other.state_) {
    if (state_ != nullptr) internal::RetainAsync(state_);
  }
  Completion(Completion&& other) noexcept : state_(std::exchange(other.state_, nullptr)) {}
  Completion& operator=(Completion other) noexcept {
    std::swap(state_, other.state_);
    return *this;
  }
  ~Completion() {
    if (state_ != nullptr) internal::ReleaseAsync(state_);
  }

  // Success.
  void operator()() const { internal::CompleteAsync(state_, nullptr); }
  // Failure with `error`, which waits rethrow unchanged; null is success.
  void operator()(std::exception_ptr error) const {
    internal::CompleteAsync(state_, std::move(error));
  }
  // Failure with std::system_error unless `error` is success.
  void operator()(std::error_code error) const {
    internal::CompleteAsync(
        state_, error ? std::make_exception_ptr(std::system_error(error)) : std::exception_ptr());
  }

  static Completion Adopt(internal::AsyncState* state) noexcept {  // for heddle itself
    return Completion(state);
  }

 private:
  explicit Completion(internal::AsyncState* state) noexcept : state_(state) {}
  internal::AsyncState* state_;
};

}  // namespace heddle
