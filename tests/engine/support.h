// What the engine tests share: the list of engine configurations, ways to hold ops back, captured
// log lines, and child processes.
#pragma once

#include <heddle/engine.h>
#include <heddle/logging.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <latch>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/sanitizers.h"

namespace heddle::engine_test {

// One way to set an engine up. The label becomes part of the test's name.
struct Config {
  std::string label;
  EngineOptions options;
};

constexpr std::chrono::seconds kSoon{60};  // what happens at all happens sooner

// The thread sanitizer's engines run on plain threads all.
inline constexpr bool kTbbAllowed = !kThreadSanitizer;

// Every engine type: threaded with 1, 2 and 4 workers on each worker host, serial, seeded. With
// HEDDLE_TEST_WORKERS=n only those with n workers.
std::vector<Config> AllConfigs();
std::vector<Config> ThreadedConfigs();
std::vector<Config> ThreadedConfigs(int num_workers);
// For what does not depend on the number of workers.
std::vector<Config> OneConfigOfEachKind();
std::string ConfigLabel(const testing::TestParamInfo<Config>& info);

class EveryEngine : public testing::TestWithParam<Config> {};

// Seed of a randomised test: HEDDLE_TEST_SEED, or one drawn for this process; main() prints it.
std::uint64_t BaseSeed();
// How often a test repeats what it does, with other seeds if it is randomised: `count` times
// HEDDLE_TEST_ROUNDS (1 by default).
int Rounds(int count);

// An op that stays unfinished until Release() without occupying a thread: an async one. Works on
// every engine type, also if its body has not run by then.
class Hold {
 public:
  Hold(Engine& engine, const OpOptions& options);
  ~Hold() { Release(); }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  void Release(std::exception_ptr error = nullptr);

 private:
  struct State {
    std::mutex mutex;
    bool released = false;
    std::exception_ptr error;
    std::optional<Completion> done;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// An op whose body occupies the thread that runs it until Release(). The constructor returns when
// it has started; on engines that only run ops inside waits it must not wait for that.
class Blocker {
 public:
  explicit Blocker(Engine& engine, const OpOptions& options = {.name = "blocker"},
                   bool until_started = true);
  ~Blocker() { Release(); }
  Blocker(const Blocker&) = delete;
  Blocker& operator=(const Blocker&) = delete;
  void Release();

 private:
  struct State {
    std::latch started{1};
    std::latch released{1};
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
  bool released_ = false;
};

// Takes the log lines of the process while it lives.
class LogCapture {
 public:
  LogCapture();
  ~LogCapture();
  LogCapture(const LogCapture&) = delete;
  LogCapture& operator=(const LogCapture&) = delete;

  // Blocks until one line contains all of `parts`, and returns it.
  std::string WaitForLine(const std::vector<std::string>& parts);
  bool HasLine(const std::vector<std::string>& parts);
  std::string Text();

 private:
  std::optional<std::string> FindLocked(const std::vector<std::string>& parts);

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<std::string> lines_;
};

bool Contains(std::string_view text, std::string_view part);

// Runs the tests of this binary that match `filter` in a fresh process, on one CPU if `one_cpu`,
// and returns its exit status (128 + signal if it was killed).
int RunInChild(const std::string& filter,
               const std::vector<std::pair<std::string, std::string>>& environment, bool one_cpu);
// True in a process that RunInChild started. Tests meant for a child skip themselves elsewhere.
bool InChild();
// Pins the calling process to the first CPU that it may use.
void PinToOneCpu();

}  // namespace heddle::engine_test
