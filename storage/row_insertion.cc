#include "storage/row_insertion.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "storage/gpu_steps.h"
#include "storage/gpus.h"

namespace heddle::storage {

using internal::kIdBytes;
using internal::RowSparseState;
using internal::RowStorage;
using internal::StateOf;
using ops::GpuIds;
using ops::GpuRows;

namespace {

NDArray Memory(const RowSparseState& array, std::int64_t count, DType dtype) {
  return NDArray({count}, dtype, array.device, array.engine);
}

}  // namespace

void RowInsertion::Count(const RowSparseState& array, const GpuIds& wanted, GpuStream stream) {
  if (wanted.count == 0 || array.rows.count() == array.shape[0]) return;
  Gpus& gpus = Gpus::Of(array.engine);
  const ops::GpuRowKernels& kernels = gpus.row_kernels();
  const std::size_t scratch_bytes = kernels.CountMissingScratchBytes(wanted.count);
  wanted_ = wanted;
  before_ = Memory(array, static_cast<std::int64_t>(wanted.count) + 1, DType::kInt64);
  scratch_ = Memory(array, static_cast<std::int64_t>(scratch_bytes), DType::kUInt8);
  missing_ = NDArray({1}, DType::kInt64, CpuPinned(array.device.id), array.engine);
  auto* const before = before_.data<std::int64_t>();
  kernels.CountMissing(array.rows.gpu_view().list(), wanted, before, scratch_.data(), stream);
  gpus.driver().Copy(stream.handle, missing_.data(), before + wanted.count, kIdBytes);
}

RowStorage RowInsertion::Insert(RowSparseState& array, GpuStream stream) const {
  RowStorage larger = array.rows.Another(0);
  const std::int64_t missing = before_.empty() ? 0 : *missing_.data<const std::int64_t>();
  if (missing == 0) return larger;
  const std::int64_t count = array.rows.count() + missing;
  larger = array.rows.Another(count);
  Gpus::Of(array.engine)
      .row_kernels()
      .InsertRows(array.rows.gpu_view(), wanted_, before_.data<const std::int64_t>(),
                  static_cast<std::size_t>(array.rows.row_bytes()), larger.ids(), larger.rows(),
                  stream);
  larger.set_count(count);
  std::swap(array.rows, larger);
  return larger;
}

namespace {

struct Addition {
  RowSparseNDArray to;
  RowSparseNDArray other;
  RowInsertion insertion = {};
  NDArray places = {};
  std::optional<RowStorage> replaced = std::nullopt;

  static bool Begin() { return true; }
  void First(GpuStream stream) {
    insertion.Count(StateOf(to), StateOf(other).rows.gpu_view().list(), stream);
  }
  void Second(GpuStream stream) {
    RowSparseState& state = StateOf(to);
    replaced.emplace(insertion.Insert(state, stream));
    const GpuRows added = StateOf(other).rows.gpu_view();
    if (added.count == 0 || state.row_size == 0) return;
    const ops::GpuRowKernels& kernels = Gpus::Of(state.engine).row_kernels();
    places = Memory(state, static_cast<std::int64_t>(added.count), DType::kInt64);
    auto* const at = places.data<std::int64_t>();
    kernels.FindRows(state.rows.gpu_view().list(), added.list(), at, stream);
    kernels.AddRows(state.dtype, static_cast<std::size_t>(state.row_size),
                    {at, added.count, added.rows}, state.rows.rows(), stream);
  }
};

}  // namespace

void PushAddOnGpu(const RowSparseNDArray& to, const RowSparseNDArray& other) {
  Engine& engine = to.engine();
  const OpOptions options{
      .name = "Add", .reads = {to.var(), other.var()}, .writes = {to.var()}, .device = to.device()};
  if (!to.IsSameAs(other)) {
    PushGpuSteps(engine, options, std::make_shared<Addition>(Addition{to, other}));
    return;
  }
  engine.PushGpu(options, [to](GpuStream stream) {
    const RowSparseState& state = internal::ToWrite(to);
    const auto count = static_cast<std::size_t>(state.rows.count() * state.row_size);
    if (count == 0) return;
    const void* const twice[] = {state.rows.rows(), state.rows.rows()};
    const ops::SumTask task = {twice, state.rows.rows(), count};
    Gpus::Of(state.engine).kernels().Sum(state.dtype, {&task, 1}, stream);
  });
}

namespace {

struct Summation {
  std::vector<RowSparseNDArray> inputs;
  RowSparseNDArray out;
  NDArray scratch = {};
  NDArray count = {};    // of the GPU
  NDArray counted = {};  // pinned; empty: no input has rows
  std::optional<RowStorage> sum = std::nullopt;

  static bool Begin() { return true; }
  void First(GpuStream stream) {
    const RowSparseState& state = StateOf(out);
    std::vector<GpuRows> values;
    std::size_t total = 0;
    for (const RowSparseNDArray& input : inputs) {
      const GpuRows rows = StateOf(input).rows.gpu_view();
      if (rows.count == 0) continue;
      values.push_back(rows);
      total += rows.count;
    }
    sum.emplace(state.rows.Another(static_cast<std::int64_t>(total)));
    if (total == 0) return;
    Gpus& gpus = Gpus::Of(state.engine);
    const ops::GpuRowKernels& kernels = gpus.row_kernels();
    scratch =
        Memory(state, static_cast<std::int64_t>(kernels.SumRowsScratchBytes(total)), DType::kUInt8);
    count = Memory(state, 1, DType::kInt64);
    counted = NDArray({1}, DType::kInt64, CpuPinned(state.device.id), state.engine);
    kernels.SumRows(state.dtype, static_cast<std::size_t>(state.row_size), values, sum->ids(),
                    sum->rows(), count.data<std::int64_t>(), scratch.data(), stream);
    gpus.driver().Copy(stream.handle, counted.data(), count.const_data(), kIdBytes);
  }
  void Second(GpuStream /*stream*/) {
    sum->set_count(counted.empty() ? 0 : *counted.data<const std::int64_t>());
    std::swap(StateOf(out).rows, *sum);
  }
};

}  // namespace

void PushSumOnGpu(std::span<const RowSparseNDArray> inputs, const RowSparseNDArray& out,
                  int priority) {
  std::vector<VarRef> reads;
  for (const RowSparseNDArray& input : inputs) reads.emplace_back(input.var());
  OpOptions options{.name = "Sum", .reads = reads, .writes = {out.var()}, .device = out.device()};
  options.priority = priority;
  PushGpuSteps(out.engine(), options,
               std::make_shared<Summation>(Summation{{inputs.begin(), inputs.end()}, out}));
}

}  // namespace heddle::storage
