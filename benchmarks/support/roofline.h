// How close a kernel comes to what the machine allows.
//
// The limits are loops that move the same bytes and compute next to nothing: once through all
// arrays that the kernel reads, updates and writes, with ordinary or with streaming stores; and a
// memcpy, per byte. All contenders run in one process over the same arrays, in turn, and each round
// gives one ratio; what counts is the median. Kernels whose arithmetic may be what limits them are
// also held against the same arithmetic on data in the first-level cache; the slower limit counts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/system_memory.h"
#include "benchmarks/support/bars.h"

namespace heddle::bench {

// Memory as heddle's arrays have it, every byte set: no page is touched for the first time while
// time counts. Never zeros, which some machines move twice as fast as anything else.
class Memory {
 public:
  explicit Memory(std::size_t bytes, int fill = kSmallNumbers);
  // Bytes that are 0.01 in float32, and 0.01 or 1 in the formats of 16 bits.
  static constexpr int kSmallNumbers = 0x3C;
  std::byte* data() const { return block_.get(); }
  std::size_t bytes() const { return static_cast<std::size_t>(block_.get_deleter().bytes); }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(block_.get());
  }

 private:
  struct Return {
    std::int64_t bytes;
    void operator()(std::byte* block) const { ReturnToSystem(block, bytes); }
  };
  std::unique_ptr<std::byte, Return> block_;
};

// One array that a kernel goes through once.
struct Stream {
  enum class Use : std::uint8_t { kRead, kUpdate, kWrite };
  std::byte* data;  // aligned to 64 bytes
  std::size_t bytes;
  Use use;

  std::size_t moved() const { return use == Use::kUpdate ? 2 * bytes : bytes; }
};
std::size_t BytesMoved(std::span<const Stream> streams);

enum class StoreKind : std::uint8_t { kCached, kStreaming };

// Part `part` of `parts` of all streams: reads what is read, changes what is updated, overwrites
// what is written, cache line by cache line. The updated values stay as they are. kStreaming:
// written arrays bypass the caches.
void MoveBytes(std::span<const Stream> streams, StoreKind stores, std::size_t part = 0,
               std::size_t parts = 1);

// Seconds that this thread has run: kernels on large arrays outlast a time slice, and what other
// processes did in between must not count.
double ThreadSeconds();

// times[c][r]: what measure[c]() returned in round r, the least of three tries: what the neighbours
// of a virtual machine take from it in one of them is neither ours nor the limit's. They run in
// turn, each turn beginning with another one, after a turn that does not count.
std::vector<std::vector<double>> MeasureInTurn(std::span<const std::function<double()>> measure,
                                               int rounds);

struct KernelCase {
  struct Place {
    std::vector<Stream> streams;                 // what the kernel moves for `count` elements
    std::function<void(std::size_t count)> run;  // the kernel on the first `count` elements
    // What reads the result then, of the loops as well. Null: nothing.
    std::function<void()> then = nullptr;
  };

  std::string what;
  std::size_t count;           // elements
  std::size_t then_moves = 0;  // bytes, as `then` of all places
  // Alike but for where their pages lie, which decides what shares a set of a cache, and is luck:
  // rounds take them in turn.
  std::vector<Place> places;
  // Not 0: also held against run(arithmetic_count) over and over, whose arrays fit into L1.
  std::size_t arithmetic_count = 0;
  double bar = 0.85;
};

// Measures one thread and adds a bar in GB/s. Takes `rounds` rounds, each place as often, and as
// many again, up to six times, as long as the quartiles of their ratios lie on either side of the
// bar.
void MeasureKernel(const KernelCase& kernel, int rounds, BarReport& report);

}  // namespace heddle::bench
