// The updates of optimizers, 64 KiB to 64 MiB of weights: at least 85% of the slower of two limits,
// the bytes they must move and their arithmetic on data in the first-level cache. One thread.
#include <heddle/dtype.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "benchmarks/kernels/sections.h"
#include "benchmarks/support/roofline.h"
#include "ops/adam.h"
#include "ops/sgd.h"

namespace heddle::bench {
namespace {

constexpr std::size_t kStatesMax = 4;
// So many elements of a weight, a gradient and the states lie in L1 together.
constexpr std::size_t kInCache = 1024;

// The arrays of an update: gradient, weight, master (with multi-precision) and states.
struct UpdateArrays {
  void* gradient;
  void* weight;
  float* master;
  void* states[kStatesMax];
};

struct UpdateKernel {
  const char* name;
  std::size_t states;
  // In float32; with a master, of bfloat16 weights.
  void (*run)(const UpdateArrays& arrays, std::size_t count);
};

constexpr UpdateKernel kUpdates[] = {
    {"SGD", 0,
     [](const UpdateArrays& a, std::size_t count) {
       const ops::SgdParams params{.learning_rate = 1e-6};
       if (a.master != nullptr) {
         ops::SgdUpdateMultiPrecision(params, DType::kBFloat16, a.weight, a.gradient, a.master,
                                      nullptr, count);
       } else {
         ops::SgdUpdate(params, DType::kFloat32, a.weight, a.gradient, nullptr, count);
       }
     }},
    {"SGD with momentum", 1,
     [](const UpdateArrays& a, std::size_t count) {
       const ops::SgdParams params{.learning_rate = 1e-6, .momentum = 0.9};
       if (a.master != nullptr) {
         ops::SgdUpdateMultiPrecision(params, DType::kBFloat16, a.weight, a.gradient, a.master,
                                      static_cast<float*>(a.states[0]), count);
       } else {
         ops::SgdUpdate(params, DType::kFloat32, a.weight, a.gradient, a.states[0], count);
       }
     }},
};

// `bytes`: of the weight.
void MeasureUpdate(const UpdateKernel& update, bool master, std::size_t bytes, int rounds,
                   BarReport& report) {
  const std::size_t weight_bytes = master ? sizeof(BFloat16) : sizeof(float);
  const std::size_t count = bytes / weight_bytes;
  std::vector<Memory> memory;
  std::vector<Stream> streams;
  const auto add = [&](std::size_t element_bytes, Stream::Use use) {
    memory.emplace_back(count * element_bytes);
    streams.push_back({memory.back().data(), memory.back().bytes(), use});
    return static_cast<void*>(memory.back().data());
  };
  UpdateArrays arrays = {};
  arrays.gradient = add(weight_bytes, Stream::Use::kRead);
  arrays.weight = add(weight_bytes, master ? Stream::Use::kWrite : Stream::Use::kUpdate);
  if (master) arrays.master = static_cast<float*>(add(sizeof(float), Stream::Use::kUpdate));
  for (std::size_t s = 0; s < update.states; ++s) {
    arrays.states[s] = add(sizeof(float), Stream::Use::kUpdate);
  }
  MeasureKernel(
      {.what = fmt::format("{}, {}, {}", update.name,
                           master ? "bfloat16 with master weights" : "float32", BytesText(bytes)),
       .count = count,
       .streams = streams,
       .run = [&](std::size_t elements) { update.run(arrays, elements); },
       .arithmetic_count = kInCache},
      rounds, report);
}

}  // namespace

void MeasureUpdates(BarReport& report, bool quick) {
  const std::vector<std::size_t> sizes_kib =
      quick ? std::vector<std::size_t>{64, 4096}
            : std::vector<std::size_t>{64, 256, 1024, 4096, 16384, 65536};
  for (const UpdateKernel& update : kUpdates) {
    for (const bool master : {false, true}) {
      for (const std::size_t kib : sizes_kib) {
        MeasureUpdate(update, master, kib << 10, quick ? 3 : 9, report);
      }
    }
  }
}

}  // namespace heddle::bench
