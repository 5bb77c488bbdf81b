// The allocator that keeps nothing: every block comes from the system and goes straight back, which
// lets memory checkers see each use after free.
#include "base/system_memory.h"
#include "storage/allocator.h"
#include "storage/memory_budget.h"

namespace heddle::storage {
namespace {

class SystemAllocator final : public Allocator {
 public:
  explicit SystemAllocator(std::int64_t bytes_max) : budget_(bytes_max, "array memory") {}

  void* Allocate(std::int64_t bytes) override {
    if (!budget_.Reserve(bytes)) budget_.ThrowOverCap(bytes, bytes);
    void* const block = TakeFromSystem(bytes);
    if (block == nullptr) {
      budget_.Unreserve(bytes);
      budget_.ThrowSystemEmpty(bytes, bytes);
    }
    budget_.Use(bytes);
    return block;
  }

  std::int64_t BlockBytes(std::int64_t bytes) const override { return bytes; }

  void Free(void* block, std::int64_t bytes) noexcept override {
    ReturnToSystem(block, bytes);
    budget_.Unuse(bytes);
    budget_.Unreserve(bytes);
  }

  std::int64_t Trim() override { return 0; }
  void set_bytes_max(std::int64_t bytes_max) override { budget_.set_bytes_max(bytes_max); }
  MemoryStats stats() const override { return budget_.stats(); }

 private:
  MemoryBudget budget_;
};

}  // namespace

std::unique_ptr<Allocator> MakeSystemAllocator(std::int64_t bytes_max) {
  return std::make_unique<SystemAllocator>(bytes_max);
}

}  // namespace heddle::storage
