// What the store tests share: every store type on every engine, and ops that wait or fail on
// demand.
#pragma once

#include <heddle/engine.h>
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>
#include <heddle/optimizer.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <latch>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/sanitizers.h"
#include "tests/kvstore/gpu_optimizers.h"
#include "tests/message_of.h"

namespace heddle::kvstore_test {

struct StoreSetup {
  std::string store;
  std::string engine;
  int workers;
  std::string network = {};  // of a dist type: "sim", "tcp"
  // Makes simulated GPUs, on which the tests' arrays lie then. Null: on the CPUs.
  std::shared_ptr<internal::GpuDriver> (*gpus)() = nullptr;
  std::int64_t columns = 3;  // of the tests' arrays, which have two rows
};

inline std::string SetupName(const testing::TestParamInfo<StoreSetup>& info) {
  const StoreSetup& setup = info.param;
  return setup.store + setup.network + "_" + setup.engine + std::to_string(setup.workers) +
         (setup.gpus != nullptr ? "_gpus" : "") + (setup.columns > 3 ? "_large" : "");
}

// `store` on every engine. The others than threaded ones run ops in the thread that pushes, or
// waits: the thread sanitizer would see nothing there.
inline std::vector<StoreSetup> SetupsOf(const std::string& store) {
  std::vector<StoreSetup> setups = {{store, "threaded", 1}, {store, "threaded", 2}};
  if (!kThreadSanitizer) {
    setups.push_back({store, "serial", 1});
    setups.push_back({store, "seeded", 1});
  }
  return setups;
}

inline std::vector<StoreSetup> AllSetups() {
  std::vector<StoreSetup> setups = SetupsOf("local");
  for (StoreSetup& setup : SetupsOf("device")) setups.push_back(std::move(setup));
  return setups;
}

inline EngineOptions OptionsOf(const StoreSetup& setup) {
  EngineOptions options = EngineOptions::FromEnvironment();  // HEDDLE_CHECK_ACCESS
  options.type = setup.engine;
  options.num_workers = setup.workers;
  if (setup.gpus != nullptr) options.gpu_driver = setup.gpus();
  return options;
}

// Seed of a randomised test: HEDDLE_TEST_SEED, or a fresh one. Printed, so that a failure can be
// repeated.
inline std::uint64_t TestSeed() {
  const char* given = std::getenv("HEDDLE_TEST_SEED");
  const std::uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
  std::printf("HEDDLE_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

// An op over `reads` and `writes` that is unfinished until Release, without occupying a thread.
class Hold {
 public:
  Hold(Engine& engine, const VarList& reads, const VarList& writes) {
    engine.PushAsync({.name = "hold", .reads = reads, .writes = writes},
                     [state = state_](Completion done) {
                       std::unique_lock lock(state->mutex);
                       if (!state->released) {
                         state->done = std::move(done);
                         return;
                       }
                       lock.unlock();
                       state->Finish(done);
                     });
  }
  ~Hold() { Release(); }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  // With a message: the op fails with a std::runtime_error.
  void Release(const std::string& error = "") {
    std::unique_lock lock(state_->mutex);
    if (state_->released) return;
    state_->released = true;
    state_->error = error;
    std::optional<Completion> done = std::exchange(state_->done, std::nullopt);
    lock.unlock();
    if (done) state_->Finish(*done);
  }

 private:
  struct State {
    std::mutex mutex;
    bool released = false;
    std::string error;
    std::optional<Completion> done;

    void Finish(const Completion& completion) const {
      if (error.empty()) {
        completion();
      } else {
        completion(std::make_exception_ptr(std::runtime_error(error)));
      }
    }
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// Expects an InvalidArgument whose message has all of `parts`.
template <class F>
void ExpectInvalid(F&& call, const std::vector<std::string>& parts) {
  const std::string message = MessageOf<InvalidArgument>(std::forward<F>(call));
  for (const std::string& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
  }
}

// Runs `a` and `b` on two threads that begin together, up to `round` steps of a few nanoseconds
// apart.
template <class A, class B>
void RunTogether(int round, A&& a, B&& b) {
  std::atomic<int> there = 0;
  const auto run = [&there](int steps, auto& call) {
    ++there;
    while (there < 2) {
    }
    for (int i = 0; i < steps; ++i) there.load();
    call();
  };
  std::thread other([&] { run(round % 37 * 3, a); });
  run(round % 41 * 3, b);
  other.join();
}

class StoreTest : public testing::TestWithParam<StoreSetup> {
 protected:
  void SetUp() override { store = NewStore(); }

  virtual std::unique_ptr<KVStore> NewStore(const KVStoreOptions& options = {}) {
    return KVStore::Create(GetParam().store, engine, options);
  }

  // Where the arrays lie that a test has on `device`, a cpu(i): there, or on one of four GPUs.
  static Device On(Device device) {
    return GetParam().gpus != nullptr ? Gpu(device.id % 4) : device;
  }
  // How often to try: fewer times where each op of a GPU wakes several threads.
  static int Times(int often) { return GetParam().gpus != nullptr ? often / 6 : often; }
  // Values lie on GPUs, too.
  static bool MergesOnGpus() { return GetParam().gpus != nullptr && GetParam().store == "device"; }
  // Those that can update the values.
  static std::vector<std::string_view> Optimizers() {
    return MergesOnGpus() ? GpuOptimizerNames() : OptimizerNames();
  }
  NDArray Full(Scalar value, Device device = Cpu(), DType dtype = DType::kFloat32) {
    return NDArray::Full(shape, value, dtype, On(device), engine);
  }
  // One array on each of four devices.
  std::vector<NDArray> OnFour(Scalar value) {
    std::vector<NDArray> arrays;
    for (int i = 0; i < 4; ++i) arrays.push_back(Full(value, Cpu(i)));
    return arrays;
  }
  // An array whose only write has failed with `error`.
  NDArray Poisoned(const std::string& error) {
    NDArray array = Full(0);
    engine.Push({.name = "fail", .writes = {array.var()}},
                [error] { throw std::runtime_error(error); });
    return array;
  }
  template <KeyLike K>
  std::vector<float> Pulled(KVStore& from, const K& key) {
    NDArray out = Full(-1);
    from.Pull(key, out);
    return out.ToVector<float>();
  }
  std::vector<float> All(float value) const {
    return std::vector<float>(static_cast<std::size_t>(shape.size()), value);
  }

  const Shape shape{2, GetParam().columns};
  Engine engine{OptionsOf(GetParam())};
  std::unique_ptr<KVStore> store;
};

}  // namespace heddle::kvstore_test
