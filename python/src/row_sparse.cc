// heddle._core.RowSparse: what heddle.nd.sparse.RowSparseNDArray derives from.
#include <heddle/error.h>

#include <optional>

#include <fmt/format.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "python/src/bindings.h"

namespace heddle::python {

using Self = nb::handle_t<PyRowSparse>;

PyRowSparse* AsRowSparse(nb::handle object) {
  PyRowSparse* array = nullptr;
  return nb::try_cast(object, array) ? array : nullptr;
}

namespace {

const RowSparseNDArray& Held(nb::handle self) { return nb::inst_ptr<PyRowSparse>(self)->array; }

template <class F>
nb::object Fresh(const F& f) {
  RowSparseNDArray result;
  {
    const Unlocked unlocked;
    result = f();
  }
  return WrapRowSparse(std::move(result));
}
template <class F>
nb::object FreshDense(const F& f) {
  NDArray result;
  {
    const Unlocked unlocked;
    result = f();
  }
  return WrapArray(std::move(result));
}

Scalar Number(nb::handle object) {
  Scalar number = 0;
  if (!ToScalar(object, &number)) {
    throw InvalidType(fmt::format("expected a number, got {}", TypeName(object)));
  }
  return number;
}

// Rows of `rows` (as `row_ids` orders them, which need not be sorted), both NDArrays.
nb::object FromRows(const PyArray& row_ids, const PyArray& rows,
                    const std::vector<std::int64_t>& shape, int dtype, int device) {
  RowSparseNDArray result;
  {
    const Blocking blocking;
    const std::vector<std::int64_t> ids = row_ids.array.ToVector<std::int64_t>();
    // Through a dense row block of the target's dtype: a value of any dtype arrives unharmed.
    const DType target = ToDType(dtype);
    const auto from = [&](auto zero) {
      using T = decltype(zero);
      return RowSparseNDArray::FromVectors<T>(ids, rows.array.ToVector<T>(), Shape(shape), target,
                                              ToDevice(device), TheEngine());
    };
    result = IsFloating(rows.array.dtype()) ? from(double{}) : from(std::int64_t{});
  }
  return WrapRowSparse(std::move(result));
}

// (row ids, rows) as dense arrays, as they are when everything pushed before is done.
nb::tuple ToRows(Self self) {
  NDArray ids;
  NDArray rows;
  {
    const Blocking blocking;
    const RowSparseNDArray copy = Held(self).Copy();
    copy.WaitToRead();
    const std::span<const std::int64_t> held = copy.row_ids();
    const auto count = static_cast<std::int64_t>(held.size());
    ids = NDArray::FromData<std::int64_t>(held, {count}, DType::kInt64, copy.device(), TheEngine());
    std::vector<std::int64_t> dims(copy.shape().begin(), copy.shape().end());
    dims[0] = count;
    rows = NDArray(Shape(dims), copy.dtype(), copy.device(), TheEngine());
    const auto from = reinterpret_cast<const std::byte*>(copy.const_rows());
    const NDArray source = NDArray::FromForeign(
        const_cast<std::byte*>(from), Shape(dims), copy.dtype(), [copy] {}, copy.device(),
        TheEngine());
    source.CopyTo(rows);
  }
  return nb::make_tuple(WrapArray(std::move(ids)), WrapArray(std::move(rows)));
}

}  // namespace

void BindRowSparse(nb::module_& m) {
  const auto op = nb::is_operator();
  nb::class_<PyRowSparse>(m, "RowSparse")
      .def_prop_ro(
          "shape", [](Self a) { return FromShape(Held(a).shape()); },
          "The extents of the whole array, outermost first.")
      .def_prop_ro(
          "size", [](Self a) { return Held(a).shape().size(); },
          "The number of elements, those of rows that are not there included.")
      .def_prop_ro(
          "ndim", [](Self a) { return Held(a).shape().ndim(); }, "The number of axes.")
      .def_prop_ro("_dtype", [](Self a) { return static_cast<int>(Held(a).dtype()); })
      .def_prop_ro("_device", [](Self a) { return FromDevice(Held(a).device()); })
      .def_prop_ro("_var", [](Self a) { return PyVar{Held(a).var()}; })
      .def(
          "wait_to_read",
          [](Self a) {
            const Blocking blocking;
            Held(a).WaitToRead();
          },
          "Waits for pending writes; raises the error of an array that has one.")
      .def(
          "wait_to_write",
          [](Self a) {
            const Blocking blocking;
            Held(a).WaitToWrite();
          },
          "Waits for pending writes and reads.")
      .def("_to_dense", [](Self a) { return FreshDense([&] { return Held(a).ToDense(); }); })
      .def("_to_rows", &ToRows)
      .def("_copy",
           [](Self a, int device) { return Fresh([&] { return Held(a).Copy(ToDevice(device)); }); })
      .def("_astype",
           [](Self a, int dtype) { return Fresh([&] { return Held(a).AsType(ToDType(dtype)); }); })
      .def("_copy_to",
           [](Self a, const PyRowSparse& to) {
             const Unlocked unlocked;
             Held(a).CopyTo(to.array);
           })
      .def("_copy_to_dense",
           [](Self a, const PyArray& to) {
             const Unlocked unlocked;
             Held(a).CopyTo(to.array);
           })
      .def(
          "retain",
          [](Self a, const PyArray& ids) {
            return Fresh([&] { return Held(a).Retain(ids.array); });
          },
          nb::arg("indices"),
          "An array with the rows of `indices` only; those that are not there come as zeros.")
      .def(
          "__add__",
          [](Self a, nb::handle b) -> nb::object {
            if (const PyRowSparse* rows = AsRowSparse(b)) {
              return Fresh([&] { return Held(a) + rows->array; });
            }
            return nb::borrow(Py_NotImplemented);
          },
          op)
      .def(
          "__iadd__",
          [](Self a, nb::handle b) -> nb::object {
            const PyRowSparse* const rows = AsRowSparse(b);
            if (rows == nullptr) return nb::borrow(Py_NotImplemented);
            {
              const Unlocked unlocked;
              Held(a) += rows->array;
            }
            return nb::borrow(a);
          },
          op)
      .def(
          "__mul__",
          [](Self a, nb::handle b) -> nb::object {
            Scalar number = 0;
            if (!ToScalar(b, &number)) return nb::borrow(Py_NotImplemented);
            return Fresh([&] { return Held(a) * number; });
          },
          op)
      .def(
          "__rmul__",
          [](Self a, nb::handle b) -> nb::object {
            Scalar number = 0;
            if (!ToScalar(b, &number)) return nb::borrow(Py_NotImplemented);
            return Fresh([&] { return Held(a) * number; });
          },
          op)
      .def(
          "__imul__",
          [](Self a, nb::handle b) -> nb::object {
            const Scalar number = Number(b);
            {
              const Unlocked unlocked;
              Held(a) *= number;
            }
            return nb::borrow(a);
          },
          op);
  m.def("row_sparse_zeros", [](const std::vector<std::int64_t>& shape, int dtype, int device) {
    return WrapRowSparse(
        RowSparseNDArray(Shape(shape), ToDType(dtype), ToDevice(device), TheEngine()));
  });
  m.def("row_sparse_from_rows", &FromRows);
  // dense + row_sparse, as a dense array.
  m.def("add_dense_row_sparse", [](const PyArray& a, const PyRowSparse& b) {
    return FreshDense([&] {
      NDArray sum = a.array.Copy();
      sum += b.array;
      return sum;
    });
  });
}

}  // namespace heddle::python
