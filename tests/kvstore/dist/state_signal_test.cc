// What SIGUSR1 prints, where it cannot be printed. In a program without jobs: its children would
// lack the thread that prints.
#include "kvstore/dist/state_signal.h"

#include <atomic>
#include <csignal>
#include <string>
#include <thread>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/sanitizers.h"

namespace heddle::kvstore::dist {
namespace {

TEST(StateSignal, LosesTheStateRatherThanTheProcess) {
  if (kThreadSanitizer) GTEST_SKIP() << "it allows no threads in children";
  const pid_t child = fork();
  if (child == 0) {
    dup2(open("/dev/full", O_WRONLY | O_CLOEXEC), STDERR_FILENO);
    std::atomic<int> asked = 0;
    const StateOnSignal state([&] {
      ++asked;
      return std::string("a state");
    });
    for (int i = 1; i <= 2; ++i) {  // the second shows that the first was survived
      raise(SIGUSR1);
      while (asked < i) std::this_thread::yield();
    }
    _exit(0);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(StateSignal, MayComeBeforeThereIsAState) {
  if (kThreadSanitizer) GTEST_SKIP() << "it allows no threads in children";
  const pid_t child = fork();
  if (child == 0) {
    ExpectStateSignal();
    raise(SIGUSR1);
    std::atomic<int> asked = 0;
    const StateOnSignal state([&] {
      ++asked;
      return std::string();
    });
    raise(SIGUSR1);
    while (asked == 0) std::this_thread::yield();
    _exit(0);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace heddle::kvstore::dist
