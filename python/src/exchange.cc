// Memory shared with others: NumPy, the buffer protocol, DLPack.
#include <heddle/error.h>

#include <cstring>
#include <memory>

#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "base/gpus.h"
#include "python/src/array_object.h"
#include "python/src/bindings.h"
#include "storage/dlpack.h"

namespace heddle::python {

namespace {

using Self = nb::handle_t<PyArray>;
using storage::DLManagedTensor;
using storage::DLManagedTensorVersioned;

// --- DLPack --------------------------------------------------------------------------------------

template <class Managed>
struct CapsuleNames;
template <>
struct CapsuleNames<DLManagedTensor> {
  static constexpr const char* kFresh = "dltensor";
  static constexpr const char* kUsed = "used_dltensor";
};
template <>
struct CapsuleNames<DLManagedTensorVersioned> {
  static constexpr const char* kFresh = "dltensor_versioned";
  static constexpr const char* kUsed = "used_dltensor_versioned";
};

template <class Managed>
nb::object ToCapsule(Managed* managed) {
  // It may wait for the GPU. Threads without Python call it, too, and after the interpreter's end.
  managed->deleter = [](Managed* released) {
    if (python_is_over || PyGILState_Check() == 0) return storage::ReleaseTensor(released);
    const Unlocked unlocked;
    storage::ReleaseTensor(released);
  };
  PyObject* const capsule =
      PyCapsule_New(managed, CapsuleNames<Managed>::kFresh, [](PyObject* unused) {
        if (PyCapsule_IsValid(unused, CapsuleNames<Managed>::kFresh) == 0) return;  // taken over
        auto* const held =
            static_cast<Managed*>(PyCapsule_GetPointer(unused, CapsuleNames<Managed>::kFresh));
        held->deleter(held);
      });
  if (capsule == nullptr) {
    managed->deleter(managed);
    throw nb::python_error();
  }
  return nb::steal(capsule);
}

// self.__dlpack__(stream=None, max_version=None, dl_device=None, copy=None)
nb::object ToDLPack(Self a, nb::handle /*stream*/,
                    std::optional<std::pair<std::int64_t, std::int64_t>> max_version,
                    std::optional<std::pair<std::int64_t, std::int64_t>> device,
                    std::optional<Flag> copy) {
  const PyArray& self = HolderOf(a);
  const storage::DLDevice own = storage::ToDLDevice(self.array.device());
  if (device && (device->first != own.type || device->second != own.id)) {
    PyErr_Format(PyExc_BufferError, "__dlpack__: expected device (%d, %d), got (%lld, %lld)",
                 static_cast<int>(own.type), static_cast<int>(own.id),
                 static_cast<long long>(device->first), static_cast<long long>(device->second));
    throw nb::python_error();
  }
  const bool copies = copy.value_or(Flag{}).value;
  NDArray array = self.array;
  {
    const Blocking blocking;
    if (copies) array = array.Copy();
    array.WaitToWrite();  // whoever gets the memory may write to it
  }
  const bool read_only = self.read_only && !copies;
  if (max_version && max_version->first >= 1) {
    auto* const exported = storage::ExportTensor<DLManagedTensorVersioned>(array);
    exported->major = 1;
    if (copies) exported->flags = storage::kDLCopied;
    if (read_only) exported->flags |= storage::kDLReadOnly;
    return ToCapsule(exported);
  }
  if (read_only) {
    PyErr_SetString(PyExc_BufferError,
                    "__dlpack__: expected DLPack version 1 for read-only memory, got an older one");
    throw nb::python_error();
  }
  return ToCapsule(storage::ExportTensor<DLManagedTensor>(array));
}

// Takes the tensor over from its capsule. What its library has issued on the GPU is ordered before
// the default stream (from_dlpack asked it for that), and done when this returns.
template <class Managed>
nb::any FromCapsule(nb::handle type, nb::handle capsule, Device context, bool asked_for) {
  using Names = CapsuleNames<Managed>;
  auto* const managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule.ptr(), Names::kFresh));
  if (managed == nullptr) throw nb::python_error();
  bool read_only = false;
  if constexpr (std::is_same_v<Managed, DLManagedTensorVersioned>) {
    if (managed->major != 1) {
      throw InvalidArgument(
          fmt::format("from_dlpack: expected DLPack version 1, got {}", managed->major));
    }
    read_only = (managed->flags & storage::kDLReadOnly) != 0;
  }
  const bool on_gpu = managed->tensor.device.type == storage::kDLCuda;
  // The deleter is the producer's: it may need the GIL and takes it then, or be Python's memory
  // itself, which no longer matters once the interpreter is gone.
  NDArray array = storage::ImportTensor(
      managed->tensor, on_gpu && !asked_for ? std::nullopt : std::optional(context),
      [managed] {
        if (managed->deleter != nullptr) WhilePythonLives([&] { managed->deleter(managed); });
      },
      TheEngine());
  if (PyCapsule_SetName(capsule.ptr(), Names::kUsed) != 0) throw nb::python_error();
  if (on_gpu) {
    const Blocking blocking;
    WaitForDefaultStream(array.device().id);
  }
  return WrapAs(type, std::move(array), read_only);
}

