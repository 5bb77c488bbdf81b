#include "storage/row_sparse_gpu.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "storage/gpu_steps.h"
#include "storage/gpus.h"
#include "storage/row_sparse_kernels.h"
#include "storage/row_sparse_state.h"

namespace heddle::storage {

using internal::kIdBytes;
using internal::RowSparseState;
using internal::StateOf;
using internal::ToRead;
using internal::ToWrite;

namespace {

std::size_t RowBytes(const RowSparseState& state) {
  return static_cast<std::size_t>(state.rows.row_bytes());
}

}  // namespace

void PushToDenseOnGpu(const RowSparseNDArray& src, const NDArray& dst, int priority) {
  OpOptions options{
      .name = "CopyTo", .reads = {src.var()}, .writes = {dst.var()}, .device = dst.device()};
  if (dst.is_partial()) options.reads = {src.var(), dst.var()};
  options.lane = Lane::kCopy;
  options.priority = priority;
  dst.engine().PushGpu(options, [&gpus = Gpus::Of(dst.engine()), src, dst](GpuStream stream) {
    const RowSparseState& from = ToRead(src);
    if (dst.size() == 0) return;
    gpus.kernels().Fill(dst.dtype(), ops::Scalar(0), dst.data(),
                        static_cast<std::size_t>(dst.size()), stream);
    if (from.rows.count() == 0) return;
    gpus.row_kernels().ScatterRows(from.rows.gpu_view(), RowBytes(from), dst.data(), stream);
  });
}

namespace {

struct Compaction {
  NDArray dense;
  RowSparseNDArray out;
  NDArray ids = {};  // with room for all rows
  NDArray scratch = {};
  NDArray count = {};    // of the GPU
  NDArray counted = {};  // pinned

  bool Begin() const { return dense.size() > 0; }
  void First(GpuStream stream) {
    const RowSparseState& state = StateOf(out);
    Gpus& gpus = Gpus::Of(state.engine);
    const ops::GpuRowKernels& kernels = gpus.row_kernels();
    const auto rows = static_cast<std::size_t>(state.shape[0]);
    ids = Memory(state.shape[0], DType::kInt64);
    scratch =
        Memory(static_cast<std::int64_t>(kernels.NonZeroRowsScratchBytes(rows)), DType::kUInt8);
    count = Memory(1, DType::kInt64);
    counted = NDArray({1}, DType::kInt64, CpuPinned(state.device.id), state.engine);
    kernels.NonZeroRows(state.dtype, static_cast<std::size_t>(state.row_size), dense.const_data(),
                        rows, ids.data<std::int64_t>(), count.data<std::int64_t>(), scratch.data(),
                        stream);
    gpus.driver().Copy(stream.handle, counted.data(), count.const_data(), kIdBytes);
  }
  void Second(GpuStream stream) const {
    RowSparseState& state = StateOf(out);
    const std::int64_t found = *counted.data<const std::int64_t>();
    state.rows.Reset(found);
    if (found == 0) return;
    state.rows.set_count(0);  // should what follows fail
    const Gpus& gpus = Gpus::Of(state.engine);
    gpus.driver().Copy(stream.handle, state.rows.ids(), ids.const_data(), found * kIdBytes);
    gpus.row_kernels().GatherDenseRows(dense.const_data(),
                                       {state.rows.ids(), static_cast<std::size_t>(found)},
                                       RowBytes(state), state.rows.rows(), stream);
    state.rows.set_count(found);
  }

  NDArray Memory(std::int64_t elements, DType dtype) const {
    return NDArray({elements}, dtype, out.device(), out.engine());
  }
};

}  // namespace

void PushFromDenseOnGpu(const NDArray& dense, const RowSparseNDArray& out, int priority) {
  OpOptions options{
      .name = "FromDense", .reads = {dense.var()}, .writes = {out.var()}, .device = out.device()};
  options.priority = priority;
  PushGpuSteps(out.engine(), options, std::make_shared<Compaction>(Compaction{dense, out}));
}

void PushRetainOnGpu(const RowSparseNDArray& src, const NDArray& row_ids,
                     const RowSparseNDArray& out, int priority) {
  Engine& engine = src.engine();
  // First the ids, sorted and unique; the rest of the array is not used.
  const NDArray wanted({row_ids.size()}, DType::kInt64, CpuPinned(src.device().id), engine);
  const auto count = std::make_shared<std::int64_t>(0);
  OpOptions options{.name = "Retain", .reads = {row_ids.var()}, .writes = {wanted.var()}};
  options.priority = priority;
  engine.Push(options, [row_ids, wanted, count, num_rows = src.shape()[0]] {
    const std::vector<std::int64_t> sorted = SortedRowIds(row_ids, num_rows);
    std::ranges::copy(sorted, wanted.data<std::int64_t>());
    *count = static_cast<std::int64_t>(sorted.size());
  });
  options.reads = {src.var(), wanted.var()};
  options.writes = {out.var()};
  options.device = out.device();
  engine.PushGpu(options, [&gpus = Gpus::Of(engine), src, wanted, count, out](GpuStream stream) {
    const RowSparseState& from = ToRead(src);
    RowSparseState& to = ToWrite(out);
    if (from.rows.count() == 0 || *count == 0) return to.rows.Reset(0);
    to.rows.Reset(*count);
    to.rows.set_count(0);  // should what follows fail
    gpus.driver().Copy(stream.handle, to.rows.ids(), wanted.const_data(), *count * kIdBytes);
    if (from.row_size > 0) {
      gpus.row_kernels().GatherRows(from.rows.gpu_view(),
                                    {to.rows.ids(), static_cast<std::size_t>(*count)},
                                    RowBytes(from), to.rows.rows(), stream);
    }
    to.rows.set_count(*count);
  });
}

}  // namespace heddle::storage
