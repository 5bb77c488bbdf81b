#include <heddle/error.h>

#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_select.cuh>
#include <thrust/iterator/counting_iterator.h>

#include "ops/cuda/copy.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/row_sparse.h"
#include "ops/cuda/row_sparse_plan.h"

namespace heddle::ops::cuda {

namespace {

constexpr std::size_t kScratchAlignment = 256;

template <class Body>
__global__ void __launch_bounds__(kBlockThreads)
    RunRows(const __grid_constant__ Body body, std::uint64_t rows) {
  RunRowThread(body, rows, blockIdx.x, threadIdx.x);
}

template <class Body>
void LaunchRows(const char* kernel, const Body& body, std::size_t rows, Stream stream) {
  if (rows == 0) return;
  const auto blocks = static_cast<unsigned>((rows + kRowsPerBlock - 1) / kRowsPerBlock);
  RunRows<<<blocks, kBlockThreads, 0, stream>>>(body, rows);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) ThrowCudaError(error, kernel);
}

std::size_t Aligned(std::size_t bytes) {
  return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
}

// What CUB wants for itself.
std::size_t SortBytes(std::size_t count) {
  std::size_t bytes = 0;
  const std::int64_t* const ids = nullptr;
  std::int64_t* const sorted = nullptr;
  CUDA_CHECK(cub::DeviceRadixSort::SortKeys(nullptr, bytes, ids, sorted, count));
  return bytes;
}

std::size_t UniqueBytes(std::size_t count) {
  std::size_t bytes = 0;
  std::int64_t* const ids = nullptr;
  CUDA_CHECK(
      cub::DeviceSelect::Unique(nullptr, bytes, ids, ids, ids, static_cast<std::int64_t>(count)));
  return bytes;
}

template <class Ids>
void Select(Ids ids, const std::uint8_t* flags, std::size_t count, std::int64_t* out,
            std::int64_t* out_count, void* scratch, std::size_t scratch_bytes, Stream stream) {
  CUDA_CHECK(cub::DeviceSelect::Flagged(scratch, scratch_bytes, ids, flags, out, out_count,
                                        static_cast<std::int64_t>(count), stream));
}

template <class Ids>
std::size_t SelectBytes(std::size_t count) {
  std::size_t bytes = 0;
  CUDA_CHECK(cub::DeviceSelect::Flagged(
      nullptr, bytes, Ids(), static_cast<const std::uint8_t*>(nullptr),
      static_cast<std::int64_t*>(nullptr), static_cast<std::int64_t*>(nullptr),
      static_cast<std::int64_t>(count)));
  return bytes;
}

}  // namespace

void ReadRowIds(DType dtype, const void* ids, std::size_t count, std::int64_t num_rows,
                std::int64_t* out, std::uint64_t* first_bad, Stream stream) {
  if (dtype == DType::kBool) {
    throw InvalidArgument("row ids: expected a numeric dtype, got bool");
  }
  const FillTask fill = {first_bad, 1};
  Fill(DType::kInt64, static_cast<std::int64_t>(count), {&fill, 1}, stream);
  DispatchDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (!std::is_same_v<T, bool>) {
      const auto launch = [&](const auto& table) { LaunchTable("row ids", table, stream); };
      Packer<ReadRowIdsBody<T>, decltype(launch)> packer(launch);
      packer.Add({static_cast<const T*>(ids), num_rows, out, first_bad},
                 {.count = count, .head = 0});
      packer.Flush();
    }
  });
}

std::size_t SortUniqueScratchBytes(std::size_t count) {
  return Aligned(count * sizeof(std::int64_t)) + std::max(SortBytes(count), UniqueBytes(count));
}

void SortUnique(const std::int64_t* ids, std::size_t count, std::int64_t* out,
                std::int64_t* out_count, void* scratch, Stream stream) {
  auto* const sorted = static_cast<std::int64_t*>(scratch);
  void* const own = static_cast<std::byte*>(scratch) + Aligned(count * sizeof(std::int64_t));
  std::size_t bytes = SortBytes(count);
  constexpr int kBits = 63;  // no id is negative
  CUDA_CHECK(cub::DeviceRadixSort::SortKeys(own, bytes, ids, sorted, count, 0, kBits, stream));
  bytes = UniqueBytes(count);
  CUDA_CHECK(cub::DeviceSelect::Unique(own, bytes, sorted, out, out_count,
                                       static_cast<std::int64_t>(count), stream));
}

void GatherRows(const GpuRows& value, const std::int64_t* wanted, std::size_t wanted_count,
                std::size_t row_bytes, void* out, Stream stream) {
  LaunchRows("gather rows",
             GatherRowsBody{value, wanted, static_cast<std::byte*>(out),
                            RowCopy(row_bytes, value.rows, out)},
             wanted_count, stream);
}

void FlagPresent(const GpuRows& value, const std::int64_t* wanted, std::size_t wanted_count,
                 std::uint8_t* flags, Stream stream) {
  LaunchRows("flag present rows", FlagPresentBody{value, wanted, flags}, wanted_count, stream);
}

void ScatterRows(const GpuRows& value, std::size_t row_bytes, void* dense, std::int64_t first_row,
                 Stream stream) {
  LaunchRows("scatter rows",
             ScatterRowsBody{value, static_cast<std::byte*>(dense), first_row,
                             RowCopy(row_bytes, value.rows, dense)},
             value.count, stream);
}

void AddRows(DType dtype, std::size_t row_elements, const GpuRows& value, void* dense,
             std::int64_t first_row, Stream stream) {
  DispatchDType(dtype, [&](auto type) {
    using T = WrappingType<typename decltype(type)::type>;
    LaunchRows("add rows",
               AddRowsBody<T>{value, static_cast<StorageType<T>*>(dense), first_row, row_elements},
               value.count, stream);
  });
}

void FlagNonZeroRows(DType dtype, std::size_t row_elements, const void* dense, std::uint8_t* flags,
                     std::size_t rows, Stream stream) {
  CUDA_CHECK(cudaMemsetAsync(flags, 0, rows, stream));
  DispatchDType(dtype, [&](auto type) {
    using T = WrappingType<typename decltype(type)::type>;
    LaunchRows(
        "flag rows",
        FlagNonZeroRowsBody<T>{static_cast<const StorageType<T>*>(dense), row_elements, flags},
        rows, stream);
  });
}

std::size_t SelectFlaggedScratchBytes(std::size_t count) {
  return std::max(SelectBytes<const std::int64_t*>(count),
                  SelectBytes<thrust::counting_iterator<std::int64_t>>(count));
}

void SelectFlagged(const std::int64_t* ids, std::int64_t first, const std::uint8_t* flags,
                   std::size_t count, std::int64_t* out, std::int64_t* out_count, void* scratch,
                   Stream stream) {
  const std::size_t bytes = SelectFlaggedScratchBytes(count);
  if (ids != nullptr) {
    Select(ids, flags, count, out, out_count, scratch, bytes, stream);
  } else {
    Select(thrust::counting_iterator<std::int64_t>(first), flags, count, out, out_count, scratch,
           bytes, stream);
  }
}

void GatherDenseRows(const void* dense, std::int64_t first_row, const std::int64_t* ids,
                     std::size_t count, std::size_t row_bytes, void* out, Stream stream) {
  LaunchRows("gather dense rows",
             GatherDenseRowsBody{static_cast<const std::byte*>(dense), first_row, ids,
                                 static_cast<std::byte*>(out), RowCopy(row_bytes, dense, out)},
             count, stream);
}

}  // namespace heddle::ops::cuda
