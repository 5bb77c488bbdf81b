// The updates of optimizers, 64 KiB to 64 MiB of weights: at least 85% of the slower of two limits,
// the bytes they must move and their arithmetic on data in the first-level cache. One thread.
// Optimizers that need norms take several passes, and SGLD draws random numbers: they are not here.
#include <heddle/dtype.h>
#include <heddle/optimizer.h>

#include <cstddef>
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

struct UpdateKernel {
  const char* what;
  std::string_view optimizer;
  std::vector<std::pair<std::string_view, double>> parameters = {};
};

// Every optimizer of one pass over elements, with small steps, so that values stay ordinary numbers
// however often they are updated.
const std::vector<UpdateKernel>& Updates() {
  static const std::vector<UpdateKernel> updates = {
      {"SGD", "sgd", {{"learning_rate", 1e-6}}},
      {"SGD with momentum", "sgd", {{"learning_rate", 1e-6}, {"momentum", 0.9}}},
      {"NAG", "nag", {{"learning_rate", 1e-6}, {"momentum", 0.9}}},
      {"Adam", "adam", {{"learning_rate", 1e-6}}},
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
      {"signSGD", "signum", {{"learning_rate", 1e-6}, {"momentum", 0}}},
      {"DCASGD", "dcasgd", {{"learning_rate", 1e-6}, {"momentum", 0.9}}},
  };
  return updates;
}

// `bytes`: of the weight.
void MeasureUpdate(const UpdateKernel& kernel, bool master, std::size_t bytes, int rounds,
                   BarReport& report) {
  const OptimizerPtr optimizer = MakeOptimizer(kernel.optimizer, kernel.parameters);
  const auto rule = optimizer->plan()->rule;
  const std::size_t weight_bytes = master ? sizeof(BFloat16) : sizeof(float);
  const std::size_t count = bytes / weight_bytes;
  std::vector<Memory> memory;
  std::vector<Stream> streams;
  const auto add = [&](std::size_t element_bytes, Stream::Use use) {
    memory.emplace_back(count * element_bytes);
    streams.push_back({memory.back().data(), memory.back().bytes(), use});
    return static_cast<void*>(memory.back().data());
  };
  internal::KeyUpdate update = {};
  update.learning_rate = optimizer->plan()->learning_rate;
  update.step = 100;
  internal::UpdateRun run = {};
  run.update = &update;
  run.dtype = master ? DType::kBFloat16 : DType::kFloat32;
  run.gradient = add(weight_bytes, Stream::Use::kRead);
  run.weight = add(weight_bytes, master ? Stream::Use::kWrite : Stream::Use::kUpdate);
  if (master) run.master = static_cast<float*>(add(sizeof(float), Stream::Use::kUpdate));
  for (std::size_t i = 0; i < rule->num_states(); ++i) {
    run.states[i] = add(sizeof(float), Stream::Use::kUpdate);
  }
  rule->Begin(update);
  MeasureKernel(
      {.what = fmt::format("{}, {}, {}", kernel.what,
                           master ? "bfloat16 with master weights" : "float32", BytesText(bytes)),
       .count = count,
       .streams = streams,
       .run =
           [&](std::size_t elements) {
             run.count = elements;
             rule->Update(run);
           },
       .arithmetic_count = kInCache},
      rounds, report);
}

}  // namespace

void MeasureUpdates(BarReport& report, bool quick) {
  const std::vector<std::size_t> sizes_kib =
      quick ? std::vector<std::size_t>{64, 4096}
            : std::vector<std::size_t>{64, 256, 1024, 4096, 16384, 65536};
  for (const UpdateKernel& kernel : Updates()) {
    for (const bool master : {false, true}) {
      for (const std::size_t kib : sizes_kib) {
        MeasureUpdate(kernel, master, kib << 10, quick ? 1 : 5, report);
      }
    }
  }
}

}  // namespace heddle::bench
