#include "base/file_size_signal.h"

#include <cerrno>
#include <ctime>

namespace heddle {

namespace {

sigset_t FileSizeSignal() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGXFSZ);
  return set;
}

}  // namespace

NoFileSizeSignal::NoFileSizeSignal() noexcept {
  const sigset_t signal = FileSizeSignal();
  pthread_sigmask(SIG_BLOCK, &signal, &before_);
  sigset_t pending;
  sigpending(&pending);
  was_pending_ = sigismember(&pending, SIGXFSZ) == 1;
}

// The system sends the signal to the thread that made the call, where it waits by now.
NoFileSizeSignal::~NoFileSizeSignal() {
  const int error = errno;  // of the call, which is still to be looked at
  const sigset_t signal = FileSizeSignal();
  constexpr timespec kAtOnce = {};
  while (!was_pending_ && sigtimedwait(&signal, nullptr, &kAtOnce) < 0 && errno == EINTR) {
  }
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  errno = error;
}

}  // namespace heddle
