#include "storage/dlpack.h"

#include <heddle/error.h>
#include <heddle/shape.h>

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "engine/gpu/driver.h"
#include "storage/gpus.h"

namespace heddle::storage {

namespace {

DLDataType ToDLDataType(DType dtype) {
  const auto bits = static_cast<std::uint8_t>(8 * SizeOf(dtype));
  switch (dtype) {
    case DType::kFloat32:
    case DType::kFloat64:
    case DType::kFloat16:
      return {kDLFloat, bits, 1};
    case DType::kBFloat16:
      return {kDLBFloat, bits, 1};
    case DType::kUInt8:
      return {kDLUInt, bits, 1};
    case DType::kBool:
      return {kDLBool, bits, 1};
    default:
      return {kDLInt, bits, 1};
  }
}

DType FromDLDataType(DLDataType type) {
  for (DType dtype : kAllDTypes) {
    const DLDataType known = ToDLDataType(dtype);
    if (known.code == type.code && known.bits == type.bits && type.lanes == 1) return dtype;
  }
  throw InvalidArgument(fmt::format(
      "from_dlpack: expected elements of one of heddle's dtypes, got DLPack type {} of {} bits, {} "
      "lanes",
      type.code, type.bits, type.lanes));
}

void CheckContiguous(const DLTensor& tensor) {
  if (tensor.strides == nullptr) return;
  std::int64_t step = 1;
  bool any = true;
  for (std::int32_t i = 0; i < tensor.ndim; ++i) any = any && tensor.shape[i] > 0;
  for (std::int32_t axis = tensor.ndim; any && axis-- > 0;) {
    if (tensor.shape[axis] != 1 && tensor.strides[axis] != step) {
      throw InvalidArgument(fmt::format(
          "from_dlpack: expected elements in one piece in C order, got stride {} along axis {} in "
          "place of {}",
          tensor.strides[axis], axis, step));
    }
    step *= tensor.shape[axis];
  }
}

Device DeviceOf(const DLTensor& tensor, std::optional<Device> asked) {
  switch (tensor.device.type) {
    case kDLCpu:
    case kDLCudaHost: {
      const Device device = asked.value_or(Cpu());
      if (device.type != DeviceType::kGpu) return device;
      throw InvalidArgument(
          fmt::format("from_dlpack: expected cpu(i) or cpu_pinned(i) for memory of the CPUs, got "
                      "{}; nd.array(x) copies it",
                      ToString(device)));
    }
    case kDLCuda: {
      const Device device = Gpu(tensor.device.id);
      if (!asked || *asked == device) return device;
      throw InvalidArgument(
          fmt::format("from_dlpack: expected {} for its memory, got {}; as_in_context() copies it",
                      ToString(device), ToString(*asked)));
    }
    default:
      throw InvalidArgument(fmt::format(
          "from_dlpack: expected memory of the CPUs or of a CUDA GPU, got DLPack device "
          "({}, {})",
          tensor.device.type, tensor.device.id));
  }
}

// What an exported tensor keeps until its user lets go of it.
template <class Managed>
struct Exported {
  NDArray array;
  std::shared_ptr<internal::GpuDriver> driver;  // null: of the CPUs' memory
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  Managed managed = {};
};

}  // namespace

DLDevice ToDLDevice(Device device) {
  switch (device.type) {
    case DeviceType::kCpu:
      return {kDLCpu, 0};
    case DeviceType::kCpuPinned:
      return {kDLCudaHost, device.id};
    case DeviceType::kGpu:
      break;
  }
  return {kDLCuda, device.id};
}

template <class Managed>
Managed* ExportTensor(const NDArray& array) {
  auto exported = std::make_unique<Exported<Managed>>(Exported<Managed>{
      .array = array,
      .driver = array.device().type == DeviceType::kCpu ? nullptr : GpuDriverOf(array.engine()),
      .shape = {array.shape().begin(), array.shape().end()},
      .strides = {}});
  exported->strides.resize(exported->shape.size());
  std::int64_t step = 1;
  for (std::size_t axis = exported->shape.size(); axis-- > 0;) {
    exported->strides[axis] = step;
    step *= exported->shape[axis];
  }
  exported->managed.tensor = {.data = array.data(),
                              .device = ToDLDevice(array.device()),
                              .ndim = static_cast<std::int32_t>(exported->shape.size()),
                              .dtype = ToDLDataType(array.dtype()),
                              .shape = exported->shape.data(),
                              .strides = exported->strides.data(),
                              .byte_offset = 0};
  exported->managed.context = exported.get();
  exported->managed.deleter = [](Managed* managed) { ReleaseTensor(managed); };
  return &exported.release()->managed;
}
template DLManagedTensor* ExportTensor(const NDArray& array);
template DLManagedTensorVersioned* ExportTensor(const NDArray& array);

template <class Managed>
void ReleaseTensor(Managed* managed) noexcept {
  auto* const exported = static_cast<Exported<Managed>*>(managed->context);
  if (exported->driver != nullptr) exported->driver->AwaitAll(exported->array.device().id);
  delete exported;
}
template void ReleaseTensor(DLManagedTensor* managed) noexcept;
template void ReleaseTensor(DLManagedTensorVersioned* managed) noexcept;

NDArray ImportTensor(const DLTensor& tensor, std::optional<Device> device,
                     std::function<void()> release, Engine& engine) {
  const Device where = DeviceOf(tensor, device);
  CheckContiguous(tensor);
  const DType dtype = FromDLDataType(tensor.dtype);
  const Shape shape(
      std::span<const std::int64_t>(tensor.shape, static_cast<std::size_t>(tensor.ndim)));
  void* const data =
      tensor.data != nullptr ? static_cast<std::byte*>(tensor.data) + tensor.byte_offset : nullptr;
  return NDArray::FromForeign(data, shape, dtype, std::move(release), where, engine);
}

}  // namespace heddle::storage
