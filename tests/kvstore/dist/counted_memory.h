// The memory of a test program: link counted_memory.cc, whose operator new counts.
#pragma once

#include <cstdint>

// Bytes that are allocated and not freed, as the allocator rounds them.
std::int64_t LiveBytes();
// Of those that this thread asks for from here on, so many are given and the next one is not. Less
// than 0: all are given.
void GiveAllocations(std::int64_t count);
