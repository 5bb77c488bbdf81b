// Random programs of array operations on CPUs, pinned memory and GPUs.
#pragma once

#include <heddle/engine.h>
#include <heddle/ndarray.h>

#include <cstdint>

namespace heddle::storage_test {

// Does `steps` random operations to arrays of `engine`, which has `gpus` devices, and to arrays of
// an engine that runs them one by one in the CPUs' memory, and expects the same bits. Large arrays
// take several staging slices.
void RunGpuProgram(Engine& engine, int gpus, int steps, std::uint64_t seed);

}  // namespace heddle::storage_test
