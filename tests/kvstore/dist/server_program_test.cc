// What servers do besides heddle's own: optimizers that only they have, and traces that workers ask
// for.
#include <heddle/error.h>
#include <heddle/kvstore.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <latch>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/mutex.h"
#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/optimizer/foreign.h"
#include "tests/kvstore/dist/forwarding_transport.h"
#include "tests/kvstore/dist/job.h"
#include "tools/testing/temp_folder.h"

namespace heddle::kvstore::dist {
namespace {

// weight -= rate * (scale * gradient + decay * weight) * (updates of the key so far).
class Growing {
 public:
  ServerOptimizers optimizers() {
    return [this](std::string_view name) -> ServerUpdater {
      if (name != "growing") throw InvalidArgument("no such optimizer: " + std::string(name));
      ++made_;
      return {.update = [this](const ServerUpdate& update) { Update(update); },
              .save_state = [this](KeyRef key) { return Save(key); },
              .load_state = [this](KeyRef key, std::string_view state) { Load(key, state); },
              .forget = [this](KeyRef key) { Forget(key); }};
    };
  }
  int made() const { return made_; }
  std::size_t num_kept() const {
    MutexLock lock(mutex_);
    return updates_.size();
  }

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

  std::optional<std::string> Save(KeyRef key) const {
    MutexLock lock(mutex_);
    const auto found = updates_.find(ToString(key));
    if (found == updates_.end()) return std::nullopt;
    return std::to_string(found->second);
  }
  void Load(KeyRef key, std::string_view state) {
    MutexLock lock(mutex_);
    updates_[ToString(key)] = std::stod(std::string(state));
  }
  void Forget(KeyRef key) {
    MutexLock lock(mutex_);
    updates_.erase(ToString(key));
  }

  std::atomic<int> made_{0};
  mutable Mutex mutex_;
  std::map<std::string, double> updates_ GUARDED_BY(mutex_);
};

std::string MessageOrNone(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "none";
}

// Comes to servers when they have ended.
class LateToServers final : public ForwardingTransport {
 public:
  using ForwardingTransport::ForwardingTransport;

