// What kernels of GPUs do to each array of a list.
#pragma once

#include <cstddef>
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

struct SumTask {
  std::span<const void* const> inputs;  // read before the call returns
  void* out;
  std::size_t count;
};

}  // namespace heddle::ops
