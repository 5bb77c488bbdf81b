// A worker of a job that something happens to:
//
//   fault_program TYPE CYCLES    0: for ever
//   fault_program TYPE FILE      until the file is there
//   fault_program TYPE busy SECONDS
//
// Each cycle initialises keys (the first few), pushes and pulls all of them, checks what it gets,
// and ends with a barrier. Says where it is, one word a line; and when a call fails, at what time
// of the monotonic clock, and the error. A busy one of rank 0 does one cycle, lets eight threads
// spin so long while its main thread sleeps, and does another one.
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

namespace {

using heddle::KVStore;
using heddle::NDArray;

constexpr std::int64_t kSizes[] = {7, 3000, 50'000};  // the last one in slices
constexpr int kCyclesWithNewKeys = 5;
constexpr int kCyclesToSettle = 3 * kCyclesWithNewKeys;  // no role needs more memory after them

void Say(const std::string& text) {
  std::puts(text.c_str());
  std::fflush(stdout);
}

void Check(const NDArray& got, float at_least, float at_most) {
  for (const float value : got.ToVector<float>()) {
    if (value >= at_least && value <= at_most) continue;
    throw std::logic_error(fmt::format("expected {} to {}, got {}", at_least, at_most, value));
  }
}

class Worker {
 public:
  explicit Worker(const std::string& type)
      : store_(KVStore::Create(type)), sync_(type.find("async") == std::string::npos) {
    if (!sync_) store_->SetOptimizer(heddle::Sgd({.learning_rate = 1}));
  }

  void Cycle(int cycle) {
    if (cycle < kCyclesWithNewKeys) {
      for (const std::int64_t size : kSizes) {
        const std::string key = fmt::format("{}.{}", cycle, size);
        store_->Init(key, NDArray::Zeros({size}));
        keys_.push_back({key, size, 0});
      }
    }
    const int rank = store_->rank(), workers = store_->num_workers();
    for (int round = 1; round <= 2; ++round) {
      const auto factor = static_cast<float>(cycle % 100 + round);
      std::vector<NDArray> out;
      for (Keyed& key : keys_) {
        ++key.pushes;
        out.push_back(NDArray::Zeros({key.size}));
        store_->Push(key.name, NDArray::Full({key.size},
                                             sync_ ? factor * static_cast<float>(rank + 1) : -1.0));
        store_->Pull(key.name, out.back());
      }
      for (std::size_t i = 0; i < keys_.size(); ++i) {
        const auto ranks = static_cast<float>(workers * (workers + 1) / 2);
        const auto pushes = static_cast<float>(keys_[i].pushes);
        // Of the others, some are up to a cycle ahead.
        if (sync_)
          Check(out[i], factor * ranks, factor * ranks);
        else
          Check(out[i], pushes, (pushes + 4) * static_cast<float>(workers));
      }
    }
    store_->Barrier();
  }
  // Whether rank 0 says so, the same for all.
  bool Agree(bool yes) {
    if (!agrees_) {
      store_->Init("agree", NDArray::Zeros({1}));
      agrees_ = true;
    }
    const bool mine = yes && store_->rank() == 0;
    const NDArray sum = NDArray::Zeros({1});
    store_->PushPull("agree", NDArray::Full({1}, mine ? 1 : 0), sum);
    return sum.ToVector<float>()[0] > 0;
  }
  int rank() const { return store_->rank(); }
  void Leave() { store_.reset(); }

 private:
  struct Keyed {
    std::string name;
    std::int64_t size;
    int pushes;
  };

  std::unique_ptr<KVStore> store_;
  const bool sync_;
  bool agrees_ = false;
  std::vector<Keyed> keys_;
};

void Spin(std::chrono::seconds time) {
  const auto until = std::chrono::steady_clock::now() + time;
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([until] {
      while (std::chrono::steady_clock::now() < until) {
      }
    });
  }
  std::this_thread::sleep_until(until);
  for (std::thread& thread : threads) thread.join();
}

void Work(Worker& worker, const std::string& how, std::chrono::seconds busy) {
  if (how == "busy") {
    worker.Cycle(0);
    if (worker.rank() == 0) Spin(busy);
    worker.Cycle(1);
    return;
  }
  const bool by_file = how.find('/') != std::string::npos;
  const int cycles = by_file ? 0 : std::atoi(how.c_str());
  for (int cycle = 0; cycles == 0 || cycle < cycles; ++cycle) {
    worker.Cycle(cycle);
    if (cycle == kCyclesToSettle) Say("settled");
    if (by_file && worker.Agree(std::filesystem::exists(how))) return;
  }
}

void Run(const std::string& type, const std::string& how, std::chrono::seconds busy) {
  std::optional<Worker> worker;
  try {
    worker.emplace(type);
    Say("joined");
    Work(*worker, how, busy);
    Say("leaving");
    worker->Leave();
    Say("left");
  } catch (const std::exception& error) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    Say(fmt::format("failed at {}: {}", std::chrono::nanoseconds(now).count(), error.what()));
    throw;  // the store goes because of an exception
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: fault_program TYPE CYCLES|FILE|busy [SECONDS]\n");
    return 2;
  }
  try {
    Say("starting");
    Run(argv[1], argv[2], std::chrono::seconds(argc > 3 ? std::atoi(argv[3]) : 0));
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}
