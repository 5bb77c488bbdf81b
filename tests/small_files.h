// What becomes of a process whose files may not grow (ulimit -f).
#pragma once

#include <csignal>

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace heddle {

// Runs body() in a child process whose files may have `bytes` bytes at most. Returns what it
// returns, or minus the signal that ended the child.
template <class F>
int WithSmallFiles(rlim_t bytes, const F& body) {
  const pid_t child = fork();
  if (child == 0) {
    const rlimit limit{bytes, bytes};
    setrlimit(RLIMIT_FSIZE, &limit);
    signal(SIGXFSZ, SIG_DFL);  // whatever started the tests may ignore it
    _exit(body());
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace heddle
