#include "ops/gpu_row_kernels.h"

#include <cstddef>
#include <cstdint>
#include <span>

#include "ops/cuda/row_sparse.h"

namespace heddle::ops {
namespace {

constexpr std::size_t kScratchAlignment = 256;

cuda::Stream ToStream(GpuStream stream) { return static_cast<cuda::Stream>(stream.handle); }

std::size_t Aligned(std::size_t bytes) {
  return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
}

class AllCudaRowKernels final : public GpuRowKernels {
 public:
  std::size_t SumRowsScratchBytes(std::size_t total) const override {
    return cuda::SumRowsScratchBytes(total);
  }
  void SumRows(DType dtype, std::size_t row_elements, std::span<const GpuRows> inputs,
               std::int64_t* out_ids, void* out_rows, std::int64_t* out_count, void* scratch,
               GpuStream stream) const override {
    cuda::SumRows(dtype, row_elements, inputs, out_ids, out_rows, out_count, scratch,
                  ToStream(stream));
  }
  void GatherDenseRows(const void* dense, const GpuIds& ids, std::size_t row_bytes, void* out,
                       GpuStream stream) const override {
    cuda::GatherDenseRows(dense, 0, ids, row_bytes, out, ToStream(stream));
  }
  void ScatterRows(const GpuRows& value, std::size_t row_bytes, void* dense,
                   GpuStream stream) const override {
    cuda::ScatterRows(value, row_bytes, dense, 0, ToStream(stream));
  }
  void AddRows(DType dtype, std::size_t row_elements, const GpuRows& value, void* dense,
               GpuStream stream) const override {
    cuda::AddRows(dtype, row_elements, value, dense, 0, ToStream(stream));
  }
  void GatherRows(const GpuRows& value, const GpuIds& wanted, std::size_t row_bytes, void* out,
                  GpuStream stream) const override {
    cuda::GatherRows(value, wanted, row_bytes, out, ToStream(stream));
  }
  void FindRows(const GpuIds& value, const GpuIds& wanted, std::int64_t* places,
                GpuStream stream) const override {
    cuda::FindRows(value, wanted, places, ToStream(stream));
  }
  std::size_t CountMissingScratchBytes(std::size_t wanted) const override {
    return cuda::CountMissingScratchBytes(wanted);
  }
  void CountMissing(const GpuIds& value, const GpuIds& wanted, std::int64_t* before, void* scratch,
                    GpuStream stream) const override {
    cuda::CountMissing(value, wanted, before, scratch, ToStream(stream));
  }
  void InsertRows(const GpuRows& value, const GpuIds& wanted, const std::int64_t* before,
                  std::size_t row_bytes, std::int64_t* out_ids, void* out_rows,
                  GpuStream stream) const override {
    cuda::InsertRows(value, wanted, before, row_bytes, out_ids, out_rows, ToStream(stream));
  }
  std::size_t NonZeroRowsScratchBytes(std::size_t rows) const override {
    return Aligned(rows) + cuda::SelectFlaggedScratchBytes(rows);
  }
  void NonZeroRows(DType dtype, std::size_t row_elements, const void* dense, std::size_t rows,
                   std::int64_t* out_ids, std::int64_t* out_count, void* scratch,
                   GpuStream stream) const override {
    auto* const flags = static_cast<std::uint8_t*>(scratch);
    cuda::FlagNonZeroRows(dtype, row_elements, dense, flags, rows, ToStream(stream));
    cuda::SelectFlagged(nullptr, 0, flags, rows, out_ids, out_count, flags + Aligned(rows),
                        ToStream(stream));
  }
};

}  // namespace

const GpuRowKernels& CudaRowKernels() {
  static const AllCudaRowKernels kernels;
  return kernels;
}

}  // namespace heddle::ops