// Memory of a GPU is an array on that one, whatever the context, unless that was asked for.
nb::any FromDLPack(nb::handle type, nb::handle capsule, int context, bool asked_for) {
  const Device device = ToDevice(context);
  if (PyCapsule_IsValid(capsule.ptr(), CapsuleNames<DLManagedTensorVersioned>::kFresh) != 0) {
    return FromCapsule<DLManagedTensorVersioned>(type, capsule, device, asked_for);
  }
  if (PyCapsule_IsValid(capsule.ptr(), CapsuleNames<DLManagedTensor>::kFresh) != 0) {
    return FromCapsule<DLManagedTensor>(type, capsule, device, asked_for);
  }
  throw InvalidType(
      fmt::format("from_dlpack: expected a fresh DLPack capsule, got {}", TypeName(capsule)));
}

// --- the buffer protocol -------------------------------------------------------------------------

// A view of an object's memory; released with the GIL.
struct Buffer {
  Buffer(nb::handle object, int flags) {
    if (PyObject_GetBuffer(object.ptr(), &view, flags) != 0) throw nb::python_error();
  }
  ~Buffer() { PyBuffer_Release(&view); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Py_buffer view = {};
};

// Where an array over a buffer lies, which is always the CPUs' memory.
Device ToHostDevice(int code) {
  const Device device = ToDevice(code);
  if (device.type == DeviceType::kGpu) {
    throw InvalidArgument(
        fmt::format("from_buffer: expected cpu(i) or cpu_pinned(i) for memory of the CPUs, got {}; "
                    "nd.array(x) copies it",
                    ToString(device)));
  }
  return device;
}

// An array over the memory of a writable, contiguous buffer, whose dtype the caller has read.
nb::any FromBuffer(nb::handle type, nb::handle object, const std::vector<std::int64_t>& dims,
                   int dtype, int device) {
  auto buffer = std::make_shared<Buffer>(object, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS);
  const Shape shape(dims);
  const auto bytes = shape.size() * static_cast<std::int64_t>(SizeOf(ToDType(dtype)));
  if (buffer->view.len != bytes) {
    throw InvalidArgument(
        fmt::format("from_buffer: expected {} bytes, got {}", bytes, buffer->view.len));
  }
  // The buffer goes with the GIL held, or not at all once the interpreter is gone.
  auto* const held = new std::shared_ptr<Buffer>(std::move(buffer));
  const auto release = [held] { WhilePythonLives([&] { delete held; }); };
  try {
    return WrapAs(type, NDArray::FromForeign((*held)->view.buf, shape, ToDType(dtype), release,
                                             ToHostDevice(device), TheEngine()));
  } catch (...) {
    delete held;
    throw;
  }
}

// A copy of the memory of a contiguous buffer of `from` elements, as `dtype`.
nb::any CopyBuffer(nb::handle type, nb::handle object, const std::vector<std::int64_t>& dims,
                   int from, int dtype, int device) {
  const Buffer buffer(object, PyBUF_C_CONTIGUOUS);
  const Shape shape(dims);
  NDArray array;
  {
    const Blocking blocking;
    const NDArray source = NDArray::FromForeign(
        buffer.view.buf, shape, ToDType(from), [] {}, Cpu(), TheEngine());
    array = NDArray(shape, ToDType(dtype), ToDevice(device), TheEngine());
    source.CopyTo(array);
    try {
      array.WaitToRead();
    } catch (...) {
      // The op reads memory that is the caller's again when this returns.
      const WaitCheckScope unchecked(std::chrono::milliseconds(50), nullptr);
      source.WaitToWrite();
      throw;
    }
  }
  return WrapAs(type, std::move(array));
}

// --- NumPy ---------------------------------------------------------------------------------------

// Up to here the values go through memory of heddle's: cheaper than a variable of their own.
constexpr std::int64_t kDirectBytesMin = 64 << 10;

nb::object EmptyNumpy(const Shape& shape, DType dtype) {
  try {
    return registered->empty(FromShape(shape), registered->dtypes[static_cast<std::size_t>(dtype)]);
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_MemoryError)) throw;
    throw OutOfMemory(fmt::format("asnumpy: {}", nb::str(error.value()).c_str()));
  }
}

