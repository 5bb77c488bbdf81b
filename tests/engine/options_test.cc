// Engine options, the environment variables behind them, and the number of workers.
#include <heddle/engine.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <sys/resource.h>

#include "base/cpu_count.h"
#include "tests/engine/support.h"
#include "tests/message_of.h"
#include "tests/sanitized.h"

namespace heddle::engine_test {
namespace {

// Sets one environment variable for a scope.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    setenv(name, value, /*overwrite=*/1);
  }
  ~ScopedVariable() {
    if (old_) {
      setenv(name_, old_->c_str(), 1);
    } else {
      unsetenv(name_);
    }
  }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  const char* name_;
  std::optional<std::string> old_;
};

TEST(EngineOptionsTest, TheDefaultsAreTheDocumentedOnes) {
  const EngineOptions options;
  EXPECT_EQ(options.type, "threaded");
  EXPECT_EQ(options.num_workers, 0);
  EXPECT_EQ(options.max_pending_ops, 1 << 20);
}

TEST(EngineOptionsTest, EveryVariableIsRead) {
  const ScopedVariable type("HEDDLE_ENGINE", "seeded"), workers("HEDDLE_NUM_WORKERS", "3"),
      host("HEDDLE_WORKER_HOST", "threads"), seed("HEDDLE_SEED", "12345678901234567890"),
      ops("HEDDLE_MAX_PENDING_OPS", "77"), bytes("HEDDLE_MAX_PENDING_BYTES", "99999999999"),
      ageing("HEDDLE_AGEING", "5"), watchdog("HEDDLE_WATCHDOG_MS", "1234"),
      check("HEDDLE_CHECK_ACCESS", "1"), trace("HEDDLE_TRACE", "/tmp/no such trace"),
      trace_bytes("HEDDLE_TRACE_BYTES_MAX", "65536");
  const EngineOptions options = EngineOptions::FromEnvironment();
  EXPECT_EQ(options.type, "seeded");
  EXPECT_EQ(options.num_workers, 3);
  EXPECT_EQ(options.worker_host, WorkerHost::kThreads);
  EXPECT_TRUE(options.check_access);
  EXPECT_EQ(options.seed, 12345678901234567890u);
  EXPECT_EQ(options.max_pending_ops, 77);
  EXPECT_EQ(options.max_pending_bytes, 99'999'999'999);
  EXPECT_EQ(options.ageing, 5);
  EXPECT_EQ(options.watchdog, std::chrono::milliseconds(1234));
  EXPECT_EQ(options.trace_file, "/tmp/no such trace");
  EXPECT_EQ(options.trace_bytes_max, 65536);
}

TEST(EngineOptionsTest, TheWorkerHostMayBeNamedTbb) {
  const ScopedVariable host("HEDDLE_WORKER_HOST", "tbb");
  EXPECT_EQ(EngineOptions::FromEnvironment().worker_host, WorkerHost::kTbb);
}

TEST(EngineOptionsTest, AVariableThatDoesNotParseIsNamed) {
  const std::vector<std::pair<const char*, const char*>> cases = {
      {"HEDDLE_ENGINE", "steam"},
      {"HEDDLE_NUM_WORKERS", "many"},
      {"HEDDLE_NUM_WORKERS", "-2"},
      {"HEDDLE_NUM_WORKERS", "2x"},
      {"HEDDLE_WORKER_HOST", "pthreads"},
      {"HEDDLE_SEED", "seed"},
      {"HEDDLE_MAX_PENDING_OPS", "1e6"},
      {"HEDDLE_MAX_PENDING_OPS", "0"},
      {"HEDDLE_MAX_PENDING_OPS", "99999999999999999999"},
      {"HEDDLE_MAX_PENDING_BYTES", "4G"},
      {"HEDDLE_AGEING", "often"},
      {"HEDDLE_WATCHDOG_MS", "30s"},
      {"HEDDLE_CHECK_ACCESS", "maybe"},
      {"HEDDLE_TRACE_BYTES_MAX", "big"},
  };
  for (const auto& [name, value] : cases) {
    const ScopedVariable variable(name, value);
    const std::string message =
        MessageOf<InvalidArgument>([] { const Engine engine(EngineOptions::FromEnvironment()); });
    EXPECT_TRUE(Contains(message, name)) << message;
    EXPECT_TRUE(Contains(message, value)) << message;
  }
}

TEST(EngineOptionsTest, AllVariablesThatDoNotParseAreNamedAtOnce) {
  const std::vector<std::pair<const char*, const char*>> cases = {
      {"HEDDLE_ENGINE", "steam"},         {"HEDDLE_NUM_WORKERS", "many"},
      {"HEDDLE_WORKER_HOST", "pthreads"}, {"HEDDLE_SEED", "seed"},
      {"HEDDLE_MAX_PENDING_OPS", "1e6"},  {"HEDDLE_MAX_PENDING_BYTES", "4G"},
      {"HEDDLE_AGEING", "often"},         {"HEDDLE_WATCHDOG_MS", "30s"},
      {"HEDDLE_CHECK_ACCESS", "maybe"},   {"HEDDLE_GPU_ISSUED_AHEAD", "far"},
      {"HEDDLE_TRACE_BYTES_MAX", "big"},
  };
  std::vector<std::unique_ptr<ScopedVariable>> variables;
  for (const auto& [name, value] : cases) {
    variables.push_back(std::make_unique<ScopedVariable>(name, value));
  }
  const std::string message =
      MessageOf<InvalidArgument>([] { (void)EngineOptions::FromEnvironment(); });
  for (const auto& [name, value] : cases) {
    EXPECT_TRUE(Contains(message, name)) << message;
    EXPECT_TRUE(Contains(message, value)) << message;
  }
}

TEST(EngineOptionsTest, AnUnknownEngineTypeIsNamedBesideTheKnownOnes) {
  const auto check = [](const std::string& message) {
    for (const char* part : {"warp_drive", "threaded", "serial", "seeded"}) {
      EXPECT_TRUE(Contains(message, part)) << message;
    }
  };
  EngineOptions options;
  options.type = "warp_drive";
  check(MessageOf<InvalidArgument>([&] { const Engine engine(options); }));
  const ScopedVariable variable("HEDDLE_ENGINE", "warp_drive");
  check(MessageOf<InvalidArgument>([] { const Engine engine(EngineOptions::FromEnvironment()); }));
}

TEST(EngineOptionsTest, OptionsThatCannotWorkAreRefusedByName) {
  const auto refused = [](const char* expected, auto change) {
    EngineOptions options;
    options.worker_host = WorkerHost::kThreads;
    change(options);
    EXPECT_EQ(MessageOf<InvalidArgument>([&] { const Engine engine(options); }), expected);
  };
  refused("engine option num_workers is -1, expected 0 to 1024",
          [](EngineOptions& options) { options.num_workers = -1; });
  refused("engine option num_workers is 1025, expected 0 to 1024",
          [](EngineOptions& options) { options.num_workers = 1025; });
  refused("engine option max_pending_ops is 0, expected at least 1",
          [](EngineOptions& options) { options.max_pending_ops = 0; });
  refused("engine option max_pending_bytes is 0, expected at least 1",
          [](EngineOptions& options) { options.max_pending_bytes = 0; });
  refused("engine option ageing is -1, expected at least 0",
          [](EngineOptions& options) { options.ageing = -1; });
  refused("engine option watchdog is -1, expected at least 0 ms",
          [](EngineOptions& options) { options.watchdog = std::chrono::milliseconds(-1); });
  refused("engine option trace_bytes_max is 0, expected at least 1",
          [](EngineOptions& options) { options.trace_bytes_max = 0; });
}

class EngineConfigTest : public EveryEngine {};
INSTANTIATE_TEST_SUITE_P(All, EngineConfigTest, testing::ValuesIn(AllConfigs()), ConfigLabel);

TEST_P(EngineConfigTest, OptionsAreReadBackWithTheWorkersResolved) {
  EngineOptions options = GetParam().options;
  options.ageing = 17;
  const Engine engine(options);
  EXPECT_EQ(engine.options().type, options.type);
  EXPECT_EQ(engine.options().ageing, 17);
  if (options.type == "threaded") {
    EXPECT_EQ(engine.options().num_workers, options.num_workers);
    EXPECT_EQ(engine.options().worker_host, options.worker_host);
  }
}

class WorkerCountTest : public EveryEngine {};
INSTANTIATE_TEST_SUITE_P(Hosts, WorkerCountTest, testing::ValuesIn(ThreadedConfigs(0)),
                         ConfigLabel);

// base/cpu_count_test.cc shows that the count follows affinity and fake cgroup quotas of both
// versions.
TEST_P(WorkerCountTest, ThereIsAWorkerForEachCpuThatAffinityAndQuotaAllow) {
  const Engine engine(GetParam().options);
  EXPECT_EQ(engine.options().num_workers, AvailableCpus());
}

// --- In a fresh process, since affinity and the default engine belong to the process ---

TEST(EngineChild, OneCpuMeansOneWorker) {
  if (!InChild()) GTEST_SKIP() << "runs in a child process";
  Engine engine;
  EXPECT_EQ(engine.options().num_workers, 1);
  bool ran = false;
  engine.Push({.name = "op"}, [&] { ran = true; });
  engine.WaitForAll();
  EXPECT_TRUE(ran);
}

TEST(AffinityTest, WorkersFollowTheAffinityOfTheProcess) {
  EXPECT_EQ(RunInChild("EngineChild.OneCpuMeansOneWorker", {}, /*one_cpu=*/true), 0);
}

TEST(EngineChild, ThreadsRunOut) {
  if (!InChild()) GTEST_SKIP() << "runs in a child process";
  // Memory for some stacks, of 8 MiB usually, and not for all.
  const rlimit limit{std::size_t{1} << 30, std::size_t{1} << 30};
  ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
  EngineOptions options;
  options.worker_host = WorkerHost::kThreads;
  options.num_workers = 1024;
  EXPECT_THROW(const Engine engine(options), std::system_error);
  Engine engine;  // the former has left nothing behind
  bool ran = false;
  engine.Push({.name = "op"}, [&] { ran = true; });
  engine.WaitForAll();
  EXPECT_TRUE(ran);
}

// Used to end the process.
TEST(ThreadLimitTest, AnEngineThatCannotHaveItsThreadsIsAnError) {
  if (kSanitized) GTEST_SKIP() << "sanitizers need more address space than may be given here";
  EXPECT_EQ(RunInChild("EngineChild.ThreadsRunOut", {}, /*one_cpu=*/false), 0);
}

TEST(EngineChild, TheDefaultEngineIsSerialAndOne) {
  if (!InChild()) GTEST_SKIP() << "runs in a child process";
  Engine& engine = Engine::Default();
  EXPECT_EQ(&engine, &Engine::Default());
  EXPECT_EQ(engine.options().type, "serial");
  EXPECT_EQ(engine.options().ageing, 9);
  bool ran = false;
  engine.Push({.name = "op"}, [&] { ran = true; });
  EXPECT_TRUE(ran);  // only the serial engine is that quick
}

TEST(DefaultEngineTest, ItFollowsTheEnvironment) {
  EXPECT_EQ(RunInChild("EngineChild.TheDefaultEngineIsSerialAndOne",
                       {{"HEDDLE_ENGINE", "serial"}, {"HEDDLE_AGEING", "9"}}, /*one_cpu=*/false),
            0);
}

TEST(EngineChild, TheDefaultEngineIsUsedAtExit) {
  if (!InChild()) GTEST_SKIP() << "runs in a child process";
  static Var kept = Engine::Default().NewVar("static");
  Engine::Default().Push({.name = "pending", .writes = {kept}}, [] { std::this_thread::yield(); });
}

TEST(DefaultEngineTest, ProcessesThatLeaveItWithWorkPendingEndInOrder) {
  for (const char* type : {"threaded", "serial", "seeded"}) {
    EXPECT_EQ(RunInChild("EngineChild.TheDefaultEngineIsUsedAtExit", {{"HEDDLE_ENGINE", type}},
                         /*one_cpu=*/false),
              0)
        << type;
  }
}

}  // namespace
}  // namespace heddle::engine_test
