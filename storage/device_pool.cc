#include "storage/device_pool.h"

#include <array>
#include <cstddef>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "storage/memory_budget.h"
#include "storage/size_class.h"

namespace heddle::storage {
namespace {

class DevicePool final : public Allocator {
 public:
  DevicePool(std::int64_t bytes_max, std::string name, bool keeps,
             std::unique_ptr<BlockSource> source)
      : keeps_(keeps), source_(std::move(source)), budget_(bytes_max, std::move(name)) {}

  void* Allocate(std::int64_t bytes) override {
    if (bytes > kBlockBytesMax) budget_.ThrowOverCap(bytes, bytes);
    const SizeClass size = ClassOf(bytes);
    void* block = Pop(size.index);
    if (block == nullptr) block = TakeFresh(size, bytes);
    budget_.Use(size.bytes);
    return block;
  }

  std::int64_t BlockBytes(std::int64_t bytes) const override { return PoolBlockBytes(bytes); }

  void Free(void* block, std::int64_t bytes) noexcept override {
    const SizeClass size = ClassOf(bytes);
    budget_.Unuse(size.bytes);
    if (keeps_) {
      const MutexLock lock(mutex_);
      ListOf(size.index).free.push_back(block);  // there is room: TakeFresh made it
      return;
    }
    source_->Return(block);
    Forget(size);
  }

  std::int64_t Trim() override {
    const MutexLock lock(mutex_);
    return TrimLocked();
  }

  void set_bytes_max(std::int64_t bytes_max) override { budget_.set_bytes_max(bytes_max); }
  MemoryStats stats() const override { return budget_.stats(); }

 private:
  struct List {
    std::vector<void*> free;  // last freed last; capacity for all blocks of the class
    std::size_t blocks = 0;   // free or in use
  };

  List& ListOf(int index) REQUIRES(mutex_) { return lists_[static_cast<std::size_t>(index)]; }

  // Under the lock to its end: whoever then finds the cap reached knows that no block is cached,
  // nor on its way back.
  std::int64_t TrimLocked() REQUIRES(mutex_) {
    std::int64_t trimmed = 0;
    for (int index = 0; index < kSizeClasses; ++index) {
      List& list = ListOf(index);
      const std::int64_t bytes = BytesOfClass(index);
      for (; !list.free.empty(); list.free.pop_back()) {
        source_->Return(list.free.back());
        budget_.Unreserve(bytes);
        --list.blocks;
        trimmed += bytes;
      }
    }
    if (trimmed > 0) source_->Trim();
    return trimmed;
  }

  // Books a block, if the cap allows it after a Trim at the latest.
  bool Reserve(std::int64_t bytes) {
    if (budget_.Reserve(bytes)) return true;
    const MutexLock lock(mutex_);
    TrimLocked();
    return budget_.Reserve(bytes);
  }
  void* Take(std::int64_t bytes) {
    if (void* const block = source_->Take(bytes)) return block;
    Trim();
    return source_->Take(bytes);
  }

  void* Pop(int index) {
    const MutexLock lock(mutex_);
    std::vector<void*>& free = ListOf(index).free;
    if (free.empty()) return nullptr;
    void* const block = free.back();
    free.pop_back();
    return block;
  }

  void Remember(SizeClass size) {
    const MutexLock lock(mutex_);
    List& list = ListOf(size.index);
    if (list.blocks == list.free.capacity()) list.free.reserve(2 * list.blocks + 4);
    ++list.blocks;
  }
  void Forget(SizeClass size) noexcept {
    budget_.Unreserve(size.bytes);
    const MutexLock lock(mutex_);
    --ListOf(size.index).blocks;
  }

  // When the cap or the source refuses, cached blocks of other classes make room.
  void* TakeFresh(SizeClass size, std::int64_t asked) {
    if (!Reserve(size.bytes)) budget_.ThrowOverCap(asked, size.bytes);
    void* block = nullptr;
    try {
      Remember(size);
    } catch (...) {
      budget_.Unreserve(size.bytes);
      throw;
    }
    try {
      block = Take(size.bytes);
      if (block == nullptr) budget_.ThrowSystemEmpty(asked, size.bytes);
    } catch (...) {
      Forget(size);
      throw;
    }
    return block;
  }

  const bool keeps_;
  const std::unique_ptr<BlockSource> source_;
  MemoryBudget budget_;
  Mutex mutex_;
  std::array<List, kSizeClasses> lists_ GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<Allocator> MakeDevicePool(const MemoryOptions& options, std::string name,
                                          std::unique_ptr<BlockSource> source) {
  CheckMemoryOptions(options);
  return std::make_unique<DevicePool>(options.bytes_max, std::move(name),
                                      options.allocator == "pool", std::move(source));
}

}  // namespace heddle::storage
