// RowSparseNDArray: an array of which only some rows are there, each under its row id; all others
// are zero. What gradients of embeddings look like.
//
//   auto gradient = heddle::RowSparseNDArray::FromVectors<float>({2, 7}, rows, {1000000, 64});
//   gradient *= 0.5;                                   // queued: returns at once
//   weight += gradient;                                // an NDArray: touches rows 2 and 7 only
//   auto [row_ids, values] = gradient.ToVectors<float>();  // waits for what it needs
//
// A value is a list of row ids (int64, sorted and unique, in [0, shape()[0])) and as many rows, one
// after another. A row is an element of the first axis; a row that is there may be all zeros. How
// many there are changes with each write and is known only when that has run, so the memory is
// taken inside the ops.
//
// A handle, as NDArray is, with the same promises about order, errors, devices and threads
// (heddle/ndarray.h). There are no views: every op that writes one writes it whole, except += and
// *=.
//
// Cost: operations cost the rows that are there, never the rows of the shape; conversion to and
//       from dense arrays costs these too.
#pragma once

#include <heddle/device.h>
#include <heddle/dtype.h>
#include <heddle/engine.h>
#include <heddle/ndarray.h>
#include <heddle/shape.h>
#include <heddle/var.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

namespace heddle {

namespace internal {
struct RowSparseState;
class RowSparseAccess;
}  // namespace internal

// The rows that are there, in memory of one's own: rows.size() is row_ids.size() times the elements
// of a row.
template <class T>
struct RowVectors {
  std::vector<std::int64_t> row_ids;
  std::vector<T> rows;
};

class RowSparseNDArray {
 public:
  RowSparseNDArray() = default;  // empty: usable for assignment and empty() only
  // No rows are there: all zeros. InvalidArgument for a shape without an axis.
  explicit RowSparseNDArray(Shape shape, DType dtype = DType::kFloat32, Device device = Cpu(),
                            Engine& engine = Engine::Default());
  static RowSparseNDArray Zeros(Shape shape, DType dtype = DType::kFloat32, Device device = Cpu(),
                                Engine& engine = Engine::Default()) {
    return RowSparseNDArray(std::move(shape), dtype, device, engine);
  }

  // A copy of host values, cast to `dtype`: rows in the order of row_ids, which need not be sorted.
  // InvalidArgument for ids that repeat or are out of range, or a number of values that does not
  // fit.
  template <class T>
  static RowSparseNDArray FromVectors(const std::vector<std::int64_t>& row_ids,
                                      const std::vector<T>& rows, Shape shape,
                                      DType dtype = kDTypeOf<T>, Device device = Cpu(),
                                      Engine& engine = Engine::Default()) {
    return FromData(std::span<const std::int64_t>(row_ids), std::span<const T>(rows),
                    std::move(shape), dtype, device, engine);
  }
  template <class T>
  static RowSparseNDArray FromData(std::span<const std::int64_t> row_ids, std::span<const T> rows,
                                   Shape shape, DType dtype = kDTypeOf<T>, Device device = Cpu(),
                                   Engine& engine = Engine::Default()) {
    return FromHost(row_ids, rows.data(), rows.size(), kDTypeOf<T>, std::move(shape), dtype, device,
                    engine);
  }
  // The rows of `dense` that have an element other than zero. Queued.
  static RowSparseNDArray FromDense(const NDArray& dense, int priority = 0);

  bool empty() const { return state_ == nullptr; }
  explicit operator bool() const { return !empty(); }
  // All of these throw InvalidArgument if empty().
  const Shape& shape() const;
  DType dtype() const;
  Device device() const;
  Engine& engine() const;
  const Var& var() const;
  std::int64_t row_size() const;  // elements of a row
  bool IsSameAs(const RowSparseNDArray& other) const { return state_ == other.state_; }

  // What is there: for the bodies of ops that name var(), or after a wait. T must be the dtype's
  // type; rows<const float>() is only to be read, as NDArray::data<const float>(). On a GPU, ids
  // and rows are addresses of the device, for the bodies of GPU ops.
  std::int64_t num_rows() const;
  std::span<const std::int64_t> row_ids() const;
  template <class T>
  T* rows() const {
    constexpr DType kExpected = kDTypeOf<std::remove_const_t<T>>;
    if constexpr (std::is_const_v<T>) {
      return static_cast<T*>(TypedConstRows(kExpected));
    } else {
      return static_cast<T*>(TypedRows(kExpected));
    }
  }
  void* rows() const;
  const void* const_rows() const;
  // For the bodies of ops that write var(): from now on the rows of `row_ids` are there, with
  // undefined contents, to be written through rows(). InvalidArgument, changing nothing, unless the
  // ids are sorted, unique and in range, and for an array on a GPU; OutOfMemory, leaving no rows.
  void SetRowIds(std::span<const std::int64_t> row_ids) const;

