#include <heddle/error.h>

#include <algorithm>
#include <utility>

#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#include <cub/device/device_select.cuh>
#include <thrust/iterator/counting_iterator.h>

#include "ops/cuda/copy.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/row_insert_plan.h"
#include "ops/cuda/row_sparse.h"
#include "ops/cuda/row_sparse_plan.h"
#include "ops/cuda/row_sum_plan.h"

namespace heddle::ops::cuda {

namespace {

constexpr std::size_t kScratchAlignment = 256;
constexpr int kIdBits = 63;  // no id is negative

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

template <class Body>
void LaunchOver(const char* kernel, const Body& body, std::size_t count, Stream stream) {
  const auto launch = [&](const auto& table) { LaunchTable(kernel, table, stream); };
  Packer<Body, decltype(launch)> packer(launch);
  packer.Add(body, {.count = count, .head = 0});
  packer.Flush();
}

std::size_t Aligned(std::size_t bytes) {
  return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
}

// Addresses of rows are sorted as numbers.
std::size_t SortPairsBytes(std::size_t count) {
  std::size_t bytes = 0;
  const std::int64_t* const ids = nullptr;
  std::int64_t* const sorted = nullptr;
  const std::uint64_t* const rows = nullptr;
  std::uint64_t* const sorted_rows = nullptr;
  CUDA_CHECK(
      cub::DeviceRadixSort::SortPairs(nullptr, bytes, ids, sorted, rows, sorted_rows, count));
  return bytes;
}

// What CUB wants for itself.
std::size_t SortBytes(std::size_t count) {
  std::size_t bytes = 0;
  const std::int64_t* const ids = nullptr;
  std::int64_t* const sorted = nullptr;
  CUDA_CHECK(cub::DeviceRadixSort::SortKeys(nullptr, bytes, ids, sorted, count));
  return bytes;
}

std::size_t RunningSumBytes(std::size_t count) {
  std::size_t bytes = 0;
  const std::int64_t* const flags = nullptr;
  std::int64_t* const sums = nullptr;
  CUDA_CHECK(
      cub::DeviceScan::ExclusiveSum(nullptr, bytes, flags, sums, static_cast<std::int64_t>(count)));
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
  CUDA_CHECK(cub::DeviceRadixSort::SortKeys(own, bytes, ids, sorted, count, 0, kIdBits, stream));
  bytes = UniqueBytes(count);
  CUDA_CHECK(cub::DeviceSelect::Unique(own, bytes, sorted, out, out_count,
                                       static_cast<std::int64_t>(count), stream));
}

void GatherRows(const GpuRows& value, const GpuIds& wanted, std::size_t row_bytes, void* out,
                Stream stream) {
  LaunchRows("gather rows",
             GatherRowsBody{value, wanted, static_cast<std::byte*>(out),
                            RowCopy(row_bytes, value.rows, out)},
             wanted.count, stream);
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

void GatherDenseRows(const void* dense, std::int64_t first_row, const GpuIds& ids,
                     std::size_t row_bytes, void* out, Stream stream) {
  LaunchRows("gather dense rows",
             GatherDenseRowsBody{static_cast<const std::byte*>(dense), first_row, ids,
                                 static_cast<std::byte*>(out), RowCopy(row_bytes, dense, out)},
             ids.count, stream);
}

void FindRows(const GpuIds& value, const GpuIds& wanted, std::int64_t* places, Stream stream) {
  LaunchOver("find rows", FindRowsBody{value, wanted, places}, wanted.count, stream);
}

std::size_t CountMissingScratchBytes(std::size_t wanted) {
  return Aligned((wanted + 1) * sizeof(std::int64_t)) + RunningSumBytes(wanted + 1);
}

void CountMissing(const GpuIds& value, const GpuIds& wanted, std::int64_t* before, void* scratch,
                  Stream stream) {
  const std::size_t count = wanted.count + 1;
  auto* const flags = static_cast<std::int64_t*>(scratch);
  void* const own = static_cast<std::byte*>(scratch) + Aligned(count * sizeof(std::int64_t));
  LaunchOver("flag missing rows", FlagMissingBody{value, wanted, flags}, count, stream);
  std::size_t bytes = RunningSumBytes(count);
  CUDA_CHECK(cub::DeviceScan::ExclusiveSum(own, bytes, static_cast<const std::int64_t*>(flags),
                                           before, static_cast<std::int64_t>(count), stream));
}

void InsertRows(const GpuRows& value, const GpuIds& wanted, const std::int64_t* before,
                std::size_t row_bytes, std::int64_t* out_ids, void* out_rows, Stream stream) {
  auto* const rows = static_cast<std::byte*>(out_rows);
  LaunchRows(
      "move rows",
      MoveRowsBody{value, wanted, before, out_ids, rows, RowCopy(row_bytes, value.rows, out_rows)},
      value.count, stream);
  LaunchRows("add rows of zeros",
             AddZeroRowsBody{value.list(), wanted, before, out_ids, rows,
                             RowCopy(row_bytes, out_rows, out_rows)},
             wanted.count, stream);
}

namespace {

// What SumRows works with, in its scratch memory.
struct SumRowsMemory {
  std::int64_t* listed_ids;  // after the sort: where the ids begin
  const std::byte** listed_rows;
  std::int64_t* ids;
  const std::byte** rows;
  std::uint8_t* flags;
  void* own;  // CUB's

  SumRowsMemory(void* scratch, std::size_t total) {
    auto* next = static_cast<std::byte*>(scratch);
    const auto take = [&](std::size_t bytes) { return std::exchange(next, next + Aligned(bytes)); };
    listed_ids = reinterpret_cast<std::int64_t*>(take(total * sizeof(std::int64_t)));
    listed_rows = reinterpret_cast<const std::byte**>(take(total * sizeof(const std::byte*)));
    ids = reinterpret_cast<std::int64_t*>(take(total * sizeof(std::int64_t)));
    rows = reinterpret_cast<const std::byte**>(take(total * sizeof(const std::byte*)));
    flags = reinterpret_cast<std::uint8_t*>(take(total));
    own = next;
  }
};

}  // namespace

std::size_t SumRowsScratchBytes(std::size_t total) {
  return 4 * Aligned(total * sizeof(std::int64_t)) + Aligned(total) +
         std::max(SortPairsBytes(total), SelectFlaggedScratchBytes(total));
}

void SumRows(DType dtype, std::size_t row_elements, std::span<const GpuRows> inputs,
             std::int64_t* out_ids, void* out_rows, std::int64_t* out_count, void* scratch,
             Stream stream) {
  std::size_t total = 0;
  for (const GpuRows& input : inputs) total += input.count;
  const SumRowsMemory memory(scratch, total);

  const auto list = [&](const auto& table) { LaunchTable("list rows", table, stream); };
  Packer<ListRowsBody, decltype(list)> packer(list);
  std::size_t listed = 0;
  for (const GpuRows& input : inputs) {
    packer.Add({input.ids, static_cast<const std::byte*>(input.rows), row_elements * SizeOf(dtype),
                memory.listed_ids + listed, memory.listed_rows + listed},
               {.count = input.count, .head = 0});
    listed += input.count;
  }
  packer.Flush();

  std::size_t bytes = SortPairsBytes(total);
  CUDA_CHECK(cub::DeviceRadixSort::SortPairs(
      memory.own, bytes, static_cast<const std::int64_t*>(memory.listed_ids), memory.ids,
      reinterpret_cast<const std::uint64_t*>(memory.listed_rows),
      reinterpret_cast<std::uint64_t*>(memory.rows), total, 0, kIdBits, stream));
  LaunchOver("flag ids", FlagFirstBody{memory.ids, memory.flags}, total, stream);
  std::int64_t* const starts = memory.listed_ids;
  SelectFlagged(nullptr, 0, memory.flags, total, starts, out_count, memory.own, stream);
  DispatchDType(dtype, [&](auto type) {
    using T = WrappingType<typename decltype(type)::type>;
    LaunchRows("sum rows",
               SumListedRowsBody<T>{memory.ids, memory.rows, total, starts, out_count, row_elements,
                                    out_ids, static_cast<StorageType<T>*>(out_rows)},
               total, stream);
  });
}

}  // namespace heddle::ops::cuda
