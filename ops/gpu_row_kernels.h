// The kernels over rows that arrays on GPUs need, behind one interface: CUDA's (ops/cuda/), or
// those of simulated devices in tests.
#pragma once

#include <heddle/dtype.h>
#include <heddle/gpu.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "ops/gpu_tasks.h"

namespace heddle::ops {

// Each issues on `stream`, whose device is current and reaches all pointers, what the function of
// its name in ops/row_sparse.h does at once: the same bits (of a NaN, only that it is one). Counts
// are above 0. Scratch memory: as many bytes as the function beside says, aligned to 256, for
// nothing else until the stream is done.
//
// Errors:  CudaError if a launch fails.
// Threads: all methods, any thread.
class GpuRowKernels {
 public:
  virtual ~GpuRowKernels() = default;

  // The sum of the rows of all inputs, `total` in all, by their ids: there is room for as many in
  // out_ids and out_rows. *out_count becomes how many ids there are; what lies behind is undefined.
  virtual std::size_t SumRowsScratchBytes(std::size_t total) const = 0;
  virtual void SumRows(DType dtype, std::size_t row_elements, std::span<const GpuRows> inputs,
                       std::int64_t* out_ids, void* out_rows, std::int64_t* out_count,
                       void* scratch, GpuStream stream) const = 0;

  // out[i] = the row of the dense array with id ids[i].
  virtual void GatherDenseRows(const void* dense, const GpuIds& ids, std::size_t row_bytes,
                               void* out, GpuStream stream) const = 0;
  virtual void ScatterRows(const GpuRows& value, std::size_t row_bytes, void* dense,
                           GpuStream stream) const = 0;
  virtual void AddRows(DType dtype, std::size_t row_elements, const GpuRows& value, void* dense,
                       GpuStream stream) const = 0;

  // out[i] = the row of value with id wanted[i], zeros if it is not there.
  virtual void GatherRows(const GpuRows& value, const GpuIds& wanted, std::size_t row_bytes,
                          void* out, GpuStream stream) const = 0;
  // places[i] = the place of wanted[i] among the ids of value, or -1.
  virtual void FindRows(const GpuIds& value, const GpuIds& wanted, std::int64_t* places,
                        GpuStream stream) const = 0;

  // Insertion, in two steps; value may have no ids, and null pointers then. First before[i], for i
  // from 0 to wanted.count, becomes how many of the first i ids of `wanted` value lacks: the last
  // one is by how many rows the value grows. Then all ids of both are written, sorted, and their
  // rows: those of value, zeros for the others.
  virtual std::size_t CountMissingScratchBytes(std::size_t wanted) const = 0;
  virtual void CountMissing(const GpuIds& value, const GpuIds& wanted, std::int64_t* before,
                            void* scratch, GpuStream stream) const = 0;
  virtual void InsertRows(const GpuRows& value, const GpuIds& wanted, const std::int64_t* before,
                          std::size_t row_bytes, std::int64_t* out_ids, void* out_rows,
                          GpuStream stream) const = 0;

  // The ids of those of `rows` rows that have an element which is not zero (a NaN is not): there is
  // room for all. *out_count becomes how many.
  virtual std::size_t NonZeroRowsScratchBytes(std::size_t rows) const = 0;
  virtual void NonZeroRows(DType dtype, std::size_t row_elements, const void* dense,
                           std::size_t rows, std::int64_t* out_ids, std::int64_t* out_count,
                           void* scratch, GpuStream stream) const = 0;
};

// Those of ops/cuda/. Without CUDA there is no device to call them for.
const GpuRowKernels& CudaRowKernels();

}  // namespace heddle::ops
