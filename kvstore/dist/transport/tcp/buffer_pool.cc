#include "kvstore/dist/transport/tcp/buffer_pool.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/system_memory.h"
#include "engine/block_pool.h"

namespace heddle::kvstore::dist {
namespace {

constexpr std::size_t kUnpooledMax = 512;  // of blocks, which are as good as pooled
constexpr std::size_t kSlabBytesMin = std::size_t{2} << 20;  // a huge page
// Of shorter ones a slab would hold so many that one in use keeps much memory.
constexpr std::size_t kBuffersOfSlabMax = 2;

}  // namespace

// Memory of the system, for a few buffers of one size, or one short one.
class BufferPool::Slab {
 public:
  explicit Slab(std::size_t bytes)
      : bytes_(static_cast<std::int64_t>(bytes)),
        data_(static_cast<std::byte*>(TakeFromSystem(bytes_))) {
    if (data_ == nullptr) throw std::bad_alloc();
  }
  ~Slab() { ReturnToSystem(data_, bytes_); }
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  std::byte* data() const { return data_; }

 private:
  const std::int64_t bytes_;
  std::byte* const data_;
};

std::shared_ptr<BufferPool> BufferPool::Create(std::size_t idle_bytes_max) {
  return std::shared_ptr<BufferPool>(new BufferPool(idle_bytes_max));
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
  Buffer buffer;
  {
    MutexLock lock(mutex_);
    if (!idle_[size_class].empty()) {
      buffer = std::move(idle_[size_class].back());
      idle_[size_class].pop_back();
      idle_bytes_ -= std::size_t{1} << (kSmallest + size_class);
    }
  }
  if (buffer.data == nullptr) buffer = Make(size_class);
  std::byte* const data = buffer.data;
  return {data,
          [pool = shared_from_this(), buffer = std::move(buffer), size_class](std::byte*) mutable {
            pool->Return(std::move(buffer), size_class);
          },
          engine::BlockAllocator<std::byte>()};
}

BufferPool::Buffer BufferPool::Make(std::size_t size_class) {
  const std::size_t bytes = std::size_t{1} << (kSmallest + size_class);
  const std::size_t count = bytes * kBuffersOfSlabMax >= kSlabBytesMin
                                ? std::max<std::size_t>(kSlabBytesMin / bytes, 1)
                                : 1;
  const auto slab = std::make_shared<Slab>(count * bytes);
  for (std::size_t i = 1; i < count; ++i) Return({slab->data() + i * bytes, slab}, size_class);
  return {slab->data(), slab};
}

void BufferPool::Return(Buffer buffer, std::size_t size_class) {
  const std::size_t bytes = std::size_t{1} << (kSmallest + size_class);
  MutexLock lock(mutex_);
  if (idle_bytes_ + bytes > idle_bytes_max_) return;
  idle_[size_class].push_back(std::move(buffer));
  idle_bytes_ += bytes;
}

}  // namespace heddle::kvstore::dist
