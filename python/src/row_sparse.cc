// heddle._core.RowSparse: what heddle.nd.sparse.RowSparseNDArray derives from.
#include <heddle/error.h>
#include <heddle/math.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include <fmt/format.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "ops/elementwise.h"
#include "python/src/array_object.h"
#include "python/src/bindings.h"
#include "storage/array_checks.h"
#include "storage/array_ops.h"
#include "storage/parallel.h"

namespace heddle::python {

using Self = nb::handle_t<PyRowSparse>;

PyRowSparse* AsRowSparse(nb::handle object) {
  PyRowSparse* array = nullptr;
  return nb::try_cast(object, array) ? array : nullptr;
}

void CheckAlike(const char* call, const NDArray& dense, const RowSparseNDArray& rows) {
  if (&rows.engine() != &dense.engine()) storage::ThrowOtherEngine(call, rows.shape());
  if (rows.shape() != dense.shape()) storage::ThrowShape(call, dense.shape(), rows.shape());
  if (rows.dtype() != dense.dtype()) storage::ThrowDType(call, dense.dtype(), rows.dtype());
  if (rows.device() != dense.device()) storage::ThrowDevice(call, dense.device(), rows.device());
}

namespace {

// Rows of `rows` (as `row_ids` orders them, which need not be sorted), both NDArrays.
RowSparse FromRows(const PyArray& row_ids, const PyArray& rows,
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
  return Wrap(std::move(result));
}

// (row ids, rows) as dense arrays, as they are when everything pushed before is done.
nb::typed<nb::tuple, Dense, Dense> ToRows(Self self) {
  NDArray ids;
  NDArray rows;
  {
    const Blocking blocking;
    const Device device = Held(self).device();
    const RowSparseNDArray copy = Held(self).Copy(device.type == DeviceType::kGpu ? Cpu() : device);
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
  return nb::typed<nb::tuple, Dense, Dense>(
      nb::make_tuple(Wrap(std::move(ids)), Wrap(std::move(rows))));
}

// Queued: divides what is there. On a GPU by way of a dense array.
void Divide(const RowSparseNDArray& array, Scalar number) {
  if (array.device().type == DeviceType::kGpu) {
    RowSparseNDArray::FromDense(array.ToDense() / number).CopyTo(array);
    return;
  }
  storage::CheckScalar("Divide", array.dtype(), number);
  const auto body = [array, divisor = storage::ToKernel(number)] {
    const std::int64_t count = array.num_rows() * array.row_size();
    if (count == 0) return;
    auto* const rows = static_cast<std::byte*>(array.rows());
    const auto bytes = static_cast<std::int64_t>(SizeOf(array.dtype()));
    storage::ForBlocks(array.engine(), count, 2 * bytes,
                       [&](std::int64_t begin, std::int64_t end, ops::StoreMode mode) {
                         std::byte* const part = rows + begin * bytes;
                         ops::BinaryWithScalar(ops::BinaryOp::kDivide, array.dtype(), part, divisor,
                                               part, static_cast<std::size_t>(end - begin), mode);
                       });
  };
  array.engine().Push(
      {.name = "Divide", .reads = {array.var()}, .writes = {array.var()}, .device = array.device()},
      body);
}

// Queued: the rows that are there, times those of a dense array.
RowSparseNDArray Product(const NDArray& dense, const RowSparseNDArray& rows) {
  CheckAlike("Multiply", dense, rows);
  if (rows.device().type == DeviceType::kGpu)
    return RowSparseNDArray::FromDense(dense * rows.ToDense());
  RowSparseNDArray out = rows.Copy();
  const auto body = [dense, out] {
    const std::span<const std::int64_t> ids = out.row_ids();
    const auto width = static_cast<std::size_t>(out.row_size());
    const std::size_t row_bytes = width * SizeOf(out.dtype());
    if (ids.empty() || width == 0) return;
    auto* const to = static_cast<std::byte*>(out.rows());
    const auto* const from = static_cast<const std::byte*>(dense.const_data());
    storage::ForBlocks(
        out.engine(), static_cast<std::int64_t>(ids.size()),
        3 * static_cast<std::int64_t>(row_bytes),
        [&](std::int64_t begin, std::int64_t end, ops::StoreMode mode) {
          for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
            std::byte* const row = to + i * row_bytes;
            ops::Binary(ops::BinaryOp::kMultiply, out.dtype(), row,
                        from + static_cast<std::size_t>(ids[i]) * row_bytes, row, width, mode);
          }
        });
  };
  out.engine().Push({.name = "Multiply",
                     .reads = {dense.var(), out.var()},
                     .writes = {out.var()},
                     .device = out.device()},
                    body);
  return out;
}

RowSparse Multiplied(Self a, nb::handle b) {
  if (const PyArray* const dense = AsArray(b)) {
    return Wrap(Computed([&] { return Product(dense->array, Held(a)); }));
  }
  return ForNumber(b,
                   [&](Scalar number) { return Wrap(Computed([&] { return Held(a) * number; })); });
}

RowSparse Divided(Self a, nb::handle b) {
  return ForNumber(b, [&](Scalar number) {
    return Wrap(Computed([&] {
      RowSparseNDArray quotient = Held(a).Copy();
      Divide(quotient, number);
      return quotient;
    }));
  });
}

}  // namespace

void BindRowSparse(nb::module_& m) {
  const auto op = nb::is_operator();
  nb::class_<PyRowSparse> type(m, "RowSparse");
  BindArrayBasics(type);
  type.def(
          "_to_dense", [](Self a) { return Wrap(Computed([&] { return Held(a).ToDense(); })); },
          "A dense array with the same values.")
      .def("_to_rows", &ToRows)
      .def("_copy",
           [](Self a, int device) {
             return Wrap(Computed([&] { return Held(a).Copy(ToDevice(device)); }));
           })
      .def("_astype",
           [](Self a, int dtype) {
             return Wrap(Computed([&] { return Held(a).AsType(ToDType(dtype)); }));
           })
      .def("_copy_to",
           [](Self a, const PyRowSparse& to) {
             const Blocking blocking;
             Held(a).CopyTo(to.array);
           })
      .def("_copy_to_dense",
           [](Self a, const PyArray& to) {
             const NDArray& target = Writable("copyto", to);
             const Blocking blocking;
             Held(a).CopyTo(target);
           })
      .def(
          "retain",
          [](Self a, const PyArray& ids) {
            return Wrap(Computed([&] { return Held(a).Retain(ids.array); }));
          },
          nb::arg("indices"),
          "An array with the rows of `indices` only; those that are not there come as zeros.")
      .def(
          "__add__",
          [](Self a, nb::handle b) -> RowSparse {
            const PyRowSparse* const rows = AsRowSparse(b);
            if (rows == nullptr) return NotImplemented();
            return Wrap(Computed([&] { return Held(a) + rows->array; }));
          },
          op)
      .def(
          "__iadd__",
          [](Self a, nb::handle b) -> SameClass {
            const PyRowSparse* const rows = AsRowSparse(b);
            if (rows == nullptr) {  // a + b would be another array, and `a` as it was
              throw InvalidType(
                  fmt::format("+=: expected a RowSparseNDArray, got {}", TypeName(b)));
            }
            Computed([&] { Held(a) += rows->array; });
            return nb::borrow(a);
          },
          op)
      .def("__mul__", &Multiplied, op)
      .def("__rmul__", &Multiplied, op)
      .def("__truediv__", &Divided, op)
      .def(
          "__itruediv__",
          [](Self a, nb::handle b) -> SameClass {
            const Scalar number = ToNumber("/=", b);
            Computed([&] { Divide(Held(a), number); });
            return nb::borrow(a);
          },
          op)
      .def(
          "__imul__",
          [](Self a, nb::handle b) -> SameClass {
            const Scalar number = ToNumber("*=", b);
            Computed([&] { Held(a) *= number; });
            return nb::borrow(a);
          },
          op);
  m.def("row_sparse_zeros", [](const std::vector<std::int64_t>& shape, int dtype, int device) {
    return Wrap(Computed([&] {
      return RowSparseNDArray(Shape(shape), ToDType(dtype), ToDevice(device), TheEngine());
    }));
  });
  m.def("row_sparse_from_rows", &FromRows);
  // dense + row_sparse, as a dense array.
  m.def("add_dense_row_sparse", [](const PyArray& a, const PyRowSparse& b) {
    return Wrap(Computed([&] {
      NDArray sum = a.array.Copy();
      sum += b.array;
      return sum;
    }));
  });
}

}  // namespace heddle::python
