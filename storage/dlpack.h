// Arrays as tensors of other libraries, and theirs as arrays, without a copy: DLPack.
//
// The structures are those of its specification, version 1.0 (dmlc/dlpack, dlpack.h).
// Order:   whoever exports waits for the array (WaitToWrite) before the other library gets the
//          tensor; whoever imports sees to it that what the other library has issued is done.
//          From then on only heddle's own calls are ordered.
// Threads: all functions, any thread.
#pragma once

#include <heddle/device.h>
#include <heddle/dtype.h>
#include <heddle/engine.h>
#include <heddle/ndarray.h>

#include <cstdint>
#include <functional>
#include <optional>

namespace heddle::storage {

enum DLDeviceType : std::int32_t { kDLCpu = 1, kDLCuda = 2, kDLCudaHost = 3 };
struct DLDevice {
  std::int32_t type;
  std::int32_t id;
};
enum DLCode : std::uint8_t { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBFloat = 4, kDLBool = 6 };
struct DLDataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // null: C order
  std::uint64_t byte_offset;
};
struct DLManagedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(DLManagedTensor*);
};
struct DLManagedTensorVersioned {
  std::uint32_t major;
  std::uint32_t minor;
  void* context;
  void (*deleter)(DLManagedTensorVersioned*);
  std::uint64_t flags;
  DLTensor tensor;
};
constexpr std::uint64_t kDLReadOnly = 1;
constexpr std::uint64_t kDLCopied = 2;

DLDevice ToDLDevice(Device device);  // all cpu(i) are one memory

// The array's memory as a tensor, which keeps the array until its deleter is called, on any thread.
// `Managed`: DLManagedTensor or DLManagedTensorVersioned, whose version and flags are left at 0.
template <class Managed>
Managed* ExportTensor(const NDArray& array);
// What the deleter does. Of a GPU's memory, or pinned memory near it, the user has perhaps issued
// ops on streams of its own, which nothing here waits for: returns when all that was issued on that
// GPU is done.
template <class Managed>
void ReleaseTensor(Managed* managed) noexcept;

// An array over a tensor's memory: on the gpu(i) that has it, or on `device`, a cpu(i) or
// cpu_pinned(i), for memory of the CPUs; without `device` on cpu(0). `release` is called once, from
// any thread, when neither a handle nor an op, on a GPU neither, uses the memory any more; if this
// throws, never. InvalidArgument for memory elsewhere, or on a GPU that is not there or not
// `device`, for elements that are not in one piece in C order, and for types that heddle lacks.
NDArray ImportTensor(const DLTensor& tensor, std::optional<Device> device,
                     std::function<void()> release, Engine& engine);

}  // namespace heddle::storage
