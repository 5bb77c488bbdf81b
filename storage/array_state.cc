#include "storage/array_state.h"

namespace heddle::internal {

Buffer::~Buffer() {
  // relaxed: Release's acquire came before
  std::byte* const block = block_.load(std::memory_order_relaxed);
  if (block != nullptr) allocator_.Free(block, block_bytes());
}

// Two first users allocate both, and one gives its block back: rarer than what a lock here would
// cost.
std::byte* Buffer::Allocate() {
  auto* const fresh = static_cast<std::byte*>(allocator_.Allocate(block_bytes()));
  std::byte* block = nullptr;
  if (block_.compare_exchange_strong(block, fresh, std::memory_order_acq_rel)) return fresh;
  allocator_.Free(fresh, block_bytes());
  return block;
}

void RetainArray(ArrayState* state) noexcept {
  state->refs.fetch_add(1, std::memory_order_relaxed);
}

void ReleaseArray(ArrayState* state) noexcept {
  // acq_rel: the last holder sees what all others did
  if (state->refs.fetch_sub(1, std::memory_order_acq_rel) == 1) delete state;
}

}  // namespace heddle::internal
