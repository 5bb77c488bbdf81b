#include "kvstore/gpu_work.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <utility>

#include "engine/access_check.h"
#include "storage/array_state.h"
#include "storage/gpus.h"

namespace heddle::kvstore {

using storage::Gpus;

namespace {

std::size_t Count(const NDArray& array) { return static_cast<std::size_t>(array.size()); }

std::vector<const void*> Addresses(std::span<const NDArray> arrays) {
  std::vector<const void*> addresses;
  for (const NDArray& array : arrays) addresses.push_back(array.const_data());
  return addresses;
}

GpuWork::Pending::Copy CopyOf(const NDArray& from, const NDArray& to) {
  return {from.dtype(), to.dtype(), from.const_data(), to.data(), Count(from)};
}

}  // namespace

const GpuUpdates& GpuUpdatesOf(const Engine& engine) {
  // Simulated devices have updates of their own.
  const auto* const own = dynamic_cast<const GpuUpdates*>(engine.options().gpu_driver.get());
  return own != nullptr ? *own : CudaUpdates();
}

void GpuWork::Sum(std::span<const NDArray> inputs, const NDArray& out) const {
  if (inputs.size() == 1) return CopyOut(inputs[0], {&out, 1});
  if (out.size() == 0) return;
  pending_.sums.push_back(
      {out.dtype(), Addresses(inputs), out.data(), Count(out), CarryFor(inputs.size(), out)});
}

void* GpuWork::CarryFor(std::size_t inputs, const NDArray& out) const {
  if (inputs <= kGpuInputsMax) return nullptr;
  const NDArray carry = internal::NewArrayWith(out.var(), out.shape(), ops::CarryDType(out.dtype()),
                                               out.device(), engine_);
  Keep(carry);
  return carry.data();
}

void GpuWork::CopyOut(const NDArray& from, std::span<const NDArray> out) const {
  if (from.size() == 0) return;
  if (pending_.copies.empty()) pending_.copies.reserve(pending_.keys);
  for (const NDArray& to : out) pending_.copies.push_back(CopyOf(from, to));
}

void GpuWork::Update(const ArrayUpdate& update, const NDArray& gradient) const {
  if (gradient.size() == 0) return;
  if (pending_.updates.empty()) pending_.updates.reserve(pending_.keys);
  pending_.updates.push_back({update, gradient.const_data(), Count(gradient)});
}

void GpuWork::Issue() const {
  IssueCopies(pending_.copies);
  IssueSums();
  IssueUpdates();
}

void GpuWork::IssueCopies(std::span<const Pending::Copy> copies) const {
  Gpus& gpus = Gpus::Of(engine_);
  std::vector<ops::CopyTask> same;
  same.reserve(copies.size());
  std::map<std::pair<DType, DType>, std::vector<ops::CastTask>> casts;
  for (const Pending::Copy& copy : copies) {
    if (copy.from != copy.to) {
      casts[{copy.from, copy.to}].push_back({copy.source, copy.out, copy.count});
    } else if (copy.source != copy.out) {
      same.push_back({copy.source, copy.out, copy.count * SizeOf(copy.from)});
    }
  }
  if (same.size() == 1) {  // no kernel is faster
    gpus.driver().Copy(stream_.handle, same[0].out, same[0].source,
                       static_cast<std::int64_t>(same[0].bytes));
  } else if (!same.empty()) {
    gpus.kernels().Copy(same, stream_);
  }
  for (const auto& [dtypes, tasks] : casts) {
    gpus.kernels().Cast(dtypes.first, dtypes.second, tasks, stream_);
  }
}

void GpuWork::IssueSums() const {
  std::map<DType, std::vector<ops::SumTask>> sums;
  for (const Pending::Sum& sum : pending_.sums) {
    sums[sum.dtype].push_back({sum.inputs, sum.out, sum.count, sum.carry});
  }
  for (const auto& [dtype, tasks] : sums) Gpus::Of(engine_).kernels().Sum(dtype, tasks, stream_);
}

void GpuWork::IssueUpdates() const {
  const GpuUpdates& updates = GpuUpdatesOf(engine_);
  std::map<std::pair<const internal::UpdateRule*, int>, std::vector<internal::UpdateRun>> alike;
  for (const Pending::Update& pending : pending_.updates) {
    internal::UpdateRun run = pending.update.run;
    run.update = &pending.update.key;
    run.gradient = pending.gradient;
    run.count = pending.count;
    auto& runs = alike[{pending.update.rule, pending.update.passes}];
    if (runs.empty()) runs.reserve(pending_.updates.size());
    runs.push_back(run);
  }
  for (const auto& [what, runs] : alike) {
    const auto& [rule, passes] = what;
    void* scratch = nullptr;
    if (const std::size_t bytes = updates.ScratchBytes(runs, passes); bytes > 0) {
      scratch = Temporary(bytes);
    }
    updates.Update(*rule, runs, passes, scratch, stream_);
  }
}

void* GpuWork::Temporary(std::size_t bytes) const {
  const NDArray memory({std::max<std::int64_t>(1, static_cast<std::int64_t>(bytes))}, DType::kUInt8,
                       Gpu(stream_.device), engine_);
  Keep(memory);
  return memory.data();
}

void GpuWork::Compress(const Compressor& compressor, const NDArray& gradient,
                       const NDArray& residual, const NDArray& code) const {
  if (gradient.size() == 0) return;
  compressor.CompressOnGpu(Gpus::Of(engine_).kernels(), gradient.dtype(), gradient.const_data(),
                           residual.data<float>(), code.data(), Count(gradient), stream_);
}

void GpuWork::SumCodes(const Compressor& compressor, std::span<const NDArray> codes,
                       const NDArray& out) const {
  if (out.size() == 0) return;
  compressor.SumOnGpu(Gpus::Of(engine_).kernels(), Addresses(codes), out.dtype(), out.data(),
                      static_cast<float*>(CarryFor(codes.size(), out)), Count(out), stream_);
}

void GpuWork::Copy(const NDArray& from, const NDArray& to) const {
  if (from.size() == 0) return;
  const Pending::Copy copy = CopyOf(from, to);
  IssueCopies({&copy, 1});
}

void GpuWork::FillZero(const NDArray& array) const {
  if (array.size() == 0) return;
  Gpus::Of(engine_).kernels().Fill(array.dtype(), ops::Scalar(0), array.data(), Count(array),
                                   stream_);
}

void GpuWork::Upload(const NDArray& from, const NDArray& to) const {
  if (from.size() == 0) return;
  const NDArray staged = internal::NewArrayWith(to.var(), from.shape(), from.dtype(),
                                                CpuPinned(stream_.device), to.engine());
  {
    const engine::UncheckedScope settled;  // nobody writes it any more, so it needs no order
    std::memcpy(staged.data(), from.const_data(), static_cast<std::size_t>(from.bytes()));
  }
  Keep(staged);
  Gpus::Of(engine_).driver().Copy(stream_.handle, to.data(), staged.const_data(), to.bytes());
}

}  // namespace heddle::kvstore
