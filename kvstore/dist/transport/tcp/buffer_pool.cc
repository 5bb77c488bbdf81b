#include "kvstore/dist/transport/tcp/buffer_pool.h"

#include <bit>
#include <new>

#include "base/check.h"
#include "engine/block_pool.h"

namespace heddle::kvstore::dist {
namespace {

constexpr std::size_t kUnpooledMax = 4096;
constexpr std::align_val_t kAlignment{64};

}  // namespace

std::shared_ptr<BufferPool> BufferPool::Create(std::size_t idle_bytes_max) {
  return std::shared_ptr<BufferPool>(new BufferPool(idle_bytes_max));
}

BufferPool::~BufferPool() {
  for (const auto& buffers : idle_) {
    for (std::byte* buffer : buffers) operator delete(buffer, kAlignment);
  }
}

std::shared_ptr<std::byte> BufferPool::Take(std::size_t bytes) {
  DCHECK(bytes <= kBytesMax);
  if (bytes <= kUnpooledMax) {
    auto small =
        std::allocate_shared_for_overwrite<std::byte[]>(engine::BlockAllocator<std::byte>(), bytes);
    return {small, small.get()};
  }
  const auto log = static_cast<std::size_t>(std::bit_width(bytes - 1));
  const std::size_t size_class = log > kSmallest ? log - kSmallest : 0;
  std::byte* buffer = nullptr;
  {
    MutexLock lock(mutex_);
    if (!idle_[size_class].empty()) {
      buffer = idle_[size_class].back();
      idle_[size_class].pop_back();
      idle_bytes_ -= std::size_t{1} << (kSmallest + size_class);
    }
  }
  if (buffer == nullptr) {
    buffer = static_cast<std::byte*>(operator new (std::size_t{1} << (kSmallest + size_class),
                                                   kAlignment));
  }
  return {buffer, [pool = shared_from_this(), size_class](std::byte* returned) {
            pool->Return(returned, size_class);
          }};
}

void BufferPool::Return(std::byte* buffer, std::size_t size_class) {
  const std::size_t bytes = std::size_t{1} << (kSmallest + size_class);
  {
    MutexLock lock(mutex_);
    if (idle_bytes_ + bytes <= idle_bytes_max_) {
      idle_[size_class].push_back(buffer);
      idle_bytes_ += bytes;
      return;
    }
  }
  operator delete(buffer, kAlignment);
}

}  // namespace heddle::kvstore::dist
