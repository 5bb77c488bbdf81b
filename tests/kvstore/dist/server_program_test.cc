// What servers do besides heddle's own: optimizers that only they have, and traces that workers ask
// for.
#include <heddle/error.h>
#include <heddle/kvstore.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "base/mutex.h"
#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/optimizer/foreign.h"
#include "tests/kvstore/dist/job.h"

namespace heddle::kvstore::dist {
namespace {

// weight -= rate * (scale * gradient + decay * weight) * (updates of the key so far).
class Growing {
 public:
  ServerOptimizers optimizers() {
    return [this](std::string_view name) -> ServerUpdater {
      if (name != "growing") throw InvalidArgument("no such optimizer: " + std::string(name));
      ++made_;
      return [this](const ServerUpdate& update) { Update(update); };
    };
  }
  int made() const { return made_; }

 private:
  void Update(const ServerUpdate& update) {
    double scale = 0;
    for (const auto& [name, value] : update.parameters) {
      if (name == "scale") scale = value;
    }
    if (scale < 0) throw std::runtime_error("scale below 0");
    double updates = 0;
    {
      MutexLock lock(mutex_);
      updates = ++updates_[ToString(update.key)];
    }
    ASSERT_EQ(update.gradient.shape(), update.weight.shape());
    const auto* const gradient = update.gradient.data<const float>();
    auto* const weight = update.weight.data<float>();
    for (std::int64_t i = 0; i < update.weight.size(); ++i) {
      const double step = scale * gradient[i] + update.weight_decay * weight[i];
      weight[i] -= static_cast<float>(update.learning_rate * step * updates);
    }
  }

  std::atomic<int> made_{0};
  Mutex mutex_;
  std::map<std::string, double> updates_ GUARDED_BY(mutex_);
};

std::string ErrorOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "none";
}

TEST(ServerProgram, OptimizersOfTheServersUpdateByTheSumOfAllWorkers) {
  Growing growing;
  Job job({.num_workers = 2, .num_servers = 2, .program = {.optimizers = growing.optimizers()}});
  job.RunWorkers("dist_sync", [&](int rank, KVStore& store, Engine& engine) {
    const auto filled = [&](std::int64_t size, double value) {
      return NDArray::Full({size}, value, DType::kFloat32, Cpu(), engine);
    };
    const OptimizerPtr optimizer =
        MakeForeignOptimizer("growing", {{"learning_rate", 0.5}, {"scale", 2}});
    optimizer->SetLearningRateMultiplier("large", 0.5);
    store.SetOptimizer(optimizer);
    store.Init("small", filled(3, 1));
    store.Init("large", filled(50'000, 1));  // would be cut, were it not for the optimizer
    const auto value_of = [&](std::string_view key, std::int64_t size) {
      const NDArray out = filled(size, 0);
      store.Pull(key, out);
      const std::vector<float> values = out.ToVector<float>();
      EXPECT_EQ(values, std::vector<float>(values.size(), values[0])) << key;
      return values[0];
    };
    const auto push = [&] {
      store.Push("small", filled(3, rank + 1));
      store.Push("large", filled(50'000, rank + 1));
    };
    push();
    EXPECT_EQ(value_of("small", 3), 1 - 0.5F * 6);
    EXPECT_EQ(value_of("large", 50'000), 1 - 0.25F * 6);
    push();  // twice as far
    EXPECT_EQ(value_of("small", 3), -2 - 2 * 0.5F * 6);
    EXPECT_EQ(value_of("large", 50'000), -0.5F - 2 * 0.25F * 6);
    store.Barrier();
    optimizer->Set("scale", 4);  // later parameters; what the servers keep stays
    push();
    EXPECT_EQ(value_of("small", 3), -8 - 3 * 0.5F * 12);
    store.Barrier();
    EXPECT_EQ(growing.made(), 2) << "one a server";
  });
}

TEST(ServerProgram, AnErrorOfTheServersOptimizerComesBackAtTheWait) {
  Growing growing;
  Job job({.program = {.optimizers = growing.optimizers()}});
  job.RunWorkers("dist_sync", [&](int, KVStore& store, Engine& engine) {
    const NDArray value = NDArray::Ones({3}, DType::kFloat32, Cpu(), engine);
    store.SetOptimizer(MakeForeignOptimizer("growing", {{"scale", -1}}));
    store.Init("w", value);
    const NDArray out = NDArray::Zeros({3}, DType::kFloat32, Cpu(), engine);
    store.Push("w", value);
    store.Pull("w", out);
    const std::string error = ErrorOf([&] { out.WaitToRead(); });
    EXPECT_NE(error.find("scale below 0"), std::string::npos) << error;
    ErrorOf([&] { engine.WaitForAll(); });
  });
}

TEST(ServerProgram, AnOptimizerThatNobodyHasIsRefused) {
  for (const bool has_own : {false, true}) {
    Growing growing;
    ServerProgram program;
    if (has_own) program.optimizers = growing.optimizers();
    Job job({.program = program});
    job.RunWorkers("dist_sync", [&](int, KVStore& store, Engine& engine) {
      const std::string error =
          ErrorOf([&] { store.SetOptimizer(MakeForeignOptimizer("shrinking", {})); });
      EXPECT_NE(error.find(has_own ? "no such optimizer: shrinking" : "none of heddle's"),
                std::string::npos)
          << error;
      store.Init("w", NDArray::Ones({3}, DType::kFloat32, Cpu(), engine));  // the store goes on
    });
  }
  const auto local = KVStore::Create("local");
  const NDArray value = NDArray::Ones({3});
  local->Init("w", value);
  local->SetOptimizer(MakeForeignOptimizer("growing", {}));
  const std::string error = ErrorOf([&] {
    local->Push("w", value);
    local->Pull("w", value);
    value.WaitToRead();
  });
  EXPECT_NE(error.find("expected a server that has it"), std::string::npos) << error;
  ErrorOf([] { Engine::Default().WaitForAll(); });
}

TEST(ServerProgram, AServerRecordsATraceWhenAWorkerAsks) {
  const std::string folder =
      ::testing::TempDir() + "heddle_server_trace_" + std::to_string(getpid());
  std::filesystem::create_directory(folder);
  const std::string file = folder + "/run.trace";
  Job job({});
  job.RunWorkers("dist_sync", [&](int, KVStore& store, Engine& engine) {
    const NDArray value = NDArray::Ones({3}, DType::kFloat32, Cpu(), engine);
    store.Init("w", value);
    const auto records = [&](int pushes) {
      store.SendCommandToServers(kTraceCommand, file);
      EXPECT_NE(ErrorOf([&] { store.SendCommandToServers(kTraceCommand, file); }).find("running"),
                std::string::npos);
      for (int i = 0; i < pushes; ++i) {
        store.Push("w", value);
        store.Pull("w", value);
        value.WaitToRead();
      }
      store.SendCommandToServers(kTraceCommand, "");
      return std::filesystem::file_size(file);
    };
    const auto few = records(1);
    EXPECT_GT(few, 0U);
    EXPECT_GT(records(2000),
              few + 2000 * 3 * 32);  // a merge, an update and a read each, and messages
  });
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace heddle::kvstore::dist
