#include "tests/engine/support.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/sanitized.h"

extern char** environ;

namespace heddle::engine_test {
namespace {

std::string EnvironmentOr(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

// The defaults; HEDDLE_CHECK_ACCESS holds for all engines of the tests.
EngineOptions DefaultOptions() {
  EngineOptions options;
  options.check_access = EngineOptions::FromEnvironment().check_access;
  return options;
}

Config Threaded(int num_workers, WorkerHost host) {
  EngineOptions options = DefaultOptions();
  options.num_workers = num_workers;
  options.worker_host = host;
  const char* host_name = host == WorkerHost::kTbb ? "tbb" : "threads";
  return {"threaded" + std::to_string(num_workers) + "_" + host_name, options};
}

}  // namespace

std::vector<Config> ThreadedConfigs() {
  const int only = std::stoi(EnvironmentOr("HEDDLE_TEST_WORKERS", "0"));
  std::vector<Config> configs;
  for (const int num_workers : {1, 2, 4}) {
    if (only != 0 && only != num_workers) continue;
    if (kTbbAllowed) configs.push_back(Threaded(num_workers, WorkerHost::kTbb));
    configs.push_back(Threaded(num_workers, WorkerHost::kThreads));
  }
  return configs;
}

std::vector<Config> ThreadedConfigs(int num_workers) {
  std::vector<Config> configs;
  if (kTbbAllowed) configs.push_back(Threaded(num_workers, WorkerHost::kTbb));
  configs.push_back(Threaded(num_workers, WorkerHost::kThreads));
  return configs;
}

std::vector<Config> AllConfigs() {
  std::vector<Config> configs = ThreadedConfigs();
  EngineOptions serial = DefaultOptions();
  serial.type = "serial";
  configs.push_back({"serial", serial});
  EngineOptions seeded = DefaultOptions();
  seeded.type = "seeded";
  seeded.seed = BaseSeed();
  configs.push_back({"seeded", seeded});
  return configs;
}

std::vector<Config> OneConfigOfEachKind() {
  std::vector<Config> configs = AllConfigs();
  std::erase_if(configs, [](const Config& config) {
    return config.options.type == "threaded" && config.options.num_workers != 2;
  });
  return configs;
}

std::string ConfigLabel(const testing::TestParamInfo<Config>& info) { return info.param.label; }

std::uint64_t BaseSeed() {
  static const std::uint64_t seed = [] {
    const std::string given = EnvironmentOr("HEDDLE_TEST_SEED", "");
    return given.empty() ? std::random_device()() : std::stoull(given);
  }();
  return seed;
}

int Rounds(int count) {
  static const int rounds = std::stoi(EnvironmentOr("HEDDLE_TEST_ROUNDS", "1"));
  return Scaled(count) * rounds;
}

Hold::Hold(Engine& engine, const OpOptions& options) {
  engine.PushAsync(options, [state = state_](Completion done) {
    std::exception_ptr error;
    {
      const std::lock_guard lock(state->mutex);
      if (!state->released) {
        state->done = std::move(done);
        return;
      }
      error = state->error;
    }
    done(error);
  });
}

void Hold::Release(std::exception_ptr error) {
  std::optional<Completion> done;
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->released) return;
    state_->released = true;
    state_->error = error;
    done = std::exchange(state_->done, std::nullopt);
  }
  if (done) (*done)(error);
}

Blocker::Blocker(Engine& engine, const OpOptions& options, bool until_started) {
  engine.Push(options, [state = state_] {
    state->started.count_down();
    state->released.wait();
  });
  if (until_started) state_->started.wait();
}

void Blocker::Release() {
  if (std::exchange(released_, true)) return;
  state_->released.count_down();
}

LogCapture::LogCapture() {
  SetLogSink([this](LogLevel, std::string_view message) {
    const std::lock_guard lock(mutex_);
    lines_.emplace_back(message);
    arrived_.notify_all();
  });
}

LogCapture::~LogCapture() { SetLogSink({}); }

std::optional<std::string> LogCapture::FindLocked(const std::vector<std::string>& parts) {
  for (const std::string& line : lines_) {
    if (std::ranges::all_of(parts, [&](const std::string& part) { return Contains(line, part); })) {
      return line;
    }
  }
  return std::nullopt;
}

std::string LogCapture::WaitForLine(const std::vector<std::string>& parts) {
  std::unique_lock lock(mutex_);
  std::optional<std::string> line;
  arrived_.wait(lock, [&] { return (line = FindLocked(parts)).has_value(); });
  return *line;
}

bool LogCapture::HasLine(const std::vector<std::string>& parts) {
  const std::lock_guard lock(mutex_);
  return FindLocked(parts).has_value();
}

std::string LogCapture::Text() {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (const std::string& line : lines_) text += line + "\n";
  return text;
}

bool Contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

void PinToOneCpu() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof(one), &one);
    return;
  }
}

int RunInChild(const std::string& filter,
               const std::vector<std::pair<std::string, std::string>>& environment, bool one_cpu) {
  // Everything that allocates happens before fork: the child of a threaded process may not.
  std::vector<std::string> variables = {"HEDDLE_TEST_CHILD=1"};
  for (const auto& [name, value] : environment) variables.push_back(name + "=" + value);
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text = *variable;
    const std::string_view name = text.substr(0, text.find('='));
    const bool replaced =
        std::ranges::any_of(environment, [&](const auto& given) { return given.first == name; });
    // Coverage of a sharded run must not split the child's one test away.
    if (!replaced && !name.starts_with("GTEST_")) variables.emplace_back(text);
  }
  std::vector<char*> envp;
  for (std::string& variable : variables) envp.push_back(variable.data());
  envp.push_back(nullptr);
  std::string program = "/proc/self/exe";
  std::string filter_flag = "--gtest_filter=" + filter;
  char* argv[] = {program.data(), filter_flag.data(), nullptr};

  const pid_t child = fork();
  if (child == 0) {
    if (one_cpu) PinToOneCpu();
    execve(program.c_str(), argv, envp.data());
    _exit(127);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

bool InChild() { return std::getenv("HEDDLE_TEST_CHILD") != nullptr; }

}  // namespace heddle::engine_test
