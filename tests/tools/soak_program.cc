// A worker that uses all that a dist store does, for so long:
//
//   soak_program SECONDS ROUNDS
//
// and for so many rounds at least, of which it says each tenth.
// Dense and row-sparse values, lists, small keys, float16, compression, optimizers, dist_async and
// barriers; what can be known of the values is checked.
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using heddle::DType;
using heddle::KVStore;
using heddle::NDArray;
using heddle::RowSparseNDArray;
using heddle::Shape;

constexpr std::int64_t kLarge = 300'000;  // cut over the servers
constexpr std::int64_t kMiddle = 50'000;
constexpr std::int64_t kSmall = 64;
constexpr int kSmallKeys = 100;
constexpr std::int64_t kRows = 5000;
constexpr std::int64_t kRowsOfPush = 200;

NDArray Filled(std::int64_t size, float value, DType dtype = DType::kFloat32) {
  return NDArray::Full({size}, value, dtype);
}

void Expect(const NDArray& got, float expected) {
  for (const float value : got.ToVector<float>()) {
    if (value != expected) {
      throw std::logic_error("expected " + std::to_string(expected) + ", got " +
                             std::to_string(value));
    }
  }
}

class Soak {
 public:
  Soak()
      : plain_(KVStore::Create("dist_sync")),
        trained_(KVStore::Create("dist_device_sync")),
        compressed_(KVStore::Create("dist_sync")),
        async_(KVStore::Create("dist_async")),
        random_(static_cast<unsigned>(plain_->rank())) {
    plain_->Init("large", Filled(kLarge, 0));
    plain_->Init("go on", Filled(1, 0));
    for (int i = 0; i < kSmallKeys; ++i) plain_->Init(Small(i), Filled(kSmall, 0));
    trained_->SetOptimizer(
        heddle::MakeOptimizer("adam", {{"learning_rate", 0.001}, {"multi_precision", 1}}));
    trained_->Init("dense", Filled(kMiddle, 1));
    trained_->Init("half", Filled(kMiddle, 1, DType::kFloat16));
    trained_->Init("rows", SomeRows());
    compressed_->SetGradientCompression({.type = "2bit", .threshold = 0.5});
    compressed_->Init("w", Filled(kMiddle, 0));
    async_->SetOptimizer(heddle::Sgd({.learning_rate = 0.001, .momentum = 0.9}));
    async_->Init("w", Filled(kLarge, 0));
  }

  // More at once than any round: how many arrays and messages of a size there are at a time depends
  // on which process is late, and the pools of all keep the most that there ever were.
  void Burst() {
    constexpr int kRounds = 3;
    std::vector<NDArray> outs;
    for (int i = 0; i < kRounds; ++i) {
      plain_->Push("large", {Filled(kLarge, 1), Filled(kLarge, 1)});
      trained_->Push("dense", Filled(kMiddle, 0.5));
      trained_->Push("half", Filled(kMiddle, 0.5, DType::kFloat16));
      trained_->Push("rows", SomeRows());
      compressed_->Push("w", Filled(kMiddle, 0.25));
      async_->Push("w", Filled(kLarge, 1));
    }
    for (int i = 0; i < kRounds; ++i) {
      outs.push_back(Filled(kLarge, 0));
      plain_->Pull("large", outs.back());
      outs.push_back(Filled(kLarge, 0));
      async_->Pull("w", outs.back());
      outs.push_back(Filled(kMiddle, 0));
      trained_->Pull("dense", outs.back());
    }
    for (const NDArray& out : outs) out.WaitToRead();
  }

  // Returns whether rank 0 wants another round.
  bool Round(bool mine) {
    Plain();
    Train();
    Filled(kMiddle, 0.25).WaitToRead();
    compressed_->PushPull("w", Filled(kMiddle, 0.25), out_middle_);
    async_->Push("w", Filled(kLarge, 1));
    async_->Pull("w", out_large_);
    out_large_.WaitToRead();
    out_middle_.WaitToRead();
    if (++rounds_ % 10 == 0) plain_->Barrier();
    const NDArray sum = Filled(1, 0);
    plain_->PushPull("go on", Filled(1, mine && plain_->rank() == 0 ? 1 : 0), sum);
    return sum.ToVector<float>()[0] > 0;
  }
  long rounds() const { return rounds_; }

 private:
  static std::string Small(int i) { return "small " + std::to_string(i); }

  void Plain() {
    const int workers = plain_->num_workers(), rank = plain_->rank();
    const auto value = static_cast<float>(rounds_ % 1000 + rank);
    const auto sum = static_cast<float>(rounds_ % 1000 * workers + workers * (workers - 1) / 2);
    plain_->Push("large", {Filled(kLarge, value), Filled(kLarge, 1)});
    std::vector<heddle::Key> keys;
    std::vector<NDArray> values, outs;
    for (int i = 0; i < kSmallKeys; ++i) {
      keys.emplace_back(Small(i));
      values.push_back(Filled(kSmall, value));
      outs.push_back(Filled(kSmall, 0));
    }
    plain_->PushPull(keys, values, outs, /*priority=*/static_cast<int>(random_() % 7));
    const NDArray large = Filled(kLarge, 0);
    plain_->Pull("large", large);
    for (const NDArray& out : outs) Expect(out, sum);
    Expect(large, sum + static_cast<float>(workers));
  }

  void Train() {
    trained_->Push("dense", Filled(kMiddle, 0.5));
    trained_->Push("half", Filled(kMiddle, 0.5, DType::kFloat16));
    trained_->Push("rows", SomeRows());
    const NDArray dense = Filled(kMiddle, 0), half = Filled(kMiddle, 0, DType::kFloat16);
    trained_->Pull("dense", dense);
    trained_->Pull("half", half);
    RowSparseNDArray rows(Shape{kRows, 4});
    std::vector<std::int64_t> ids(kRowsOfPush);
    for (std::int64_t& id : ids) id = static_cast<std::int64_t>(random_() % kRows);
    trained_->RowSparsePull("rows", rows, NDArray::FromVector(ids, {kRowsOfPush}, DType::kInt64));
    rows.WaitToRead();
    dense.WaitToRead();
    half.WaitToRead();
  }

  RowSparseNDArray SomeRows() {
    std::set<std::int64_t> ids;
    while (std::ssize(ids) < kRowsOfPush) ids.insert(static_cast<std::int64_t>(random_() % kRows));
    return RowSparseNDArray::FromVectors<float>(
        {ids.begin(), ids.end()}, std::vector<float>(kRowsOfPush * 4, 0.5), Shape{kRows, 4});
  }

  std::unique_ptr<KVStore> plain_, trained_, compressed_, async_;
  std::mt19937 random_;
  NDArray out_middle_ = Filled(kMiddle, 0), out_large_ = Filled(kLarge, 0);
  long rounds_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: soak_program SECONDS ROUNDS\n");
    return 2;
  }
  try {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(std::atoi(argv[1]));
    Soak soak;
    soak.Burst();
    while (soak.Round(std::chrono::steady_clock::now() < until ||
                      soak.rounds() < std::atol(argv[2]))) {
      if (soak.rounds() % 10 == 0) {
        std::printf("%ld rounds\n", soak.rounds());
        std::fflush(stdout);
      }
    }
    std::printf("%ld rounds, end\n", soak.rounds());
  } catch (const std::exception& error) {
    std::printf("failed: %s\n", error.what());
    return 1;
  }
  return 0;
}
