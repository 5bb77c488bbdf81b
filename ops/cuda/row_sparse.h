// ops/row_ids.h and ops/row_sparse.h on a GPU: row ids, and rows under their ids. All arrays lie in
// memory that the stream's device reaches.
//
// Results whose number only the GPU knows come with a count in its memory. Scratch memory: as many
// bytes as the function beside says, aligned to 256, for nothing else until the stream is done.
// Errors: CudaError if a launch fails.
#pragma once

#include <heddle/dtype.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "ops/cuda/stream.h"
#include "ops/gpu_tasks.h"

namespace heddle::ops::cuda {

// out[i] = ids[i] as an int64, for `count` ids of `dtype`, each a whole number in [0, num_rows).
// *first_bad becomes the place of the first id that is none, or `count`.
// Errors: InvalidArgument if dtype is bool; nothing is launched then.
void ReadRowIds(DType dtype, const void* ids, std::size_t count, std::int64_t num_rows,
                std::int64_t* out, std::uint64_t* first_bad, Stream stream);

// Sorts ids, none of them negative, and removes repeats, into `out`, which may be `ids`; sets
// *out_count to how many remain. One radix sort and one pass.
std::size_t SortUniqueScratchBytes(std::size_t count);
void SortUnique(const std::int64_t* ids, std::size_t count, std::int64_t* out,
                std::int64_t* out_count, void* scratch, Stream stream);

// out[i] = the row of value with id wanted[i], zeros if it is not there; wanted in any order.
void GatherRows(const GpuRows& value, const GpuIds& wanted, std::size_t row_bytes, void* out,
                Stream stream);

// places[i] = the place of wanted[i] among the ids of value, or -1.
void FindRows(const GpuIds& value, const GpuIds& wanted, std::int64_t* places, Stream stream);

// Insertion of rows of zeros into a value, which may have no rows yet. First before[i], for i from
// 0 to wanted.count, becomes how many of the first i ids of `wanted` value lacks: the last one is
// by how many rows it grows. Then all ids of both, sorted, and their rows are written apart.
std::size_t CountMissingScratchBytes(std::size_t wanted);
void CountMissing(const GpuIds& value, const GpuIds& wanted, std::int64_t* before, void* scratch,
                  Stream stream);
void InsertRows(const GpuRows& value, const GpuIds& wanted, const std::int64_t* before,
                std::size_t row_bytes, std::int64_t* out_ids, void* out_rows, Stream stream);

// flags[i] = 1 if value has a row with id wanted[i], else 0. With SelectFlagged, what to retain.
void FlagPresent(const GpuRows& value, const std::int64_t* wanted, std::size_t wanted_count,
                 std::uint8_t* flags, Stream stream);

// The rows of a dense array, of which `dense` has those from `first_row` on, become those of value;
// the others stay.
void ScatterRows(const GpuRows& value, std::size_t row_bytes, void* dense, std::int64_t first_row,
                 Stream stream);

// The same, but the rows of value are added, by the rules of ops/sum.h.
void AddRows(DType dtype, std::size_t row_elements, const GpuRows& value, void* dense,
             std::int64_t first_row, Stream stream);

// flags[i] = 1 if row i of the dense array has an element that is not zero (a NaN is not), else 0.
void FlagNonZeroRows(DType dtype, std::size_t row_elements, const void* dense, std::uint8_t* flags,
                     std::size_t rows, Stream stream);

// Writes those of `count` ids whose flag is not 0, in their order; null ids: first, first + 1, ...
// Sets *out_count to how many.
std::size_t SelectFlaggedScratchBytes(std::size_t count);
void SelectFlagged(const std::int64_t* ids, std::int64_t first, const std::uint8_t* flags,
                   std::size_t count, std::int64_t* out, std::int64_t* out_count, void* scratch,
                   Stream stream);

// out[i] = row ids[i] - first_row of the dense array.
void GatherDenseRows(const void* dense, std::int64_t first_row, const GpuIds& ids,
                     std::size_t row_bytes, void* out, Stream stream);

// The sum of the rows of several values, `total` in all and all there, as ops/row_sparse.h's
// SumRows makes it of merged rows: the same bits (of a NaN, only that it is one). There is room for
// `total` ids and rows; *out_count becomes how many there are. One radix sort of the ids, and one
// pass over the rows.
std::size_t SumRowsScratchBytes(std::size_t total);
void SumRows(DType dtype, std::size_t row_elements, std::span<const GpuRows> inputs,
             std::int64_t* out_ids, void* out_rows, std::int64_t* out_count, void* scratch,
             Stream stream);

}  // namespace heddle::ops::cuda
