// What kernels of GPUs do to each array of a list.
#pragma once

#include <heddle/dtype.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace heddle::ops {

struct CopyTask {
  const void* source;
  void* out;
  std::size_t bytes;
};

struct CastTask {
  const void* source;
  void* out;
  std::size_t count;
};

// Sorted and unique ids of rows. All pointers: memory that the GPU reaches.
struct GpuIds {
  const std::int64_t* ids;
  std::size_t count;
  // How many of `count` there are, where only the GPU knows; null: all.
  const std::int64_t* present = nullptr;
};

// Rows, one after another in memory, each under its id.
struct GpuRows {
  const std::int64_t* ids;
  std::size_t count;
  const void* rows;
  const std::int64_t* present = nullptr;  // as of GpuIds

  GpuIds list() const { return {ids, count, present}; }
};

// The most inputs that a launch adds up: a sum of more takes several, one after another.
inline constexpr std::size_t kGpuSumInputsMax = 288;

// In what such a sum is put aside from one launch to the next: no bit of it is lost.
constexpr DType CarryDType(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 ? DType::kFloat32 : dtype;
}

struct SumTask {
  std::span<const void* const> inputs;  // read before the call returns
  void* out;
  std::size_t count;
  // Memory of the GPU for `count` elements of CarryDType, apart from all others; may be null for
  // kGpuSumInputsMax inputs or fewer.
  void* carry = nullptr;
};

}  // namespace heddle::ops
