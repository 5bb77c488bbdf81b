// The memory of a test program: link counted_memory.cc, whose operator new counts.
#pragma once

#include <cstdint>

// Bytes that are allocated and not freed, as the allocator rounds them.
std::int64_t LiveBytes();
