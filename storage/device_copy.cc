// DESIGN. What one stream can copy by itself is one GPU op: within a GPU, between linked GPUs, and
// between a GPU and pinned memory. The rest, memory of the CPUs' pools and GPUs without a link,
// goes through pinned memory:
//
//   one slice:   two ops and a pinned array of its own between them, which other GPU ops follow
//                without the host waiting.
//   many slices: one asynchronous op, which reads `src` and writes `dst` once, as everybody expects
//                of a copy. Its body pushes two ops a slice, into a pinned slot and out of it, that
//                name the slot's variable alone: several slots in turn keep both sides busy, and
//                the engine does the waiting. The last op looks at all slots and completes the
//                copy.
#include "storage/device_copy.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>
#include <vector>

#include "ops/cast.h"
#include "storage/array_ops.h"
#include "storage/gpus.h"

namespace heddle::storage {

using internal::GpuDriver;
using internal::StateOf;

namespace {

constexpr std::int64_t kStagingAlignment = 256;  // what GPUs like addresses to be

// The elements, past the access checker: for ops that work for another one, which declares them.
std::byte* ElementsOf(const NDArray& array) {
  const internal::ArrayState& state = StateOf(array);
  return state.elements();
}

// The one GPU op of a copy that one stream can do. `on`: the GPU.
void PushDirect(const NDArray& src, const NDArray& dst, Device on, Lane lane, int priority) {
  OpOptions options = Writing("CopyTo", dst, src, priority);
  options.device = on;
  options.lane = lane;
  GpuDriver& driver = Gpus::Of(dst.engine()).driver();
  dst.engine().PushGpu(options, [&driver, src, dst](GpuStream stream) {
    std::byte* const to = At(dst, 0);
    const std::byte* const from = ConstAt(src, 0);
    if (dst.bytes() == 0) return;
    if (IsOnGpu(src) && IsOnGpu(dst) && src.device() != dst.device()) {
      driver.CopyPeer(stream.handle, dst.device().id, to, src.device().id, from, dst.bytes());
    } else {
      driver.Copy(stream.handle, to, from, dst.bytes());
    }
  });
}

void PushCast(const NDArray& src, const NDArray& dst, int priority) {
  OpOptions options = Writing("CopyTo", dst, src, priority);
  options.lane = Lane::kCopy;
  PushKernel(options, dst, [src, dst](const ops::GpuKernels& kernels, GpuStream stream) {
    const ops::CastTask task{ConstAt(src, 0), At(dst, 0), static_cast<std::size_t>(dst.size())};
    kernels.Cast(src.dtype(), dst.dtype(), {&task, 1}, stream);
  });
}

// One stage of one slice: elements from `begin` of `array` into the first of `slot`, or back.
struct Stage {
  const NDArray& array;
  const NDArray& slot;
  std::int64_t begin;
  std::int64_t count;
  bool into_slot;
  int priority;
};

void PushStage(const Stage& stage) {
  const NDArray& array = stage.array;
  const NDArray& slot = stage.slot;
  Engine& engine = slot.engine();
  // A read-modify: what fails stays in the slot, and the rest of the slot's slices do not run.
  OpOptions options{.name = "CopyTo", .reads = {slot.var()}, .writes = {slot.var()}};
  options.priority = stage.priority;
  options.lane = Lane::kCopy;
  const NDArray from = stage.into_slot ? array : slot;
  const NDArray to = stage.into_slot ? slot : array;
  const std::int64_t first_byte = stage.begin * ElementBytes(array);
  const std::int64_t from_byte = stage.into_slot ? first_byte : 0;
  const std::int64_t to_byte = stage.into_slot ? 0 : first_byte;
  if (!IsOnGpu(array)) {
    engine.Push(options, [from, to, from_byte, to_byte, count = stage.count] {
      ops::Cast(from.dtype(), ElementsOf(from) + from_byte, to.dtype(), ElementsOf(to) + to_byte,
                static_cast<std::size_t>(count));
    });
    return;
  }
  options.device = array.device();
  if (stage.into_slot) options.lane = Lane::kCopyOut;
  GpuDriver& driver = Gpus::Of(engine).driver();
  engine.PushGpu(options, [&driver, from, to, from_byte, to_byte,
                           bytes = stage.count * ElementBytes(slot)](GpuStream stream) {
    driver.Copy(stream.handle, ElementsOf(to) + to_byte, ElementsOf(from) + from_byte, bytes);
  });
}

using Slots = std::array<NDArray, kStagingSlots>;

// The asynchronous op of a copy in several slices, through slots of `dtype` near the GPU `near`.
void PushSliced(const NDArray& src, const NDArray& dst, DType dtype, int near,
                const StagingPlan& plan, int priority) {
  Engine& engine = dst.engine();
  Slots slots;
  for (NDArray& slot : slots) slot = NDArray({plan.slice}, dtype, CpuPinned(near), engine);
  OpOptions options = Writing("CopyTo", dst, src, priority);
  options.device = Cpu();
  options.lane = Lane::kCopy;
  options.temporary_bytes = kStagingSlots * slots[0].bytes();
  engine.PushAsync(options, [src, dst, slots, plan, priority](const Completion& done) {
    Engine& own = dst.engine();
    // Memory is taken here: not by several slices at once, and if it is short, this op says so.
    ElementsOf(src);
    ElementsOf(dst);
    for (const NDArray& slot : slots) ElementsOf(slot);
    std::exception_ptr cut_short;  // the engine has been stopped, say
    try {
      for (std::int64_t i = 0; i < plan.slices; ++i) {
        const NDArray& slot = slots[static_cast<std::size_t>(i % kStagingSlots)];
        PushStage({src, slot, plan.begin(i), plan.size(i), /*into_slot=*/true, priority});
        PushStage({dst, slot, plan.begin(i), plan.size(i), /*into_slot=*/false, priority});
      }
    } catch (...) {
      cut_short = std::current_exception();
    }
    OpOptions last{.name = "CopyTo", .run_when_poisoned = true};
    std::vector<VarRef> all;
    for (const NDArray& slot : slots) all.emplace_back(slot.var());
    last.reads = all;
    last.priority = priority;
    last.lane = Lane::kCopy;
    // Those that were pushed use `src` and `dst` until then.
    own.Push(last, [src, dst, slots, done, cut_short] {
      std::exception_ptr error;
      for (const NDArray& slot : slots) {
        if (error == nullptr) error = slot.engine().ErrorOf(slot.var());
      }
      done(error != nullptr ? error : cut_short);
    });
  });
}

// Through pinned memory. It has the dtype of the GPU's side; the host casts.
void PushStaged(const NDArray& src, const NDArray& dst, int priority) {
  const NDArray& on_gpu = IsOnGpu(src) ? src : dst;
  const DType dtype = on_gpu.dtype();
  const int near = on_gpu.device().id;
  const StagingPlan plan = PlanStaging(dst.size(), static_cast<std::int64_t>(SizeOf(dtype)));
  if (plan.slices > 1) {
    PushSliced(src, dst, dtype, near, plan, priority);
    return;
  }
  const NDArray staged(src.shape(), dtype, CpuPinned(near), dst.engine());
  src.CopyTo(staged, priority);
  staged.CopyTo(dst, priority);
}

}  // namespace

StagingPlan PlanStaging(std::int64_t count, std::int64_t element_bytes) {
  if (count == 0) return {};
  const std::int64_t aligned = kStagingAlignment / element_bytes;  // elements
  const std::int64_t most = kStagingBytes / element_bytes;
  const std::int64_t wanted = (count - 1) / most + 1;
  const std::int64_t even = (count - 1) / wanted + 1;
  const std::int64_t slice = std::min(((even - 1) / aligned + 1) * aligned, count);
  return {.count = count, .slice = slice, .slices = (count - 1) / slice + 1};
}

void PushDeviceCopy(const NDArray& src, const NDArray& dst, int priority) {
  if (src.Overlaps(dst)) {
    PushDeviceCopy(src.Copy(priority), dst, priority);
    return;
  }
  const Device from = src.device();
  const Device to = dst.device();
  const bool casts = src.dtype() != dst.dtype();
  if (from.type == DeviceType::kGpu && to.type == DeviceType::kGpu) {
    if (from == to) {
      casts ? PushCast(src, dst, priority) : PushDirect(src, dst, to, Lane::kCopy, priority);
    } else if (casts) {
      PushDeviceCopy(src.AsType(dst.dtype(), priority), dst, priority);
    } else if (Gpus::Of(dst.engine()).Linked(to.id, from.id)) {
      PushDirect(src, dst, to, Lane::kCopy, priority);
    } else {
      PushStaged(src, dst, priority);
    }
  } else if (!casts && from.type == DeviceType::kCpuPinned) {
    PushDirect(src, dst, to, Lane::kCopy, priority);
  } else if (!casts && to.type == DeviceType::kCpuPinned) {
    PushDirect(src, dst, from, Lane::kCopyOut, priority);
  } else {
    PushStaged(src, dst, priority);
  }
}

}  // namespace heddle::storage
