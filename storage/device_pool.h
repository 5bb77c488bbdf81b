// Memory that the host must not touch, or gets slowly: of a GPU, or pinned. The CPUs' allocators
// over blocks that somebody else hands out.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "storage/allocator.h"

namespace heddle::storage {

// Threads: all methods, any thread.
class BlockSource {
 public:
  virtual ~BlockSource() = default;
  // Null: there is no more. Throws what else goes wrong.
  virtual void* Take(std::int64_t bytes) = 0;
  virtual void Return(void* block) noexcept = 0;
  // After blocks were returned for good.
  virtual void Trim() noexcept = 0;
};

// An allocator that `options` describe. Nothing of a block is touched, and freeing one needs no
// memory. `name`: whose memory, for errors. Destroying it leaves its cached blocks to the source.
std::unique_ptr<Allocator> MakeDevicePool(const MemoryOptions& options, std::string name,
                                          std::unique_ptr<BlockSource> source);

}  // namespace heddle::storage
