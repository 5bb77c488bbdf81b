// Copies memory.
#pragma once

#include <cstddef>

#include "ops/store_mode.h"

namespace heddle::ops {

// Copies `bytes` bytes from source to out.
//
// Aliasing: the same pointer twice is allowed; no other overlap.
// Cost:     as memcpy, but faster from about 1 MiB on (one read and, streaming, one write of
// memory). Threads:  any; calls on disjoint outputs may run together.
void Copy(const void* source, void* out, std::size_t bytes, StoreMode mode = StoreMode::kAuto);

}  // namespace heddle::ops
