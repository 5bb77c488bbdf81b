// Files that may not grow further (ulimit -f, RLIMIT_FSIZE; of memory that is a file too) as an
// error like others.
#pragma once

#include <csignal>

namespace heddle {

// While it lives, a call of this thread that would let a file grow beyond the limit fails with
// EFBIG and nothing else. The system would also raise SIGXFSZ, of which a process ends. What other
// threads do, and what the process does about the signal, stays as it is.
class NoFileSizeSignal {
 public:
  NoFileSizeSignal() noexcept;
  NoFileSizeSignal(const NoFileSizeSignal&) = delete;
  NoFileSizeSignal& operator=(const NoFileSizeSignal&) = delete;
  ~NoFileSizeSignal();

 private:
  sigset_t before_;   // the thread's mask
  bool was_pending_;  // somebody else's, who shall have it
};

}  // namespace heddle
