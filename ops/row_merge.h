// Goes through the rows of several row-sparse values in the order of their ids.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "ops/row_sparse.h"

namespace heddle::ops {

// A row of one of the values.
struct RowEntry {
  std::int64_t id;
  const void* row;
};

// The rows of all inputs by their ids, among equal ids in list order. `out` and `scratch` have room
// for all; what is returned lies in one of the two.
// Cost: for n inputs, log2(n) passes over the ids, rounded up; no branch depends on them.
std::span<const RowEntry> MergeRows(std::span<const SparseRows> inputs, std::size_t row_bytes,
                                    RowEntry* out, RowEntry* scratch);

// The number of different ids of merged rows.
std::size_t CountIds(std::span<const RowEntry> entries);

// Calls visit(rows, place) for the rows of each id of merged rows, `place` being that of the first.
template <class Visit>
void ForEachId(std::span<const RowEntry> entries, const Visit& visit) {
  for (std::size_t begin = 0; begin < entries.size();) {
    std::size_t end = begin + 1;
    while (end < entries.size() && entries[end].id == entries[begin].id) ++end;
    visit(entries.subspan(begin, end - begin), begin);
    begin = end;
  }
}

}  // namespace heddle::ops
