// Linked into every GoogleTest program: a test that runs for minutes most likely hangs, and is
// ended by ctest without a word. Before that, this prints its name and where each thread is.
//
// A timer of the process, not a thread: programs that fork, or count their threads, see nothing of
// it. The signal may interrupt anything, so nothing here takes memory or a lock, but what prints
// stacks under a sanitizer. The interrupted thread asks one thread after the other and waits for
// none for ever.
#include <array>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>

#include <dirent.h>
#include <execinfo.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/sanitizers.h"

#if HEDDLE_THREAD_SANITIZER || HEDDLE_ADDRESS_SANITIZER
#include <sanitizer/common_interface_defs.h>
#endif

namespace heddle::tools {
namespace {

constexpr long kPatienceSeconds = 420;  // ctest's is 600 and more

int ReportSignal() { return SIGRTMIN + 5; }
int StackSignal() { return SIGRTMIN + 6; }

std::array<char, 256> running{};  // the test's name; written while the timer is off
std::atomic<bool> answered;

void PrintStack(int /*signal*/) {
#if HEDDLE_THREAD_SANITIZER || HEDDLE_ADDRESS_SANITIZER
  __sanitizer_print_stack_trace();
#else
  std::array<void*, 64> frames;
  backtrace_symbols_fd(frames.data(), backtrace(frames.data(), frames.size()), STDERR_FILENO);
#endif
  answered.store(true);
}

void PrintNumber(const char* before, long number, const char* after) {
  std::array<char, 400> text;
  const int length = std::snprintf(text.data(), text.size(), "%s%ld%s\n", before, number, after);
  if (write(STDERR_FILENO, text.data(), static_cast<std::size_t>(length)) < 0) return;
}

void PrintStackOf(long thread) {
  PrintNumber("thread ", thread, ":");
  answered.store(false);
  if (syscall(SYS_tgkill, getpid(), thread, StackSignal()) != 0) return;
  for (int i = 0; i < 300 && !answered.load(); ++i) {
    const timespec ten_ms{0, 10'000'000};
    nanosleep(&ten_ms, nullptr);
  }
  if (!answered.load()) PrintNumber("thread ", thread, " does not answer");
}

void Report(int /*signal*/) {
  PrintNumber(running.data(), kPatienceSeconds, " s and still running");
  const int threads = open("/proc/self/task", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  alignas(dirent64) std::array<char, 4096> entries;
  long bytes = 0;
  while ((bytes = syscall(SYS_getdents64, threads, entries.data(), entries.size())) > 0) {
    for (long at = 0; at < bytes;) {
      const auto* const entry = reinterpret_cast<const dirent64*>(entries.data() + at);
      if (const long thread = std::atol(entry->d_name); thread != 0) PrintStackOf(thread);
      at += entry->d_reclen;
    }
  }
  close(threads);
}

class HangReport : public testing::EmptyTestEventListener {
 public:
  HangReport() {
    std::array<void*, 1> frame;
    backtrace(frame.data(), 1);  // the first call takes memory
    Handle(ReportSignal(), Report);
    Handle(StackSignal(), PrintStack);
    sigevent event{};
    event.sigev_notify = SIGEV_SIGNAL;
    event.sigev_signo = ReportSignal();
    has_timer_ = timer_create(CLOCK_MONOTONIC, &event, &timer_) == 0;
  }

  void OnTestStart(const testing::TestInfo& test) override {
    std::snprintf(running.data(), running.size(), "%s.%s: ", test.test_suite_name(), test.name());
    SetTimer(kPatienceSeconds);
  }
  void OnTestEnd(const testing::TestInfo& /*test*/) override { SetTimer(0); }

 private:
  static void Handle(int signal, void (*handler)(int)) {
    struct sigaction action {};
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;
    sigaction(signal, &action, nullptr);
  }
  void SetTimer(long seconds) const {
    itimerspec time{};
    time.it_value.tv_sec = seconds;
    if (has_timer_) timer_settime(timer_, 0, &time, nullptr);
  }

  bool has_timer_ = false;
  timer_t timer_{};
};

const bool appended = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new HangReport);
  return true;
}();

}  // namespace
}  // namespace heddle::tools
