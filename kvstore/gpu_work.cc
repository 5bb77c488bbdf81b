#include "kvstore/gpu_work.h"

#include <cstddef>
#include <cstring>

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

}  // namespace

const GpuUpdates& GpuUpdatesOf(const Engine& engine) {
  // Simulated devices have updates of their own.
  const auto* const own = dynamic_cast<const GpuUpdates*>(engine.options().gpu_driver.get());
  return own != nullptr ? *own : CudaUpdates();
}

void GpuWork::Sum(std::span<const NDArray> inputs, const NDArray& out) const {
  if (inputs.size() == 1) return Copy(inputs[0], {&out, 1});
  if (out.size() == 0) return;
  Gpus::Of(engine_).kernels().Sum(out.dtype(), Addresses(inputs), out.data(), Count(out), stream_);
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
                      Count(out), stream_);
}

void GpuWork::Copy(const NDArray& from, std::span<const NDArray> out) const {
  if (from.size() == 0) return;
  Gpus& gpus = Gpus::Of(engine_);
  const void* const source = from.const_data();
  for (const NDArray& array : out) {
    void* const to = array.data();
    if (array.dtype() != from.dtype()) {
      gpus.kernels().Cast(from.dtype(), source, array.dtype(), to, Count(from), stream_);
    } else if (to != source) {
      gpus.driver().Copy(stream_.handle, to, source, from.bytes());
    }
  }
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

void GpuWork::Update(const ArrayUpdate& update, const NDArray& gradient) const {
  if (gradient.size() == 0) return;
  const GpuUpdates& updates = GpuUpdatesOf(engine_);
  internal::UpdateRun run = update.run;
  run.update = &update.key;
  run.gradient = gradient.const_data();
  run.count = Count(gradient);
  void* scratch = nullptr;
  if (const std::size_t bytes = updates.ScratchBytes({&run, 1}, update.passes); bytes > 0) {
    const NDArray memory({static_cast<std::int64_t>(bytes)}, DType::kUInt8, Gpu(stream_.device),
                         gradient.engine());
    scratch = memory.data();
    Keep(memory);
  }
  updates.Update(*update.rule, {&run, 1}, update.passes, scratch, stream_);
}

}  // namespace heddle::kvstore
