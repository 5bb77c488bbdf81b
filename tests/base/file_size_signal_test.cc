#include "base/file_size_signal.h"

#include <cerrno>
#include <csignal>

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/unique_fd.h"
#include "tests/small_files.h"

namespace heddle {
namespace {

// Lets a file of memory grow beyond the limit; errno, or 0.
int Grow() {
  const UniqueFd file(memfd_create("test", MFD_CLOEXEC));
  return ftruncate(file.get(), 1 << 20) == 0 ? 0 : errno;
}

bool IsPending(int signal) {
  sigset_t pending;
  sigpending(&pending);
  return sigismember(&pending, signal) == 1;
}

bool IsBlocked(int signal) {
  sigset_t mask;
  pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  return sigismember(&mask, signal) == 1;
}

TEST(NoFileSizeSignal, TurnsTheSignalIntoAnError) {
  EXPECT_EQ(WithSmallFiles(1000, [] { return Grow(); }), -SIGXFSZ);
  EXPECT_EQ(WithSmallFiles(1000,
                           [] {
                             const NoFileSizeSignal no_signal;
                             return Grow();
                           }),
            EFBIG);
}

TEST(NoFileSizeSignal, KeepsTheErrorOfTheCall) {
  errno = EFBIG;
  { const NoFileSizeSignal no_signal; }
  EXPECT_EQ(errno, EFBIG);
}

TEST(NoFileSizeSignal, LeavesTheProcessAsItWas) {
  EXPECT_EQ(WithSmallFiles(1000,
                           [] {
                             {
                               const NoFileSizeSignal no_signal;
                               Grow();
                             }
                             if (IsBlocked(SIGXFSZ) || IsPending(SIGXFSZ)) return 1;
                             return Grow();
                           }),
            -SIGXFSZ)
      << "what the program's own calls do is its business";
}

TEST(NoFileSizeSignal, LeavesASignalThatWasThereBefore) {
  EXPECT_EQ(WithSmallFiles(1000,
                           [] {
                             sigset_t set;
                             sigemptyset(&set);
                             sigaddset(&set, SIGXFSZ);
                             pthread_sigmask(SIG_BLOCK, &set, nullptr);
                             raise(SIGXFSZ);
                             { const NoFileSizeSignal no_signal; }
                             return IsBlocked(SIGXFSZ) && IsPending(SIGXFSZ) ? 7 : 8;
                           }),
            7);
}

}  // namespace
}  // namespace heddle
