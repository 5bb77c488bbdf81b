// Memory for payloads that nobody gave a place for.
//
// A buffer goes back to the pool when its last owner lets go, and is the next to be taken, so that
// it is still in the cache. What the pool keeps is bounded; what is out is not: whoever grants
// peers credit bounds that. Long buffers are cut from *slabs* of 2 MiB and more, which lie in huge
// pages where the system has some: values of a server take a tenth less time to write and send. A
// slab goes with the last buffer in it.
// Threads: any. Buffers may outlive the pool.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "base/mutex.h"

namespace heddle::kvstore::dist {

class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  static constexpr std::size_t kBytesMax = std::size_t{4} << 20;  // of one buffer

  // `idle_bytes_max`: what it keeps.
  static std::shared_ptr<BufferPool> Create(std::size_t idle_bytes_max);

  // At least `bytes` (at most kBytesMax), not zeroed; of 1 KiB and more aligned to 64.
  std::shared_ptr<std::byte> Take(std::size_t bytes);

 private:
  static constexpr std::size_t kSmallest = 10;  // log2 of the bytes of the smallest pooled class
  static constexpr std::size_t kClasses = 13;
  static_assert((std::size_t{1} << (kSmallest + kClasses - 1)) == kBytesMax);

  class Slab;
  struct Buffer {
    std::byte* data = nullptr;
    std::shared_ptr<Slab> slab;
  };

  explicit BufferPool(std::size_t idle_bytes_max) : idle_bytes_max_(idle_bytes_max) {}
  Buffer Make(std::size_t size_class) EXCLUDES(mutex_);
  void Return(Buffer buffer, std::size_t size_class) EXCLUDES(mutex_);

  const std::size_t idle_bytes_max_;
  Mutex mutex_;
  std::array<std::vector<Buffer>, kClasses> idle_ GUARDED_BY(mutex_);
  std::size_t idle_bytes_ GUARDED_BY(mutex_) = 0;
};

}  // namespace heddle::kvstore::dist
