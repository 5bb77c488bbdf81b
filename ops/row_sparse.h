// Kernels over row-sparse values: the rows of an array that are there, each under its id, all
// others being zero.
//
// Shapes: a row has `row_elements` elements of `dtype`; ids are sorted and unique.
// Cost:   the rows touched, never the rows of the whole array, unless said otherwise.
// Threads: any; calls on disjoint outputs may run together. Who splits a call does so by ids, so
//          that a row is always computed whole.
#pragma once

#include <heddle/dtype.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "ops/store_mode.h"

namespace heddle::ops {

// A run of the rows of a value, one after another in memory.
struct SparseRows {
  std::span<const std::int64_t> ids;
  const void* rows = nullptr;  // ids.size() of them
};

// The part of `value` whose ids lie in [begin, end).
SparseRows RowsBetween(const SparseRows& value, std::size_t row_bytes, std::int64_t begin,
                       std::int64_t end);

struct RowEntry;  // ops/row_merge.h

// Writes each id of `entries`, the merged rows of some values, once, and for each the sum of its
// rows in their order, as ops/sum.h adds. There is room for CountIds(entries) ids and rows.
//
// Bits: those of the sum of the dense arrays, except that a zero of one input alone keeps its sign;
//       the same for every cut of the ids into calls.
// Cost: one pass over the rows.
void SumRows(DType dtype, std::size_t row_elements, std::span<const RowEntry> entries,
             std::int64_t* out_ids, void* out_rows);
// The sum of the rows of one id.
void SumRowsOfId(DType dtype, std::size_t row_elements, std::span<const RowEntry> entries,
                 void* out);

// out[i] = the row of value with id wanted[i], zeros if it is not there. `wanted` is sorted.
void GatherRows(const SparseRows& value, std::span<const std::int64_t> wanted,
                std::size_t row_bytes, void* out);

// The rows of a dense array, of which `dense` has those from `first_row` on, become those of
// `value`; the others stay.
void ScatterRows(const SparseRows& value, std::size_t row_bytes, void* dense,
                 std::int64_t first_row);

// The same, but the rows of `value` are added, by the rules of ops/sum.h.
void AddRows(DType dtype, std::size_t row_elements, const SparseRows& value, void* dense,
             std::int64_t first_row);

// flags[i] = 1 if row i of the dense array has an element that is not zero (a NaN is not), else 0.
// Returns how many have. Cost: the elements of the rows, at most.
std::size_t FlagNonZeroRows(DType dtype, std::size_t row_elements, const void* dense,
                            std::span<std::uint8_t> flags);

// Copies the rows with a flag, one after another, and the ids of these rows, of which the first
// flag belongs to `first_row`.
void CompactRows(std::span<const std::uint8_t> flags, std::int64_t first_row, std::size_t row_bytes,
                 const void* dense, std::int64_t* out_ids, void* out_rows);

}  // namespace heddle::ops