  // Queued operations; a higher priority runs first.

  // Copies to `dst`: any device, casting to its dtype; equal shapes, one engine. Onto itself:
  // nothing. A dense `dst` gets zeros where no row is.
  void CopyTo(const RowSparseNDArray& dst, int priority = 0) const;
  void CopyTo(const NDArray& dst, int priority = 0) const;
  // A fresh array with these values; on this device, another one, or as another dtype.
  RowSparseNDArray Copy(int priority = 0) const;
  RowSparseNDArray Copy(Device device, int priority = 0) const;
  RowSparseNDArray AsType(DType dtype, int priority = 0) const;
  NDArray ToDense(int priority = 0) const;
  // A fresh array with the rows of `row_ids`: numbers of any dtype but bool, in any shape, on any
  // device, neither sorted nor unique. Rows that are not there come as rows of zeros; but if no row
  // is there at all, none comes. An id that is out of range or has a fraction fails the op:
  // InvalidArgument at waits on the result.
  RowSparseNDArray Retain(const NDArray& row_ids, int priority = 0) const;
  // No rows are there from now on.
  void Clear(int priority = 0) const;

  // Equal shapes, dtypes and devices. Adding rows that are all there already costs only these;
  // others are inserted, which moves the rows behind them.
  const RowSparseNDArray& operator+=(const RowSparseNDArray& other) const;
  // Every element of the rows that are there.
  const RowSparseNDArray& operator*=(Scalar value) const;

  // As for NDArray.
  void WaitToRead() const;
  void WaitToRead(Deadline deadline) const;
  void WaitToWrite() const;
  void WaitToWrite(Deadline deadline) const;

  // The rows that are there, or all elements as a dense array has them, as they are when everything
  // pushed before is done, converted to T. Waits.
  template <class T>
  RowVectors<T> ToVectors() const {
    static_assert(!std::is_same_v<T, bool>, "std::vector<bool> has no elements to copy to");
    const RowSparseNDArray copy = ReadableCopy(kDTypeOf<T>);
    const std::span<const std::int64_t> ids = copy.row_ids();
    const T* const first = copy.rows<T>();
    return {{ids.begin(), ids.end()}, {first, first + copy.num_rows() * copy.row_size()}};
  }
  template <class T>
  std::vector<T> ToVector() const {
    return ToDense().ToVector<T>();
  }

 private:
  friend class internal::RowSparseAccess;  // storage/row_sparse_state.h

  static RowSparseNDArray FromHost(std::span<const std::int64_t> row_ids, const void* rows,
                                   std::size_t count, DType from, Shape shape, DType dtype,
                                   Device device, Engine& engine);
  RowSparseNDArray ReadableCopy(DType dtype) const;
  void CheckDType(DType expected) const;
  void* TypedRows(DType expected) const;
  const void* TypedConstRows(DType expected) const;

  // Shared by the handles, those in the bodies of queued ops among them.
  std::shared_ptr<internal::RowSparseState> state_;
};

RowSparseNDArray operator+(const RowSparseNDArray& a, const RowSparseNDArray& b);
RowSparseNDArray operator*(const RowSparseNDArray& a, Scalar b);
RowSparseNDArray operator*(Scalar a, const RowSparseNDArray& b);
// Adds to the rows of `a` that are there in `b`. Equal shapes, dtypes and devices.
const NDArray& operator+=(const NDArray& a, const RowSparseNDArray& b);

// out = inputs[0] + inputs[1] + ..., queued as one op: the rows that are there in one input at
// least, added in list order (float16 and bfloat16 in float32, rounded once): the same bits for
// every number of workers. One input at least; an input may be `out` itself. Equal shapes and
// dtypes; devices of one memory (all cpu(i)) may be mixed.
void Sum(std::span<const RowSparseNDArray> inputs, const RowSparseNDArray& out, int priority = 0);
void Sum(std::initializer_list<RowSparseNDArray> inputs, const RowSparseNDArray& out,
         int priority = 0);

}  // namespace heddle
