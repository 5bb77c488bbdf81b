// Goal: what is taken from a pool is nobody else's, however it is cut from the system's memory.
// Method: random takes and releases, also after the pool's end; each buffer is filled with its
// number, which must still be there when it is let go.
#include "kvstore/dist/transport/tcp/buffer_pool.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kvstore/dist/random_bodies.h"

namespace heddle::kvstore::dist_test {
namespace {

using dist::BufferPool;

struct Taken {
  std::shared_ptr<std::byte> buffer;
  std::size_t bytes;
  std::byte number;

  std::span<std::byte> span() const { return {buffer.get(), bytes}; }
  bool Intact() const {
    return std::ranges::all_of(span(), [this](std::byte byte) { return byte == number; });
  }
};

std::size_t RandomSize(Random& random) {
  const std::size_t most = std::size_t{1} << (random() % 23);
  return most == BufferPool::kBytesMax ? most : 1 + random() % most;
}

void TakeAndRelease(Random& random, const std::shared_ptr<BufferPool>& pool, int steps,
                    std::vector<Taken>* taken) {
  for (int step = 0; step < steps; ++step) {
    if (taken->size() == 20 || (!taken->empty() && random() % 2 == 0)) {
      const auto at = taken->begin() + static_cast<std::ptrdiff_t>(random() % taken->size());
      ASSERT_TRUE(at->Intact()) << at->bytes << " bytes";
      taken->erase(at);
      continue;
    }
    const std::size_t bytes = RandomSize(random);
    taken->push_back({pool->Take(bytes), bytes, static_cast<std::byte>(random())});
    if (bytes >= 1024) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(taken->back().buffer.get()) % 64, 0U);
    }
    std::ranges::fill(taken->back().span(), taken->back().number);
  }
}

TEST(BufferPool, ABufferIsItsTakersAlone) {
  Random random(TestSeed());
  for (const std::size_t idle_bytes_max : {std::size_t{0}, std::size_t{4} << 20}) {
    auto pool = BufferPool::Create(idle_bytes_max);
    std::vector<Taken> taken;
    TakeAndRelease(random, pool, 60, &taken);
    pool.reset();
    for (const Taken& each : taken) EXPECT_TRUE(each.Intact()) << each.bytes << " bytes";
  }
}

TEST(BufferPool, ThreadsShareIt) {
  const auto pool = BufferPool::Create(std::size_t{16} << 20);
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&pool, seed = TestSeed() + static_cast<unsigned>(i)] {
      Random random(seed);
      std::vector<Taken> taken;
      TakeAndRelease(random, pool, 20, &taken);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// So that it is still in the cache.
TEST(BufferPool, TheLastOneReturnedIsTheNext) {
  const auto pool = BufferPool::Create(std::size_t{16} << 20);
  for (const std::size_t bytes :
       {std::size_t{4096}, std::size_t{100} << 10, std::size_t{1} << 20, std::size_t{4} << 20}) {
    auto first = pool->Take(bytes);
    auto second = pool->Take(bytes);
    const std::byte* const at = second.get();
    first.reset();
    second.reset();
    EXPECT_EQ(pool->Take(bytes).get(), at) << bytes << " bytes";
  }
}

}  // namespace
}  // namespace heddle::kvstore::dist_test
