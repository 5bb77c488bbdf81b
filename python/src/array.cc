// heddle._core.Array: what heddle.nd.NDArray derives from.
#include <heddle/error.h>
#include <heddle/files.h>
#include <heddle/math.h>

#include <optional>

#include <fmt/format.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "python/src/array_object.h"
#include "python/src/bindings.h"

namespace heddle::python {

using Self = nb::handle_t<PyArray>;

PyArray* AsArray(nb::handle object) {
  PyArray* array = nullptr;
  return nb::try_cast(object, array) ? array : nullptr;
}

const NDArray& Writable(const char* call, const PyArray& array) {
  if (array.read_only) {
    throw InvalidArgument(
        fmt::format("{}: expected an array that may be written, got one over read-only memory of "
                    "another library: copy() makes one that may",
                    call));
  }
  return array.array;
}

bool ToScalar(nb::handle object, Scalar* scalar) {
  if (PyFloat_Check(object.ptr())) {
    *scalar = PyFloat_AsDouble(object.ptr());
    return true;
  }
  if (PyIndex_Check(object.ptr()) != 0) {  // an array of NumPy's says so too, and may refuse
    const nb::object index = nb::steal(PyNumber_Index(object.ptr()));
    if (index.is_valid()) {
      int overflow = 0;
      const long long value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
      if (overflow == 0) {
        *scalar = static_cast<std::int64_t>(value);
        return true;
      }
      *scalar = PyLong_AsDouble(index.ptr());
      if (PyErr_Occurred() == nullptr) return true;
      PyErr_Clear();
      throw InvalidArgument(
          "expected a number within the range of float64, got an integer beyond it");
    }
    PyErr_Clear();
  }
  if (PyNumber_Check(object.ptr()) == 0) return false;
  if (nb::hasattr(object, "__len__")) {  // an array of NumPy's without axes is a number
    if (PyObject_Size(object.ptr()) >= 0) return false;
    PyErr_Clear();
  }
  const nb::object real = nb::steal(PyNumber_Float(object.ptr()));
  if (!real.is_valid()) {
    PyErr_Clear();
    return false;
  }
  *scalar = PyFloat_AsDouble(real.ptr());
  return true;
}

Scalar ToNumber(const char* call, nb::handle object) {
  Scalar number = 0;
  if (!ToScalar(object, &number)) {
    throw InvalidType(fmt::format("{}: expected a number, got {}", call, TypeName(object)));
  }
  return number;
}

DType ToDType(int code) {
  if (code < 0 || code >= static_cast<int>(kAllDTypes.size())) {
    throw InvalidArgument(fmt::format("expected a dtype, got number {}", code));
  }
  return static_cast<DType>(code);
}

Device ToDevice(int code) {
  return {static_cast<DeviceType>(code >> 16), static_cast<std::int16_t>(code & 0xFFFF)};
}
int FromDevice(Device device) {
  return static_cast<int>(device.type) << 16 | static_cast<int>(device.id);
}

Shape ToShape(const std::vector<std::int64_t>& dims) { return Shape(dims); }

Extents FromShape(const Shape& shape) {
  PyObject* const tuple = PyTuple_New(static_cast<Py_ssize_t>(shape.ndim()));
  if (tuple == nullptr) throw nb::python_error();
  for (std::size_t i = 0; i < shape.ndim(); ++i) {
    PyTuple_SetItem(tuple, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(shape[i]));
  }
  return nb::steal<Extents>(tuple);
}

namespace {

const PyArray& Object(Self self) { return HolderOf(self); }

// What f() makes, as an object of the class of `self`.
template <class F>
SameClass Like(Self self, const F& f) {
  return WrapAs(self.type(), Computed(f));
}

// The shape of a and b, where extents of 1 repeat; of `a` if they do not fit each other, for the
// message of the operation itself.
Shape BroadcastShape(const Shape& a, const Shape& b) {
  const Shape& longer = a.ndim() >= b.ndim() ? a : b;
  const Shape& shorter = a.ndim() >= b.ndim() ? b : a;
  std::vector<std::int64_t> dims(longer.begin(), longer.end());
  const std::size_t missing = longer.ndim() - shorter.ndim();
  for (std::size_t i = 0; i < shorter.ndim(); ++i) {
    std::int64_t& extent = dims[missing + i];
    if (extent != shorter[i] && extent != 1 && shorter[i] != 1) return a;
    if (extent == 1) extent = shorter[i];
  }
  return Shape(dims);
}

// Calls f(a, b) with both in one shape.
template <class F>
auto Broadcast(const NDArray& a, const NDArray& b, const F& f) {
  if (a.shape() == b.shape()) return f(a, b);
  const Shape shape = BroadcastShape(a.shape(), b.shape());
  return f(a.shape() == shape ? a : BroadcastTo(a, shape),
           b.shape() == shape ? b : BroadcastTo(b, shape));
}

// self op other, for arrays and numbers; anything else may know better.
template <class F>
SameClass Binary(Self self, nb::handle other, const F& f) {
  const NDArray& a = Held(self);
  if (const PyArray* array = AsArray(other)) {
    return Like(self, [&] { return Broadcast(a, array->array, f); });
  }
  return ForNumber(other, [&](Scalar number) { return Like(self, [&] { return f(a, number); }); });
}

// number op self.
template <class F>
SameClass Reflected(Self self, nb::handle other, const F& f) {
  return ForNumber(
      other, [&](Scalar number) { return Like(self, [&] { return f(number, Held(self)); }); });
}

// self op= other.
template <class F>
SameClass InPlace(Self self, nb::handle other, const F& f) {
  const NDArray& a = Writable("an operation in place", Object(self));
  if (const PyArray* array = AsArray(other)) {
    const NDArray& b = array->array;
    Computed([&] {
      const bool repeats = a.shape() != b.shape() && (b.size() <= a.size() || a.size() == 0);
      f(a, repeats ? BroadcastTo(b, a.shape()) : b);
    });
    return nb::borrow(self);
  }
  return ForNumber(other, [&](Scalar number) {
    Computed([&] { f(a, number); });
    return nb::borrow(self);
  });
}

template <class F>
SameClass Unary(Self self, const F& f) {
  return Like(self, [&] { return f(Held(self)); });
}

// A view, which may be written if the array may.
template <class F>
SameClass View(Self self, const F& f) {
  return WrapAs(self.type(), Computed([&] { return f(Held(self)); }), Object(self).read_only);
}

// Comparisons: a bool array, or, as MXNet's NDArrays have it, 0 and 1 of the array's dtype.
SameClass Compared(Self self, nb::handle other, Comparison comparison) {
  const bool as_bool = nb::cast<bool>(nb::getattr(self.type(), "_compares_to_bool"));
  return Binary(self, other, [&](const NDArray& a, const auto& b) {
    NDArray result = Compare(comparison, a, b);
    return as_bool ? result : result.AsType(a.dtype());
  });
}

void BindArithmetic(nb::class_<PyArray>& type) {
  const auto op = nb::is_operator();
  const auto add = [](const auto& a, const auto& b) { return a + b; };
  const auto subtract = [](const auto& a, const auto& b) { return a - b; };
  const auto multiply = [](const auto& a, const auto& b) { return a * b; };
  const auto divide = [](const auto& a, const auto& b) { return a / b; };
  const auto power = [](const auto& a, const auto& b) { return Power(a, b); };
  const auto remainder = [](const auto& a, const auto& b) { return Remainder(a, b); };
  type.def(
          "__add__", [=](Self a, nb::handle b) { return Binary(a, b, add); }, op)
      .def(
          "__radd__", [=](Self a, nb::handle b) { return Reflected(a, b, add); }, op)
      .def(
          "__sub__", [=](Self a, nb::handle b) { return Binary(a, b, subtract); }, op)
      .def(
          "__rsub__", [=](Self a, nb::handle b) { return Reflected(a, b, subtract); }, op)
      .def(
          "__mul__", [=](Self a, nb::handle b) { return Binary(a, b, multiply); }, op)
      .def(
          "__rmul__", [=](Self a, nb::handle b) { return Reflected(a, b, multiply); }, op)
      .def(
          "__truediv__", [=](Self a, nb::handle b) { return Binary(a, b, divide); }, op)
      .def(
          "__rtruediv__", [=](Self a, nb::handle b) { return Reflected(a, b, divide); }, op)
      .def(
          "__pow__", [=](Self a, nb::handle b) { return Binary(a, b, power); }, op)
      .def(
          "__rpow__", [=](Self a, nb::handle b) { return Reflected(a, b, power); }, op)
      .def(
          "__mod__", [=](Self a, nb::handle b) { return Binary(a, b, remainder); }, op)
      .def(
          "__rmod__", [=](Self a, nb::handle b) { return Reflected(a, b, remainder); }, op)
      .def(
          "__isub__",
          [](Self a, nb::handle b) -> SameClass {
            if (const PyRowSparse* rows = AsRowSparse(b)) {
              const NDArray& array = Writable("an operation in place", Object(a));
              const std::int64_t minus_one =
                  rows->array.dtype() == DType::kUInt8 ? 255 : -1;  // wraps
              Computed([&] { array += rows->array * Scalar(minus_one); });
              return nb::borrow(a);
            }
            return InPlace(a, b, [](const NDArray& x, const auto& y) { x -= y; });
          },
          op)
      .def(
          "__imul__",
          [](Self a, nb::handle b) {
            return InPlace(a, b, [](const NDArray& x, const auto& y) { x *= y; });
          },
          op)
      .def(
          "__itruediv__",
          [](Self a, nb::handle b) {
            return InPlace(a, b, [](const NDArray& x, const auto& y) { x /= y; });
          },
          op)
      .def(
          "__iadd__",
          [](Self a, nb::handle b) -> SameClass {
            if (const PyRowSparse* rows = AsRowSparse(b)) {
              const NDArray& array = Writable("an operation in place", Object(a));
              Computed([&] { array += rows->array; });
              return nb::borrow(a);
            }
            return InPlace(a, b, [](const NDArray& x, const auto& y) { x += y; });
          },
          op)
      .def("__neg__", [](Self a) { return Unary(a, Negative); })
      .def("__abs__", [](Self a) { return Unary(a, Abs); })
      .def(
          "__eq__", [](Self a, nb::handle b) { return Compared(a, b, Comparison::kEqual); }, op)
      .def(
          "__ne__", [](Self a, nb::handle b) { return Compared(a, b, Comparison::kNotEqual); }, op)
      .def(
          "__lt__", [](Self a, nb::handle b) { return Compared(a, b, Comparison::kLess); }, op)
      .def(
          "__le__", [](Self a, nb::handle b) { return Compared(a, b, Comparison::kLessEqual); }, op)
      .def(
          "__gt__", [](Self a, nb::handle b) { return Compared(a, b, Comparison::kGreater); }, op)
      .def(
          "__ge__", [](Self a, nb::handle b) { return Compared(a, b, Comparison::kGreaterEqual); },
          op);
}

void BindFunctions(nb::class_<PyArray>& type) {
  type.def(
          "abs", [](Self a) { return Unary(a, Abs); }, "The magnitude of each element.")
      .def(
          "sign", [](Self a) { return Unary(a, Sign); }, "1, 0 or -1 for each element.")
      .def(
          "square", [](Self a) { return Unary(a, Square); }, "The square of each element.")
      .def(
          "sqrt", [](Self a) { return Unary(a, Sqrt); }, "The square root of each element.")
      .def(
          "exp", [](Self a) { return Unary(a, Exp); }, "e to the power of each element.")
      .def(
          "log", [](Self a) { return Unary(a, Log); }, "The natural logarithm of each element.")
      .def("_norm", [](Self a) { return Unary(a, Norm); })
      .def(
          "_sum",
          [](Self a, std::optional<std::int64_t> axis) {
            return Unary(a, [&](const NDArray& x) { return SumAlong(x, axis); });
          },
          nb::arg("axis").none())
      .def(
          "_mean",
          [](Self a, std::optional<std::int64_t> axis) {
            return Unary(a, [&](const NDArray& x) { return MeanAlong(x, axis); });
          },
          nb::arg("axis").none())
      .def(
          "_maximum",
          [](Self a, nb::handle b) {
            return Binary(a, b, [](const auto& x, const auto& y) { return Maximum(x, y); });
          },
          nb::arg("other").none())
      .def(
          "_minimum",
          [](Self a, nb::handle b) {
            return Binary(a, b, [](const auto& x, const auto& y) { return Minimum(x, y); });
          },
          nb::arg("other").none())
      .def("_dot",
           [](Self a, const PyArray& b) {
             return Unary(a, [&](const NDArray& x) { return Dot(x, b.array); });
           })
      .def("_transpose",
           [](Self a, const std::vector<std::int64_t>& axes) {
             return Unary(a, [&](const NDArray& x) { return Transpose(x, axes); });
           })
      .def("_broadcast_to",
           [](Self a, const std::vector<std::int64_t>& shape) {
             return Unary(a, [&](const NDArray& x) { return BroadcastTo(x, Shape(shape)); });
           })
      .def("_astype", [](Self a, int dtype) {
        return Unary(a, [&](const NDArray& x) { return x.AsType(ToDType(dtype)); });
      });
}

// Flat, as it comes from Python: begin, step, count, keep for each axis.
std::vector<AxisRange> ToRanges(const std::vector<std::int64_t>& numbers) {
  std::vector<AxisRange> ranges;
  for (std::size_t i = 0; i + 4 <= numbers.size(); i += 4) {
    ranges.push_back({.begin = numbers[i],
                      .step = numbers[i + 1],
                      .count = numbers[i + 2],
                      .keep = numbers[i + 3] != 0});
  }
  return ranges;
}

void BindParts(nb::class_<PyArray>& type) {
  type.def("_slice",
           [](Self a, std::int64_t begin, std::int64_t end) {
             return View(a, [&](const NDArray& x) { return x.Slice(begin, end); });
           })
      .def("_reshape",
           [](Self a, const std::vector<std::int64_t>& shape) {
             return View(a, [&](const NDArray& x) { return x.Reshape(Shape(shape)); });
           })
      .def("_copy_part",
           [](Self a, const std::vector<std::int64_t>& ranges) {
             return Unary(a, [&](const NDArray& x) { return CopyPart(x, ToRanges(ranges)); });
           })
      .def("_assign_part",
           [](Self a, const std::vector<std::int64_t>& ranges, const PyArray& values) {
             const NDArray& array = Writable("an assignment", Object(a));
             const Blocking blocking;
             AssignPart(array, ToRanges(ranges), values.array);
           })
      .def("_copy",
           [](Self a, int device) {
             return Unary(a, [&](const NDArray& x) { return x.Copy(ToDevice(device)); });
           })
      .def("_copy_to",
           [](Self a, const PyArray& to) {
             const NDArray& target = Writable("copyto", to);
             const Blocking blocking;
             Held(a).CopyTo(target);
           })
      .def("_copy_to_sparse",
           [](Self a, const PyRowSparse& to) {
             const Blocking blocking;
             RowSparseNDArray::FromDense(Held(a)).CopyTo(to.array);
           })
      .def("_fill",
           [](Self a, nb::handle value) {
             const Scalar number = ToNumber("fill", value);
             const NDArray& array = Writable("an assignment", Object(a));
             const Blocking blocking;
             array.Fill(number);
           })
      .def("_to_row_sparse", [](Self a) {
        return Wrap(Computed([&] { return RowSparseNDArray::FromDense(Held(a)); }));
      });
}

nb::any Full(nb::handle type, const std::vector<std::int64_t>& shape, nb::handle value, int dtype,
             int device) {
  const Scalar number = ToNumber("full", value);
  return WrapAs(type, Computed([&] {
                  return NDArray::Full(Shape(shape), number, ToDType(dtype), ToDevice(device),
                                       TheEngine());
                }));
}

nb::any Empty(nb::handle type, const std::vector<std::int64_t>& shape, int dtype, int device) {
  return WrapAs(type, Computed([&] {
                  return NDArray(Shape(shape), ToDType(dtype), ToDevice(device), TheEngine());
                }));
}

// Dense and row-sparse arrays by name. Returns nothing, or raises.
void Save(const std::string& file, const std::vector<std::pair<std::string, nb::object>>& named,
          const FileMetadata& metadata) {
  std::vector<NamedArray> dense;
  std::vector<NamedRowSparseArray> row_sparse;
  for (const auto& [name, object] : named) {
    if (const PyArray* array = AsArray(object)) {
      dense.push_back({name, array->array});
    } else if (const PyRowSparse* rows = AsRowSparse(object)) {
      row_sparse.push_back({name, rows->array});
    } else {
      throw InvalidType(fmt::format("save: expected arrays, got {}", TypeName(object)));
    }
  }
  const Blocking blocking;
  SaveArrays(file, dense, row_sparse, metadata);
}

nb::tuple Load(const std::string& file, int device) {
  ArrayFile content;
  {
    const Blocking blocking;
    content = LoadArrays(file, ToDevice(device), TheEngine());
  }
  nb::list named;
  for (NamedArray& item : content.arrays) {
    named.append(nb::make_tuple(item.name, Wrap(std::move(item.array))));
  }
  for (NamedRowSparseArray& item : content.row_sparse) {
    named.append(nb::make_tuple(item.name, Wrap(std::move(item.array))));
  }
  return nb::make_tuple(named, content.metadata);
}

}  // namespace

void BindArray(nb::module_& m) {
  nb::class_<PyArray> type(m, "Array");
  BindArrayBasics(type);
  type.def("_wait",
           [](Self a, double seconds) {
             const Blocking blocking;
             Held(a).WaitToRead(std::chrono::duration<double>(seconds));
           })
      .def("_is_same_as", [](Self a, const PyArray& b) { return Held(a).IsSameAs(b.array); });
  BindArithmetic(type);
  BindFunctions(type);
  BindParts(type);
  BindExchange(type, m);
  m.def("full", &Full, nb::arg("type"), nb::arg("shape"), nb::arg("value").none(), nb::arg("dtype"),
        nb::arg("device"));
  // The same array as an object of another class.
  m.def("view_as", [](nb::handle type, const PyArray& array) {
    return WrapAs(type, array.array, array.read_only);
  });
  m.def("empty", &Empty);
  m.def("save", &Save);
  m.def("load", &Load);
}

}  // namespace heddle::python
