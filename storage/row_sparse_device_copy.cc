// Copies of row-sparse arrays to, from and between GPUs.
#include <cstdint>
#include <optional>

#include "storage/device_copy.h"
#include "storage/gpus.h"
#include "storage/row_sparse_state.h"

namespace heddle::storage {

using internal::GpuDriver;
using internal::RowStorage;
using internal::StateOf;
using internal::ToRead;
using internal::ToWrite;

namespace {

// What one stream can do: between GPUs that are linked, or one GPU and pinned memory, one dtype.
struct DirectCopy {
  GpuDriver& driver;
  RowSparseNDArray src, dst;
  std::optional<RowStorage> replaced =
      std::nullopt;  // until this op is done: those before it may still use it

  void operator()(GpuStream stream) {
    const RowStorage& from = ToRead(src).rows;
    RowStorage& to = ToWrite(dst).rows;
    replaced.emplace(to.Renew(from.count()));
    to.set_count(0);  // should the copies fail
    Copy(stream, to.ids(), from.ids(), from.count() * internal::kIdBytes);
    Copy(stream, to.rows(), from.rows(), from.count() * from.row_bytes());
    to.set_count(from.count());
  }

  void Copy(GpuStream stream, void* to, const void* from, std::int64_t bytes) const {
    if (bytes == 0) return;
    const Device source = StateOf(src).device;
    const Device target = StateOf(dst).device;
    if (StateOf(src).is_on_gpu() && StateOf(dst).is_on_gpu() && source != target) {
      driver.CopyPeer(stream.handle, target.id, to, source.id, from, bytes);
    } else {
      driver.Copy(stream.handle, to, from, bytes);
    }
  }
};

void PushDirect(const RowSparseNDArray& src, const RowSparseNDArray& dst, Device on, Lane lane,
                int priority) {
  OpOptions options{.name = "CopyTo", .reads = {src.var()}, .writes = {dst.var()}, .device = on};
  options.lane = lane;
  options.priority = priority;
  dst.engine().PushGpu(options, DirectCopy{Gpus::Of(dst.engine()).driver(), src, dst});
}

}  // namespace

void PushDeviceCopy(const RowSparseNDArray& src, const RowSparseNDArray& dst, int priority) {
  const Device from = src.device();
  const Device to = dst.device();
  const bool from_gpu = StateOf(src).is_on_gpu();
  const bool to_gpu = StateOf(dst).is_on_gpu();
  const bool casts = src.dtype() != dst.dtype();
  const auto reaches = [&] {  // the stream of `to` what it copies from
    if (from.type == DeviceType::kCpuPinned) return true;
    return from_gpu && to_gpu && (from == to || Gpus::Of(dst.engine()).Linked(to.id, from.id));
  };
  if (!casts && reaches()) {
    PushDirect(src, dst, to, Lane::kCopy, priority);
  } else if (!casts && to.type == DeviceType::kCpuPinned) {
    PushDirect(src, dst, from, Lane::kCopyOut, priority);
  } else {
    // The host casts.
    const RowSparseNDArray staged(src.shape(), from_gpu ? src.dtype() : dst.dtype(),
                                  CpuPinned(from_gpu ? from.id : to.id), src.engine());
    src.CopyTo(staged, priority);
    staged.CopyTo(dst, priority);
  }
}

}  // namespace heddle::storage
