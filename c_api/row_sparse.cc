// What only row-sparse arrays have.
#include <heddle/c_api.h>
#include <heddle/row_sparse.h>

#include <span>
#include <utility>

#include "c_api/call.h"
#include "c_api/handles.h"
#include "ops/dispatch.h"

using heddle::Device;
using heddle::DType;
using heddle::RowSparseNDArray;
using heddle::Shape;
using heddle::c_api::Call;
using heddle::c_api::NewHandle;
using heddle::c_api::Try;
using heddle::ops::DispatchDType;

HeddleStatus HeddleRowSparseCreate(size_t ndim, const int64_t* shape, int dtype, int device_type,
                                   int device_id, HeddleArray* array) {
  return Try(__func__, [&](const Call& call) {
    HeddleArray& result = call.Result("array", array);
    result = NewHandle<HeddleArray>(RowSparseNDArray(call.ToShape(ndim, shape),
                                                     call.ToDType("dtype", dtype),
                                                     call.ToDevice(device_type, device_id)));
  });
}

HeddleStatus HeddleRowSparseFromHost(size_t num_rows, const int64_t* row_ids, const void* rows,
                                     int rows_dtype, size_t ndim, const int64_t* shape, int dtype,
                                     int device_type, int device_id, HeddleArray* array) {
  return Try(__func__, [&](const Call& call) {
    HeddleArray& result = call.Result("array", array);
    const std::span<const std::int64_t> ids = call.List("row_ids", num_rows, row_ids);
    const Shape dims = call.ToShape(ndim, shape);
    if (ndim == 0) call.Refuse("ndim", "at least one axis", "0");
    if (std::cmp_greater(num_rows, dims[0])) {  // ids do not repeat
      call.Refuse("num_rows", fmt::format("at most the {} rows of the shape", dims[0]),
                  fmt::to_string(num_rows));
    }
    const Shape row(std::span(dims.begin() + 1, dims.end()));
    const std::size_t count = num_rows * static_cast<std::size_t>(row.size());
    call.Elements("rows", count, rows);
    const DType to = call.ToDType("dtype", dtype);
    const Device device = call.ToDevice(device_type, device_id);
    result = DispatchDType(call.ToHostDType("rows_dtype", rows_dtype, to), [&](auto type) {
      using T = typename decltype(type)::type;
      const std::span<const T> typed(static_cast<const T*>(rows), count);
      return NewHandle<HeddleArray>(RowSparseNDArray::FromData(ids, typed, dims, to, device));
    });
  });
}

HeddleStatus HeddleRowSparseGetRows(HeddleArray array, size_t* num_rows, const int64_t** row_ids,
                                    const void** rows) {
  return Try(__func__, [&](const Call& call) {
    const RowSparseNDArray sparse = call.RowSparse("array", array);
    const std::span<const std::int64_t> ids = sparse.row_ids();
    const void* const first = sparse.const_rows();
    if (num_rows != nullptr) *num_rows = ids.size();
    if (row_ids != nullptr) *row_ids = ids.data();
    if (rows != nullptr) *rows = first;
  });
}
