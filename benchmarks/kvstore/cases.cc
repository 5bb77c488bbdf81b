// What benchmarks/python/store.py measures, from C++, and what the machine allows, in a library for
// that very process: so both run in turn, on memory that is laid out alike. Push, then pull, until
// all outputs can be read, of the stores `local` and `device`, with and without SGD.
//
// The limit: loops that move the bytes that must move, on as many threads as the engine has
// workers, over arrays of their own; with ordinary or with streaming stores. A push reads an array
// a device and writes the stored value, with SGD it reads that too; a pull reads the value and
// writes an array a device.
#include <heddle/engine.h>
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>
#include <heddle/optimizer.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/support/roofline.h"
#include "benchmarks/support/team.h"

namespace heddle::bench {
namespace {

using Clock = std::chrono::steady_clock;

// Until threads that have just been made run on CPUs of their own, and the engine's workers sleep.
constexpr double kTeamStartsUs = 3000;

double MicrosecondsSince(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

struct Case {
  std::string store;
  int devices;
  std::size_t bytes;
  bool sgd;
};

class Ours {
 public:
  explicit Ours(const Case& one) : store_(KVStore::Create(one.store, engine_)) {
    const Shape shape{static_cast<std::int64_t>(one.bytes / sizeof(float))};
    store_->Init(3, NDArray::Zeros(shape, DType::kFloat32, Cpu(), engine_));
    if (one.sgd) store_->SetOptimizer(Sgd({.learning_rate = 0.1}));
    for (int device = 0; device < one.devices; ++device) {
      gradients_.push_back(NDArray::Ones(shape, DType::kFloat32, Cpu(device), engine_));
      outs_.push_back(NDArray::Zeros(shape, DType::kFloat32, Cpu(device), engine_));
    }
    engine_.WaitForAll();
  }

  int workers() const { return engine_.options().num_workers; }

  double Run() {
    const Clock::time_point start = Clock::now();
    store_->Push(3, gradients_);
    store_->Pull(3, outs_);
    for (const NDArray& out : outs_) out.WaitToRead();
    return MicrosecondsSince(start);
  }

 private:
  Engine& engine_ = Engine::Default();  // one for all cases, as Python's: it learns from their ops
  std::unique_ptr<KVStore> store_;
  std::vector<NDArray> gradients_;
  std::vector<NDArray> outs_;
};

// The same bytes.
class Loops {
 public:
  explicit Loops(const Case& one) {
    const auto devices = static_cast<std::size_t>(one.devices);
    for (std::size_t array = 0; array < 2 * devices + 1; ++array) memory_.emplace_back(one.bytes);
    const auto stream = [&](std::size_t array, Stream::Use use) {
      return Stream{memory_[array].data(), one.bytes, use};
    };
    push_.push_back(stream(2 * devices, one.sgd ? Stream::Use::kUpdate : Stream::Use::kWrite));
    pull_.push_back(stream(2 * devices, Stream::Use::kRead));
    for (std::size_t device = 0; device < devices; ++device) {
      push_.push_back(stream(device, Stream::Use::kRead));
      pull_.push_back(stream(devices + device, Stream::Use::kWrite));
    }
  }

  double Run(Team& team, StoreKind stores) const {
    const Clock::time_point start = Clock::now();
    for (const std::vector<Stream>* streams : {&push_, &pull_}) {
      team.Run([&](int index) {
        MoveBytes(*streams, stores, static_cast<std::size_t>(index),
                  static_cast<std::size_t>(team.size()));
      });
    }
    return MicrosecondsSince(start);
  }

 private:
  std::vector<Memory> memory_;
  std::vector<Stream> push_;
  std::vector<Stream> pull_;
};

enum class Contender : int { kStore = 0, kOrdinaryStores = 1, kStreamingStores = 2 };

struct Contenders {
  explicit Contenders(const Case& one) : ours(one), loops(one) {}

  void Run(Contender which, int count, double* microseconds) {
    if (which == Contender::kStore) {
      for (int i = 0; i < count; ++i) microseconds[i] = ours.Run();
      return;
    }
    const StoreKind stores =
        which == Contender::kOrdinaryStores ? StoreKind::kCached : StoreKind::kStreaming;
    Team team(ours.workers());
    const Clock::time_point made = Clock::now();
    while (MicrosecondsSince(made) < kTeamStartsUs) team.Run([](int) {});
    for (int i = 0; i < count; ++i) microseconds[i] = loops.Run(team, stores);
  }

  Ours ours;
  const Loops loops;
};

// No exception reaches Python's ctypes.
template <class F>
int Guarded(const F& f) {
  try {
    f();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "heddle_cases: %s\n", error.what());
    return 1;
  }
}

}  // namespace
}  // namespace heddle::bench

extern "C" {

// All return 0, or 1 after they have said why.
int heddle_case_new(const char* store, int devices, std::size_t bytes, int sgd, void** made) {
  return heddle::bench::Guarded([&] {
    *made = new heddle::bench::Contenders(
        {.store = store, .devices = devices, .bytes = bytes, .sgd = sgd != 0});
  });
}

// Runs a contender so often: 0 the store, 1 and 2 the limit with ordinary and streaming stores.
int heddle_case_run(void* one, int which, int count, double* microseconds) {
  return heddle::bench::Guarded([&] {
    static_cast<heddle::bench::Contenders*>(one)->Run(static_cast<heddle::bench::Contender>(which),
                                                      count, microseconds);
  });
}

void heddle_case_free(void* one) { delete static_cast<heddle::bench::Contenders*>(one); }

}  // extern "C"
