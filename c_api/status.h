// Between exceptions and statuses: what leaves a call of the C API, and what its callbacks report.
//
// Threads: any; the last error is the thread's own.
#pragma once

#include <heddle/c_api.h>
#include <heddle/error.h>

#include <exception>
#include <string>
#include <string_view>

namespace heddle::c_api {

// Makes this the thread's last error, unless memory for the message is short: then that is.
HeddleStatus SetLastError(HeddleStatus status, std::string_view message) noexcept;
// The same with the exception that is being handled.
HeddleStatus SetLastErrorToCurrentException() noexcept;

// The exception for a failure that a callback reports: the type of that status, or one that turns
// back into it. The message may be empty.
std::exception_ptr ErrorOf(HeddleStatus status, const std::string& message);

struct LastError {
  HeddleStatus status = HEDDLE_OK;
  std::string message;
};

// While a callback runs, the thread's last error is one of the callback's own: a thread that helps
// others in a wait keeps its own, and the text where it was.
class CallbackScope {
 public:
  CallbackScope() noexcept;
  ~CallbackScope();
  CallbackScope(const CallbackScope&) = delete;
  CallbackScope& operator=(const CallbackScope&) = delete;

  // Throws what a callback's status means.
  [[noreturn]] void Throw(HeddleStatus status) const;

 private:
  LastError own_;
  LastError* const outer_;
};
// Runs `call()` and throws what its status means.
template <class F>
void CallBack(F&& call) {
  const CallbackScope scope;
  if (const HeddleStatus status = call(); status != HEDDLE_OK) scope.Throw(status);
}

}  // namespace heddle::c_api