  void Connect(NodeId peer, const std::string& address,
               std::chrono::steady_clock::time_point deadline,
               const std::function<bool()>& given_up) override {
    if (peer.role != Role::kServer) {
      return ForwardingTransport::Connect(peer, address, deadline, given_up);
    }
    // Long enough for the job to end, of which nothing tells this side. If it were not, the test
    // would pass without its case.
    std::this_thread::sleep_for(std::chrono::seconds(1));
    throw NetworkError("it refused: this node is closing");
  }
};

TEST(ServerProgram, AJobMayEndBeforeItsServersHaveMet) {
  int made = 0;
  Job job({.network = Network::kTcp,
           .num_servers = 2,
           .wrap = [&made](std::unique_ptr<Transport> transport) -> std::unique_ptr<Transport> {
             const bool is_of_second_server =
                 ++made == 3;  // behind the scheduler's and the first's
             if (!is_of_second_server) return transport;
             return std::make_unique<LateToServers>(std::move(transport));
           }});
  job.RunWorkers("dist_sync", [](int, KVStore& store, Engine& engine) {
    store.Init("w", NDArray::Full({3}, 1, DType::kFloat32, Cpu(), engine));
  });
}

// It has the lock of the server's machines meanwhile.
TEST(ServerProgram, AServerWhoseProgramTakesItsTimeIsAlive) {
  const auto optimizers = [](std::string_view) -> ServerUpdater {
    std::this_thread::sleep_for(std::chrono::seconds(4));
    return {.update = [](const ServerUpdate& update) {
      std::copy_n(update.gradient.data<float>(), 3, update.weight.data<float>());
    }};
  };
  Job job({.network = Network::kTcp,
           .heartbeat_interval = std::chrono::milliseconds(100),
           .dead_after = 20,
           .program = {.optimizers = optimizers}});
  job.RunWorkers("dist_sync", [](int, KVStore& store, Engine& engine) {
    store.SetOptimizer(MakeForeignOptimizer("slow", {}));
    store.Init("w", NDArray::Full({3}, 1, DType::kFloat32, Cpu(), engine));
    const NDArray value = NDArray::Full({3}, 2, DType::kFloat32, Cpu(), engine);
    store.PushPull("w", value, value);
    EXPECT_EQ(value.ToVector<float>(), std::vector<float>(3, 2));
  });
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

// Forgetting a key waits for the update of another one; the server waits for neither.
TEST(ServerProgram, AKeyIsForgottenBehindTheUpdatesUnderWay) {
  Mutex mutex;
  std::latch updating(1), may_end(1);
  std::atomic<int> forgotten = 0;
  const ServerUpdater updater{.update =
                                  [&](const ServerUpdate& update) {
                                    const MutexLock lock(mutex);
                                    if (!updating.try_wait()) updating.count_down();
                                    may_end.wait();
                                    for (int i = 0; i < 3; ++i) {
                                      update.weight.data<float>()[i] +=
                                          update.gradient.data<const float>()[i];
                                    }
                                  },
                              .forget =
                                  [&](KeyRef) {
                                    const MutexLock lock(mutex);
                                    ++forgotten;
                                    throw 1;  // changes nothing else
                                  }};
  {
    Job job({.program = {.optimizers = [&](std::string_view) { return updater; }}});
    job.RunWorkers("dist_sync", [&](int, KVStore& store, Engine& engine) {
      const NDArray ones = NDArray::Ones({3}, DType::kFloat32, Cpu(), engine);
      store.SetOptimizer(MakeForeignOptimizer("slow", {}));
      store.Init({"a", "b"}, {ones, ones});
      store.Push("a", ones);
      updating.wait();
      store.Reset("b", ones);
      const NDArray out = NDArray::Zeros({3}, DType::kFloat32, Cpu(), engine);
      store.Pull("b", out);
      EXPECT_EQ(out.ToVector<float>(), std::vector<float>(3, 1));
      may_end.count_down();
      store.Push("a", ones);
      store.Pull("a", out);
      EXPECT_EQ(out.ToVector<float>(), std::vector<float>(3, 3));
    });
  }
  EXPECT_EQ(forgotten, 3) << "b when it is reset, and both as nobody has the store any more";
}

TEST(ServerProgram, StatesOfItsOptimizersAreSavedAndLoadedByAnotherNumberOfServers) {
  const std::vector<std::string> keys = {"a", "large", "b", "never pushed", "c"};
  const auto size_of = [](const std::string& key) { return key == "large" ? 50'000 : 3; };
  const auto train = [&](KVStore& store, Engine& engine, int from, int to) {
    for (int step = from; step < to; ++step) {
      for (const std::string& key : keys) {
        if (key == "never pushed" || (key == "b" && step == 0)) continue;
        store.Push(key, NDArray::Full({size_of(key)}, step + store.rank() * 0.3, DType::kFloat32,
                                      Cpu(), engine));
      }
    }
  };
  using Values = std::vector<std::vector<float>>;
  const auto values_of = [&](KVStore& store, Engine& engine) {
    Values values;
    for (const std::string& key : keys) {
      const NDArray out = NDArray::Zeros({size_of(key)}, DType::kFloat32, Cpu(), engine);
      store.Pull(key, out);
      values.push_back(out.ToVector<float>());
    }
    return values;
  };
  const tools::TempFolder folder;
  const std::string file = folder / "states.safetensors";
  Values saved;
  Values expected;
  Growing growing;
  {
    Job job({.num_workers = 2, .num_servers = 2, .program = {.optimizers = growing.optimizers()}});
    job.RunWorkers("dist_sync", [&](int rank, KVStore& store, Engine& engine) {
      store.SetOptimizer(MakeForeignOptimizer("growing", {{"learning_rate", 0.1}, {"scale", 1.5}}));
      for (const std::string& key : keys) {
        store.Init(key, NDArray::Ones({size_of(key)}, DType::kFloat32, Cpu(), engine));
      }
      train(store, engine, 0, 3);
      store.Barrier();
      if (rank == 0) {
        saved = values_of(store, engine);
        store.SaveOptimizerStates(file, /*with_optimizer=*/true);
      }
      store.Barrier();
      train(store, engine, 3, 6);
      if (rank == 0) expected = values_of(store, engine);
    });
  }
  for (const int num_servers : {1, 3}) {
    Growing another;
    Job job({.num_workers = 2,
             .num_servers = num_servers,
             .program = {.optimizers = another.optimizers()}});
    job.RunWorkers("dist_sync", [&](int rank, KVStore& store, Engine& engine) {
      const OptimizerPtr optimizer =
          MakeForeignOptimizer("growing", {{"learning_rate", 9}, {"scale", 9}});
      store.SetOptimizer(optimizer);
      for (std::size_t i = 0; i < keys.size(); ++i) {
        store.Init(keys[i], NDArray::FromVector(saved[i], {size_of(keys[i])}, DType::kFloat32,
                                                Cpu(), engine));
      }
      store.Barrier();
      if (rank == 0) {
        store.LoadOptimizerStates(file);
        EXPECT_EQ(another.num_kept(), 4U) << "a state a key that was pushed";
      } else {
        optimizer->Set("learning_rate", 0.1);
        optimizer->Set("scale", 1.5);
      }
      store.Barrier();
      EXPECT_EQ(optimizer->Get("scale"), 1.5);
      train(store, engine, 3, 6);
      EXPECT_EQ(values_of(store, engine), expected) << num_servers << " servers";
    });
  }
}

TEST(ServerProgram, StatesAreRefusedForKeysThatAreCut) {
  const tools::TempFolder folder;
  const std::string file = folder / "states.safetensors";
  for (const bool cut : {false, true}) {
    Growing growing;
    Job job({.num_servers = 2, .program = {.optimizers = growing.optimizers()}});
    job.RunWorkers("dist_sync", [&](int, KVStore& store, Engine& engine) {
      const NDArray value = NDArray::Ones({50'000}, DType::kFloat32, Cpu(), engine);
      const auto set_optimizer = [&] { store.SetOptimizer(MakeForeignOptimizer("growing", {})); };
      if (!cut) set_optimizer();
      store.Init("large", value);
      if (cut) {
        set_optimizer();
        const std::string error = MessageOrNone([&] { store.LoadOptimizerStates(file); });
        EXPECT_NE(error.find("key 'large'"), std::string::npos) << error;
        EXPECT_NE(error.find("expected a key that is not cut"), std::string::npos) << error;
        EXPECT_EQ(growing.num_kept(), 0U);
      } else {
        store.Push("large", value);
        store.SaveOptimizerStates(file, /*with_optimizer=*/false);
      }
    });
  }
}

TEST(ServerProgram, StatesThatAServerKeepsToItselfAreRefused) {
  const ServerOptimizers optimizers = [](std::string_view) -> ServerUpdater {
    return {.update = [](const ServerUpdate&) {}};
  };
  Job job({.program = {.optimizers = optimizers}});
  job.RunWorkers("dist_sync", [&](int, KVStore& store, Engine& engine) {
    const NDArray value = NDArray::Ones({3}, DType::kFloat32, Cpu(), engine);
    store.SetOptimizer(MakeForeignOptimizer("closed", {}));
    store.Init("w", value);
    store.Push("w", value);
    const tools::TempFolder folder;
    const std::string file = folder / "states.safetensors";
    const std::string error =
        MessageOrNone([&] { store.SaveOptimizerStates(file, /*with_optimizer=*/false); });
    EXPECT_NE(error.find("got closed"), std::string::npos) << error;
    EXPECT_FALSE(std::filesystem::exists(file));
  });
}

TEST(ServerProgram, AFileReplacesAllStatesOfItsOptimizers) {
  const tools::TempFolder folder;
  const std::string file = folder / "states.safetensors";
  Growing growing;
  Job job({.num_servers = 2, .program = {.optimizers = growing.optimizers()}});
  job.RunWorkers("dist_sync", [&](int, KVStore& store, Engine& engine) {
    const NDArray one = NDArray::Ones({3}, DType::kFloat32, Cpu(), engine);
    store.SetOptimizer(MakeForeignOptimizer("growing", {{"learning_rate", 1}, {"scale", 1}}));
    for (const char* const key : {"a", "b"}) store.Init(key, one);
    store.Push("a", one);
    store.SaveOptimizerStates(file);
    store.Push("b", one);
    store.LoadOptimizerStates(file);
    EXPECT_EQ(growing.num_kept(), 1U) << "the file has none of b";
    for (const char* const key : {"a", "b"}) {
      store.Push(key, one);
      const NDArray out = NDArray::Zeros({3}, DType::kFloat32, Cpu(), engine);
      store.Pull(key, out);
      EXPECT_EQ(out.ToVector<float>()[0], key == std::string("a") ? 1 - (1 + 2) : 1 - (1 + 1));
    }
  });
}

TEST(ServerProgram, ItsOptimizersForgetKeysThatAreResetOrRemoved) {
  Growing growing;
  Job job({.program = {.optimizers = growing.optimizers()}});
  job.RunWorkers("dist_sync", [&](int, KVStore& store, Engine& engine) {
    const NDArray one = NDArray::Ones({3}, DType::kFloat32, Cpu(), engine);
    store.SetOptimizer(MakeForeignOptimizer("growing", {{"learning_rate", 1}, {"scale", 1}}));
    const auto push_twice = [&](const NDArray& gradient) {
      for (int i = 0; i < 2; ++i) store.Push("w", gradient);
      const NDArray out = NDArray::Zeros({gradient.shape()[0]}, DType::kFloat32, Cpu(), engine);
      store.Pull("w", out);
      return out.ToVector<float>()[0];
    };
    store.Init("w", one);
    EXPECT_EQ(push_twice(one), 1 - (1 + 2));
    store.Reset("w", one);
    EXPECT_EQ(push_twice(one), 1 - (1 + 2));
    store.Remove("w");
    const NDArray longer = NDArray::Ones({5}, DType::kFloat32, Cpu(), engine);
    store.Init("w", longer);
    EXPECT_EQ(push_twice(longer), 1 - (1 + 2));
  });
}

// Worker 0 begins a new life of the key while worker 1 is still in the one before. The optimizer
// knows the name alone.
TEST(ServerProgram, ItsOptimizersForgetWhenANewLifeOfAKeyBeginsAndNotWhenTheOldOneEnds) {
  Growing growing;
  Job job({.num_workers = 2, .program = {.optimizers = growing.optimizers()}});
  job.RunWorkers("dist_async", [&](int rank, KVStore& store, Engine& engine) {
    const NDArray one = NDArray::Ones({3}, DType::kFloat32, Cpu(), engine);
    const auto value_after_push = [&] {
      store.Push("w", one);
      const NDArray out = NDArray::Zeros({3}, DType::kFloat32, Cpu(), engine);
      store.Pull("w", out);
      return out.ToVector<float>()[0];
    };
    store.SetOptimizer(MakeForeignOptimizer("growing", {{"learning_rate", 1}, {"scale", 1}}));
    store.Init("w", one);
    if (rank == 0) {
      EXPECT_EQ(value_after_push(), 1 - 1);
      store.Remove("w");
      store.Init("w", one);
      EXPECT_EQ(value_after_push(), 1 - 1) << "of the life before";
    }
    store.Barrier();
    if (rank == 1) {
      store.Remove("w");
      EXPECT_EQ(store.Keys(), std::vector<Key>{"w"});  // when it has come to the server
    }
    store.Barrier();
    if (rank == 0) {
      EXPECT_EQ(value_after_push(), 1 - 1 - 2) << "forgotten";
    }
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
    const std::string error = MessageOrNone([&] { out.WaitToRead(); });
    EXPECT_NE(error.find("scale below 0"), std::string::npos) << error;
    MessageOrNone([&] { engine.WaitForAll(); });
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
          MessageOrNone([&] { store.SetOptimizer(MakeForeignOptimizer("shrinking", {})); });
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
  const std::string error = MessageOrNone([&] {
    local->Push("w", value);
    local->Pull("w", value);
    value.WaitToRead();
  });
  EXPECT_NE(error.find("expected a server that has it"), std::string::npos) << error;
  MessageOrNone([] { Engine::Default().WaitForAll(); });
}

// Rank 1 is ahead: rank 0's change is of the optimizer before.
TEST(ServerProgram, ParametersOfAnEarlierOptimizerChangeNothingOfTheNextOne) {
  std::atomic<int> made{0};
  const ServerOptimizers optimizers = [&](std::string_view) -> ServerUpdater {
    ++made;
    return {.update = [](const ServerUpdate&) { ADD_FAILURE() << "the push is of the other one"; }};
  };
  Job job({.num_workers = 2, .program = {.optimizers = optimizers}});
  job.RunWorkers("dist_async", [&](int rank, KVStore& store, Engine& engine) {
    const OptimizerPtr sgd = MakeOptimizer("sgd", {{"learning_rate", 1}});
    const NDArray ones = NDArray::Ones({3}, DType::kFloat32, Cpu(), engine);
    const auto set_next = [&] { store.SetOptimizer(MakeForeignOptimizer("own", {})); };
    store.Init("w", ones);
    store.SetOptimizer(sgd);
    store.Barrier();
    if (rank == 1) set_next();
    store.Barrier();
    if (rank == 0) {
      sgd->Set("rescale_grad", 0.25);
      store.Push("w", ones);
      const NDArray out({3}, DType::kFloat32, Cpu(), engine);
      store.Pull("w", out);
      EXPECT_EQ(out.ToVector<float>(), std::vector<float>(3, 0.75F));
      set_next();
    }
    store.Barrier();
    set_next();  // once more, which is the one that is there
  });
  EXPECT_EQ(made, 1);
}

// Of the servers, which are asked in turn, the first takes it.
TEST(ServerProgram, AnOptimizerThatALaterServerRefusesMakesRoomForAnother) {
  constexpr std::int64_t kCount = 50'000;  // over all servers
  const auto sgd = [](double momentum) {
    return MakeOptimizer("sgd", {{"learning_rate", 1}, {"momentum", momentum}});
  };
  // Begins with an optimizer, perhaps, whose states must come through.
  const auto train = [&](KVStore& store, Engine& engine, OptimizerPtr before,
                         const std::function<void()>& refused) {
    const NDArray ones = NDArray::Ones({kCount}, DType::kFloat32, Cpu(), engine);
    const NDArray out({kCount}, DType::kFloat32, Cpu(), engine);
    std::vector<float> pulled;
    const auto push = [&] {
      store.Push("w", ones);
      store.Pull("w", out);
      pulled.push_back(out.ToVector<float>().back());
      EXPECT_EQ(out.ToVector<float>(), std::vector<float>(kCount, pulled.back()));
    };
    store.Init("w", ones);
    if (before != nullptr) {
      store.SetOptimizer(before);
      push();
    }
    refused();
    if (before != nullptr) {
      push();
      refused();
    }
    store.SetOptimizer(sgd(0.5));
    for (int i = 0; i < 3; ++i) push();
    return pulled;
  };
  for (const std::string type : {"dist_sync", "dist_async"}) {
    for (const std::optional<double> before :
         {std::optional<double>(), std::optional(0.25), std::optional(0.5)}) {
      const auto first = [&] { return before ? sgd(*before) : OptimizerPtr(); };
      std::atomic<int> asked{0};
      const ServerOptimizers optimizers = [&](std::string_view) -> ServerUpdater {
        if (++asked % 3 == 2) throw InvalidArgument("there is none here");
        return {.update = [](const ServerUpdate&) { ADD_FAILURE() << "it was refused"; }};
      };
      std::vector<std::vector<float>> pulled;
      for (const bool refuses : {false, true}) {
        Job job({.num_servers = 3, .program = {.optimizers = optimizers}});
        job.RunWorkers(type, [&](int, KVStore& store, Engine& engine) {
          pulled.push_back(train(store, engine, first(), [&] {
            if (!refuses) return;
            const std::string error =
                MessageOrNone([&] { store.SetOptimizer(MakeForeignOptimizer("some", {})); });
            EXPECT_NE(error.find("there is none here"), std::string::npos) << error;
          }));
        });
      }
      ASSERT_EQ(pulled.size(), 2U);
      EXPECT_EQ(pulled[1], pulled[0]) << type;
    }
  }
}

TEST(ServerProgram, AServerRecordsATraceWhenAWorkerAsks) {
  const tools::TempFolder folder;
  const std::string file = folder / "run.trace";
  Job job({});
  job.RunWorkers("dist_sync", [&](int, KVStore& store, Engine& engine) {
    const NDArray value = NDArray::Ones({3}, DType::kFloat32, Cpu(), engine);
    store.Init("w", value);
    const auto records = [&](int pushes) {
      TraceServers(store, file);
      EXPECT_NE(MessageOrNone([&] { TraceServers(store, file); }).find("running"),
                std::string::npos);
      for (int i = 0; i < pushes; ++i) {
        store.Push("w", value);
        store.Pull("w", value);
        value.WaitToRead();
      }
      TraceServers(store, "");
      return std::filesystem::file_size(file);
    };
    const auto few = records(1);
    EXPECT_GT(few, 0U);
    EXPECT_GT(records(2000),
              few + 2000 * 3 * 32);  // a merge, an update and a read each, and messages
  });
}

}  // namespace
}  // namespace heddle::kvstore::dist
