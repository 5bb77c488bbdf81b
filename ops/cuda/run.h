// How the elements of an array, or of several of equal length, are shared out over the threads of a
// kernel that treats each element alike.
//
// Vectors of kLanes elements, so that the largest type fills an access of 16 bytes; a thread has
// kUnroll of them at once, kBlockThreads vectors apart, so that neighbouring threads touch
// neighbouring memory and several loads are in flight. The first block also takes what no whole
// vector covers, before the first and after the last. Arrays that are not aligned alike are taken
// element by element.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "ops/cuda/host_device.h"

namespace heddle::ops::cuda {

inline constexpr unsigned kBlockThreads = 256;
inline constexpr unsigned kWarpLanes = 32;
inline constexpr unsigned kBlockWarps = kBlockThreads / kWarpLanes;

// One array that a kernel touches.
struct ArrayAddress {
  const void* data;
  std::size_t element_bytes;
};

struct Run {
  static constexpr std::uint32_t kNotAlike = ~std::uint32_t{0};

  std::uint64_t count;
  std::uint32_t head;  // elements before the first whole vector, or kNotAlike
};

// `lanes`: elements of a vector. Null arrays do not count.
inline Run MakeRun(std::size_t count, std::uint32_t lanes,
                   std::initializer_list<ArrayAddress> arrays) {
  std::uint32_t head = 0;
  bool first = true;
  for (const ArrayAddress& array : arrays) {
    if (array.data == nullptr) continue;
    const std::uintptr_t element =
        reinterpret_cast<std::uintptr_t>(array.data) / array.element_bytes;
    const auto here = static_cast<std::uint32_t>((lanes - element % lanes) % lanes);
    if (!first && here != head) return {count, Run::kNotAlike};
    head = here;
    first = false;
  }
  return {count, static_cast<std::uint32_t>(std::min<std::uint64_t>(head, count))};
}

// Blocks that a run takes; at least one, if it is not empty.
template <class Body>
std::uint64_t BlocksOf(const Run& run) {
  constexpr std::uint64_t kVectors = std::uint64_t{kBlockThreads} * Body::kUnroll;
  if (run.count == 0) return 0;
  const std::uint64_t vectors = (run.head == Run::kNotAlike)
                                    ? (run.count + Body::kLanes - 1) / Body::kLanes
                                    : (run.count - run.head) / Body::kLanes;
  return std::max<std::uint64_t>((vectors + kVectors - 1) / kVectors, 1);
}

// What one thread does. A Body has constants kLanes and kUnroll, and
// operator()<kLanes, kUnroll>(first, step): takes the vectors of kLanes elements that begin at
// element `first`, `first + step`, ... (kUnroll of them), and loads all before it stores any.
template <class Body>
HEDDLE_HOST_DEVICE void RunThread(const Body& body, const Run& run, std::uint64_t block,
                                  unsigned thread) {
  constexpr int kLanes = Body::kLanes;
  constexpr int kUnroll = Body::kUnroll;
  constexpr std::uint64_t kVectors = std::uint64_t{kBlockThreads} * kUnroll;
  if (run.head == Run::kNotAlike) {
    const std::uint64_t begin = block * kVectors * kLanes;
    const std::uint64_t past = begin + kVectors * kLanes;
    const std::uint64_t end = past < run.count ? past : run.count;
    for (std::uint64_t i = begin + thread; i < end; i += kBlockThreads) {
      body.template operator()<1, 1>(i, 0);
    }
    return;
  }
  const std::uint64_t vectors = (run.count - run.head) / kLanes;
  const std::uint64_t begin = block * kVectors;
  if (begin + kVectors <= vectors) {
    body.template operator()<kLanes, kUnroll>(run.head + (begin + thread) * kLanes,
                                              std::uint64_t{kBlockThreads} * kLanes);
  } else {
    for (std::uint64_t v = begin + thread; v < vectors; v += kBlockThreads) {
      body.template operator()<kLanes, 1>(run.head + v * kLanes, 0);
    }
  }
  if (block == 0 && thread < run.count - vectors * kLanes) {
    const std::uint64_t i = thread < run.head ? thread : vectors * kLanes + thread;
    body.template operator()<1, 1>(i, 0);
  }
}

}  // namespace heddle::ops::cuda