Numpy ToNumpy(Self self) {
  const NDArray& array = Held(self);
  const DType dtype = array.dtype() == DType::kBFloat16 ? DType::kFloat32 : array.dtype();
  nb::object numpy = EmptyNumpy(array.shape(), dtype);
  if (array.size() == 0) {
    const Blocking blocking;
    array.WaitToRead();
    return numpy;
  }
  void* data = nullptr;
  {
    const Buffer buffer(numpy, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS);
    data = buffer.view.buf;
  }
  PyRef kept(numpy);  // for an op that is still under way when a signal ends the wait
  {
    const Blocking blocking;
    if (array.bytes() < kDirectBytesMin) {
      const NDArray copy(array.shape(), dtype, Cpu(), array.engine());
      array.CopyTo(copy);
      copy.WaitToRead();
      std::memcpy(data, copy.const_data(), static_cast<std::size_t>(copy.bytes()));
    } else {
      auto* const held = new PyRef(std::move(kept));
      const NDArray target = NDArray::FromForeign(
          data, array.shape(), dtype, [held] { delete held; }, Cpu(), array.engine());
      array.CopyTo(target);
      target.WaitToRead();
    }
  }
  return numpy;
}

}  // namespace

void BindExchange(nb::class_<PyArray>& type, nb::module_& m) {
  type.def("asnumpy", &ToNumpy,
           "A NumPy array with a copy of the values as they are when everything pushed before is\n"
           "done. bfloat16, which NumPy lacks, comes as float32.")
      .def("__dlpack__", &ToDLPack, nb::kw_only(), nb::arg("stream") = nb::none(),
           nb::arg("max_version") = nb::none(), nb::arg("dl_device") = nb::none(),
           nb::arg("copy") = nb::none(),
           "The array's memory for another library, without a copy. Waits for pending reads and\n"
           "writes; later ones are not ordered with what the other library does.")
      .def("__dlpack_device__", [](Self self) {
        const storage::DLDevice device = storage::ToDLDevice(Held(self).device());
        return nb::make_tuple(device.type, device.id);
      });
  m.def("from_dlpack", &FromDLPack, nb::arg("type"), nb::arg("capsule").none(), nb::arg("context"),
        nb::arg("asked_for"));
  m.def("from_buffer", &FromBuffer);
  m.def("copy_buffer", &CopyBuffer);
}

}  // namespace heddle::python
