// The updates of optimizers, 64 KiB to 64 MiB of weights: at least 85% of the slower of two limits,
// the bytes they must move and their arithmetic on data in the first-level cache. One thread.
// Optimizers that need norms take several passes, and SGLD draws random numbers: they are not here.
// The lines "and a copy of it" read the weight then, as a pull does: whether stores should go past
// the caches depends on that, and an update cannot know.
#include <heddle/dtype.h>
#include <heddle/optimizer.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "benchmarks/kernels/sections.h"
#include "benchmarks/support/roofline.h"
#include "kvstore/optimizer/update_plan.h"

namespace heddle::bench {
namespace {

// So many elements of a weight, a gradient and the states lie in L1 together.
constexpr std::size_t kInCache = 1024;
constexpr std::size_t kPlacesMatterTo = std::size_t{4} << 20;

struct UpdateKernel {
  const char* what;
  std::string_view optimizer;
  std::vector<std::pair<std::string_view, double>> parameters = {};
  bool and_copy = false;  // once more, with a copy of the weight
};

// Every optimizer of one pass over elements, with small steps, so that values stay ordinary numbers
// however often they are updated.
const std::vector<UpdateKernel>& Updates() {
  static const std::vector<UpdateKernel> updates = {
      {"SGD", "sgd", {{"learning_rate", 1e-6}}, /*and_copy=*/true},
      {"SGD with momentum", "sgd", {{"learning_rate", 1e-6}, {"momentum", 0.9}}},
      {"NAG", "nag", {{"learning_rate", 1e-6}, {"momentum", 0.9}}},
      {"Adam", "adam", {{"learning_rate", 1e-6}}, /*and_copy=*/true},
      {"AdamW", "adamw", {{"learning_rate", 1e-6}}},
      {"AdaBelief", "adabelief", {{"learning_rate", 1e-6}}},
      {"AdaGrad", "adagrad", {{"learning_rate", 1e-6}}},
      {"AdaDelta", "adadelta"},
      {"Adamax", "adamax", {{"learning_rate", 1e-6}}},
      {"Nadam", "nadam", {{"learning_rate", 1e-6}}},
      {"RMSProp", "rmsprop", {{"learning_rate", 1e-6}}},
      {"RMSProp, centered", "rmsprop", {{"learning_rate", 1e-6}, {"centered", 1}}},
      {"Ftrl", "ftrl", {{"learning_rate", 1e-3}}},
      {"FTML", "ftml", {{"learning_rate", 1e-3}}},
      {"Signum", "signum", {{"learning_rate", 1e-6}}},
      {"signSGD", "signum", {{"learning_rate", 1e-6}, {"momentum", 0}}, /*and_copy=*/true},
      {"DCASGD", "dcasgd", {{"learning_rate", 1e-6}, {"momentum", 0.9}}},
  };
  return updates;
}

// An update of arrays of its own.
class PlacedUpdate {
 public:
  // `bytes`: of the weight.
  PlacedUpdate(const OptimizerPtr& optimizer, bool master, std::size_t bytes)
      : rule_(optimizer->plan()->rule), bytes_(bytes) {
    const std::size_t weight_bytes = master ? sizeof(BFloat16) : sizeof(float);
    const std::size_t count = bytes / weight_bytes;
    const auto add = [&](std::size_t element_bytes, Stream::Use use) {
      memory_.emplace_back(count * element_bytes);
      streams_.push_back({memory_.back().data(), memory_.back().bytes(), use});
      return static_cast<void*>(memory_.back().data());
    };
    update_.learning_rate = optimizer->plan()->learning_rate;
    update_.step = 100;
    run_.update = &update_;
    run_.dtype = master ? DType::kBFloat16 : DType::kFloat32;
    run_.gradient = add(weight_bytes, Stream::Use::kRead);
    run_.weight = add(weight_bytes, master ? Stream::Use::kWrite : Stream::Use::kUpdate);
    if (master) run_.master = static_cast<float*>(add(sizeof(float), Stream::Use::kUpdate));
    for (std::size_t i = 0; i < rule_->num_states(); ++i) {
      run_.states[i] = add(sizeof(float), Stream::Use::kUpdate);
    }
    rule_->Begin(update_);
  }
  PlacedUpdate(const PlacedUpdate&) = delete;
  PlacedUpdate& operator=(const PlacedUpdate&) = delete;

  KernelCase::Place place() {
    return {.streams = streams_, .run = [this](std::size_t elements) {
              run_.count = elements;
              rule_->Update(run_);
            }};
  }
  KernelCase::Place place_and_copy() {
    copy_ = std::make_unique<Memory>(bytes_);
    KernelCase::Place with_copy = place();
    with_copy.then = [this] { std::memcpy(copy_->data(), run_.weight, bytes_); };
    return with_copy;
  }

 private:
  const std::shared_ptr<const internal::UpdateRule> rule_;
  const std::size_t bytes_;
  std::unique_ptr<Memory> copy_;
  std::vector<Memory> memory_;
  std::vector<Stream> streams_;
  internal::KeyUpdate update_ = {};
  internal::UpdateRun run_ = {};
};

// Of the update alone, or with a copy of the weight.
enum class Then { kNothing, kCopy };

// `bytes`: of the weight.
void MeasureUpdate(const UpdateKernel& kernel, bool master, std::size_t bytes, Then then,
                   int rounds, BarReport& report) {
  const OptimizerPtr optimizer = MakeOptimizer(kernel.optimizer, kernel.parameters);
  const bool copies = then == Then::kCopy;
  KernelCase measured{.what = fmt::format("{}, {}, {}{}", kernel.what,
                                          master ? "bfloat16 with master weights" : "float32",
                                          BytesText(bytes), copies ? " and a copy of it" : ""),
                      .count = bytes / (master ? sizeof(BFloat16) : sizeof(float)),
                      .then_moves = copies ? 2 * bytes : 0,
                      .places = {},
                      .arithmetic_count = kInCache};
  // Beyond the caches it does not matter where pages lie.
  const int places = bytes <= kPlacesMatterTo ? rounds : 1;
  std::vector<std::unique_ptr<PlacedUpdate>> updates;
  for (int i = 0; i < places; ++i) {
    updates.push_back(std::make_unique<PlacedUpdate>(optimizer, master, bytes));
    measured.places.push_back(copies ? updates.back()->place_and_copy() : updates.back()->place());
  }
  MeasureKernel(measured, rounds, report);
}

}  // namespace

void MeasureUpdates(BarReport& report, bool quick) {
  const std::vector<std::size_t> sizes_kib =
      quick ? std::vector<std::size_t>{64, 4096}
            : std::vector<std::size_t>{64, 256, 1024, 4096, 16384, 65536};
  for (const UpdateKernel& kernel : Updates()) {
    for (const bool master : {false, true}) {
      for (const std::size_t kib : sizes_kib) {
        MeasureUpdate(kernel, master, kib << 10, Then::kNothing, quick ? 1 : 5, report);
      }
    }
  }
  for (const UpdateKernel& kernel : Updates()) {
    if (!kernel.and_copy) continue;
    for (const std::size_t kib : sizes_kib) {
      MeasureUpdate(kernel, true, kib << 10, Then::kCopy, quick ? 1 : 5, report);
    }
  }
}

}  // namespace heddle::bench
