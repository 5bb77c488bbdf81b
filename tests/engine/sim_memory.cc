#include "tests/engine/sim_memory.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include <sys/mman.h>

#include "base/check.h"

namespace heddle::engine_test {
namespace {

constexpr std::size_t kRegionBytes = std::size_t{8} << 30;  // addresses, not memory
constexpr std::size_t kAlignment = 256;

std::byte* Reserve() {
  void* const region =
      mmap(nullptr, kRegionBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(region != MAP_FAILED);
  return static_cast<std::byte*>(region);
}

}  // namespace

SimMemory::SimMemory() : region_(Reserve()), next_(region_) {}

SimMemory::~SimMemory() {
  for (const auto& [address, block] : blocks_) {
    CHECK(block.uses == 0);
    if (block.values == nullptr) std::free(const_cast<std::byte*>(address));
  }
  munmap(region_, kRegionBytes);
}

void* SimMemory::Allocate(int device, std::int64_t bytes, std::int64_t bytes_max) {
  const std::lock_guard lock(mutex_);
  if (bytes > bytes_max - used_[device]) return nullptr;
  used_[device] += bytes;
  const auto size = (static_cast<std::size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
  Block block{.device = device, .bytes = bytes, .values = nullptr};
  std::byte* address = nullptr;
  if (device == kPinned) {
    address = static_cast<std::byte*>(std::aligned_alloc(kAlignment, size));
    if (address == nullptr) throw std::bad_alloc();
    std::memset(address, 0x5A, size);  // no array may count on what it finds
  } else {
    address = next_;
    next_ += size;
    CHECK(next_ <= region_ + kRegionBytes, "the simulated devices have no addresses left");
    block.values = std::make_unique_for_overwrite<std::byte[]>(size);
    std::memset(block.values.get(), 0xA5, size);
  }
  blocks_.emplace(address, std::move(block));
  return address;
}

void SimMemory::Free(int device, const void* address) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(static_cast<const std::byte*>(address));
  CHECK(found != blocks_.end() && found->second.device == device, "freed, but not a block");
  CHECK(found->second.uses == 0, "a block was freed that {} ops have yet to use",
        found->second.uses);
  used_[device] -= found->second.bytes;
  if (device == kPinned) std::free(const_cast<void*>(address));
  blocks_.erase(found);
}

std::int64_t SimMemory::bytes_used(int device) const {
  const std::lock_guard lock(mutex_);
  const auto found = used_.find(device);
  return found == used_.end() ? 0 : found->second;
}

void SimMemory::Link(int device, int peer) {
  const std::lock_guard lock(mutex_);
  links_.insert({device, peer});
}

SimMemory::Blocks::const_iterator SimMemory::FindLocked(const void* address,
                                                        std::int64_t bytes) const {
  const auto* const at = static_cast<const std::byte*>(address);
  auto block = blocks_.upper_bound(at);
  CHECK(block != blocks_.begin(), "an address that is of no block, of a device or pinned");
  --block;
  CHECK(at + bytes <= block->first + block->second.bytes,
        "an address that is of no block, of a device or pinned");
  return block;
}

std::shared_ptr<void> SimMemory::Use(std::span<const void* const> addresses) {
  std::vector<const std::byte*> used;
  const std::lock_guard lock(mutex_);
  for (const void* address : addresses) {
    const auto block = FindLocked(address, 0);
    ++blocks_.find(block->first)->second.uses;
    used.push_back(block->first);
  }
  return {this, [used = std::move(used)](SimMemory* memory) {
            const std::lock_guard again(memory->mutex_);
            for (const std::byte* address : used) --memory->blocks_.find(address)->second.uses;
          }};
}

std::byte* SimMemory::Find(int device, const void* address, std::int64_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto block = FindLocked(address, bytes);
  const int owner = block->second.device;
  CHECK(owner == kPinned || owner == device || links_.count({device, owner}) != 0,
        "gpu({}) does not reach memory of gpu({})", device, owner);
  const auto offset = static_cast<const std::byte*>(address) - block->first;
  std::byte* const start = block->second.values != nullptr ? block->second.values.get()
                                                           : const_cast<std::byte*>(block->first);
  return start + offset;
}

}  // namespace heddle::engine_test
