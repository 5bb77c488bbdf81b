// The memory that arrays live in: one pool for all cpu(i), and one for each gpu(i) and each
// cpu_pinned(i), shared by the whole process.
//
// A pool keeps freed blocks for later arrays of about the same size, so that steady state neither
// asks the operating system or a device for memory nor touches fresh pages. A block is freed when
// the last op that uses it is done, on a GPU too.
// Errors:  InvalidArgument for a type of device that is not there, saying why.
// Threads: all functions, any thread.
#pragma once

#include <heddle/device.h>

#include <cstdint>
#include <limits>
#include <string>

namespace heddle {

struct MemoryOptions {
  // "pool": keeps freed blocks, in size classes at most an eighth apart. "system": keeps nothing,
  // for memory checkers.
  std::string allocator = "pool";
  // Bound on used + cached bytes of a pool, blocks rounded up to their size class. Cached blocks
  // are given back before an allocation fails over it.
  std::int64_t bytes_max = std::numeric_limits<std::int64_t>::max();

  // The defaults, changed by HEDDLE_CPU_ALLOCATOR and HEDDLE_CPU_MEMORY_MAX (bytes), those of GPUs
  // by HEDDLE_GPU_ALLOCATOR and HEDDLE_GPU_MEMORY_MAX, of pinned memory by HEDDLE_PINNED_ALLOCATOR
  // and HEDDLE_PINNED_MEMORY_MAX. Throws InvalidArgument naming a variable that does not parse.
  static MemoryOptions FromEnvironment(DeviceType type);
};

struct MemoryStats {
  std::int64_t used = 0;       // bytes of blocks in use, as rounded up to their size class
  std::int64_t cached = 0;     // bytes of free blocks kept
  std::int64_t peak = 0;       // the largest `used` so far
  std::int64_t bytes_max = 0;  // the cap
};

// For every pool of the type. Changes the cap now; below what is in use, only later allocations
// fail. The allocator can be chosen until the pool is first used, InvalidState after that. Without
// this call the options come from the environment on first use. InvalidArgument for an unknown
// allocator or a cap below 1.
void ConfigureMemory(DeviceType type, const MemoryOptions& options);

// Of one device; of all devices of a type together, whose bytes_max is that of each.
MemoryStats GetMemoryStats(Device device);
MemoryStats GetMemoryStats(DeviceType type);

// Gives cached blocks back to the operating system or the devices; returns how many bytes.
std::int64_t TrimMemory(DeviceType type);

}  // namespace heddle
