// How far ahead of what is at work a kernel that goes through several arrays fetches.
#pragma once

#include <cstddef>

namespace heddle::ops {

// Bytes of all its arrays together; 0: not at all. Depends on the CPU's first-level cache.
std::size_t FetchAheadBytes();

}  // namespace heddle::ops
