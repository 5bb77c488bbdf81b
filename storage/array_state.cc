#include "storage/array_state.h"

#include <heddle/error.h>

#include <new>

#include <fmt/format.h>

#include "engine/fork.h"

namespace heddle::internal {

Buffer::~Buffer() {
  if (engine::InForkedChild()) return;  // the allocator's locks may be held for ever
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

// The pool's locks may be held for ever in a forked child.
void* ArrayState::operator new(std::size_t bytes) {
  if (engine::InForkedChild()) return ::operator new (bytes, std::align_val_t{alignof(ArrayState)});
  return engine::AllocateBlock(engine::BlockClassOf(bytes), bytes);
}

void ArrayState::operator delete(void* state) noexcept {
  if (engine::InForkedChild()) return;
  engine::FreeBlock(state, engine::BlockClassOf(sizeof(ArrayState)));
}

void CheckTouch(const Var& var, engine::Touch touch, const Shape& shape, DType dtype,
                Device device) {
  const engine::Violation violation = engine::FindViolation(var, touch);
  if (violation.op.empty()) return;
  throw AccessError(fmt::format("{} {} array {} (shape {}, {}, {}), {}", violation.op,
                                touch == engine::Touch::kRead ? "reads" : "writes", var.name(),
                                ToString(shape), Name(dtype), ToString(device),
                                violation.declared));
}

void CheckTouch(const ArrayState& state, engine::Touch touch) {
  CheckTouch(state.var, touch, state.shape, state.dtype, state.device);
}

void CheckGpuTouch(const ArrayState& state) {
  CheckGpuTouch(state.device, state.shape, state.dtype);
}

void CheckGpuTouch(Device device, const Shape& shape, DType dtype) {
  const std::string op = engine::RunningCpuOp();
  if (op.empty()) return;
  throw InvalidArgument(
      fmt::format("{}: expected an array in the CPUs' memory, got one on {} (shape {}, {})", op,
                  ToString(device), ToString(shape), Name(dtype)));
}

void RetainArray(ArrayState* state) noexcept {
  state->refs.fetch_add(1, std::memory_order_relaxed);
}

void ReleaseArray(ArrayState* state) noexcept {
  // acq_rel: the last holder sees what all others did
  if (state->refs.fetch_sub(1, std::memory_order_acq_rel) == 1) delete state;
}

}  // namespace heddle::internal
