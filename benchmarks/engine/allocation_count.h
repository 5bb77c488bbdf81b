// Counts the heap allocations of the whole program, by taking the place of malloc and its family.
#pragma once

#include <cstdint>

namespace heddle::bench {

// Allocations of all threads since the program started.
std::uint64_t AllocationCount();

}  // namespace heddle::bench
