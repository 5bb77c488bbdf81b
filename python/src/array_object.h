// What the bindings of dense and row-sparse arrays share.
#pragma once

#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>

#include <optional>
#include <utility>

#include <fmt/format.h>

#include "python/src/bindings.h"

namespace heddle::python {

// What the object holds. InvalidType for one whose class has made it without any: an __init__ of
// its own is no way to make an array. In a forked child, where unpickled arrays are such,
// InvalidState, as for all others.
template <class Array>
const Holder<Array>& HolderOf(nb::handle_t<Holder<Array>> self) {
  if (!nb::inst_ready(self)) [[unlikely]] {
    engine::CheckNotForked("heddle");
    const nb::gil_scoped_acquire held;  // not all callers hold it
    throw InvalidType(fmt::format(
        "{}: expected an array that one of heddle's functions has made, got one that was never "
        "made",
        TypeName(self)));
  }
  return *nb::inst_ptr<Holder<Array>>(self);
}
template <class Array>
const Array& Held(nb::handle_t<Holder<Array>> self) {
  return HolderOf(self).array;
}

// f(), which makes an array or changes one, without the GIL.
template <class F>
auto Computed(const F& f) {
  const Blocking blocking;
  return f();
}

inline nb::object NotImplemented() { return nb::borrow(Py_NotImplemented); }

// f(number) for a number; something else may know better what to do, but not NumPy's arrays, whose
// message would be about NumPy.
template <class F>
nb::object ForNumber(nb::handle object, const F& f) {
  Scalar number = 0;
  if (ToScalar(object, &number)) return f(number);
  if (nb::hasattr(object, "__array_interface__")) {
    throw InvalidType(fmt::format(
        "expected a number or an array of heddle's beside one, got {}: nd.array(x) makes one of it",
        TypeName(object)));
  }
  return NotImplemented();
}

// What every array has.
template <class Array>
void BindArrayBasics(nb::class_<Holder<Array>>& type) {
  using Self = nb::handle_t<Holder<Array>>;
  type.def_prop_ro(
          "shape", [](Self a) { return FromShape(Held<Array>(a).shape()); },
          "The extents, outermost first.")
      .def_prop_ro(
          "size", [](Self a) { return Held<Array>(a).shape().size(); },
          "The number of elements; those of rows that are not there count too.")
      .def_prop_ro(
          "ndim", [](Self a) { return Held<Array>(a).shape().ndim(); }, "The number of axes.")
      .def_prop_ro("_dtype", [](Self a) { return static_cast<int>(Held<Array>(a).dtype()); })
      .def_prop_ro("_device", [](Self a) { return FromDevice(Held<Array>(a).device()); })
      .def_prop_ro("_var", [](Self a) { return PyVar{Held<Array>(a).var()}; })
      .def(
          "wait_to_read",
          [](Self a) {
            const Blocking blocking;
            Held<Array>(a).WaitToRead();
          },
          "Waits for pending writes; raises the error of an array that has one.")
      .def(
          "wait_to_write",
          [](Self a) {
            const Blocking blocking;
            Held<Array>(a).WaitToWrite();
          },
          "Waits for pending writes and reads.");
}

}  // namespace heddle::python
