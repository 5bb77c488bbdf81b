// Where the bytes of arrays come from. To add one: write storage/<name>_allocator.cc and list it in
// storage/registry.cc.
#pragma once

#include <heddle/memory.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace heddle::storage {

inline constexpr std::int64_t kBlockAlignment = 64;

// Threads: all methods, any thread.
class Allocator {
 public:
  virtual ~Allocator() = default;

  // A block of at least `bytes` > 0, aligned to kBlockAlignment, contents undefined. OutOfMemory
  // names the bytes asked for, those of the block if they are more, those in use and the cap.
  virtual void* Allocate(std::int64_t bytes) = 0;
  // What the block of Allocate(bytes) counts as, in use and against the cap: at least `bytes` > 0.
  virtual std::int64_t BlockBytes(std::int64_t bytes) const = 0;
  // Takes back a block of Allocate(bytes).
  virtual void Free(void* block, std::int64_t bytes) noexcept = 0;
  // Gives free blocks back to the system; returns their bytes.
  virtual std::int64_t Trim() = 0;
  virtual void set_bytes_max(std::int64_t bytes_max) = 0;
  virtual MemoryStats stats() const = 0;
};

// The names in the registry.
std::vector<std::string> AllocatorNames();

// Makes an allocator by its name in the registry. InvalidArgument listing the known ones.
std::unique_ptr<Allocator> MakeAllocator(const MemoryOptions& options);

// Throws InvalidArgument for an unknown allocator, listing the known ones, or a cap below 1.
void CheckMemoryOptions(const MemoryOptions& options);

// The process-wide allocator of the CPUs. Lives until the process ends, since arrays may be dropped
// by destructors of static objects. Those of other devices: storage/gpus.h.
Allocator& CpuAllocator();

}  // namespace heddle::storage
