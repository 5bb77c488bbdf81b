// Copies memory to several places in one pass.
#pragma once

#include <cstddef>
#include <span>

#include "ops/store_mode.h"

namespace heddle::ops {

// Copies `bytes` bytes from source to each of `out`.
//
// Aliasing: an output may be the source, or named twice; no other overlap.
// Cost:     one read, and one write for each output. Streaming to outputs that are all aligned to
// 64
//           bytes interleaves the writes, line by line: a tenth faster than copy after copy, whose
//           reads come from a cache and leave the memory's read side idle.
// Threads:  any; calls on disjoint outputs may run together.
void FanOut(const void* source, std::span<void* const> out, std::size_t bytes,
            StoreMode mode = StoreMode::kAuto);

}  // namespace heddle::ops
