// Dense arrays, and what both kinds of arrays share. Row-sparse ones: row_sparse.cc.
#include <heddle/c_api.h>
#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>

#include <cstring>
#include <span>
#include <type_traits>
#include <utility>
#include <variant>

#include "c_api/call.h"
#include "c_api/handles.h"
#include "ops/dispatch.h"

using heddle::Device;
using heddle::DType;
using heddle::NDArray;
using heddle::RowSparseNDArray;
using heddle::Shape;
using heddle::c_api::AnyArray;
using heddle::c_api::Call;
using heddle::c_api::Free;
using heddle::c_api::NewHandle;
using heddle::c_api::Try;
using heddle::c_api::WaitFor;
using heddle::ops::DispatchDType;

static_assert(static_cast<int>(DType::kFloat32) == HEDDLE_FLOAT32 &&
              static_cast<int>(DType::kFloat64) == HEDDLE_FLOAT64 &&
              static_cast<int>(DType::kFloat16) == HEDDLE_FLOAT16 &&
              static_cast<int>(DType::kBFloat16) == HEDDLE_BFLOAT16 &&
              static_cast<int>(DType::kInt8) == HEDDLE_INT8 &&
              static_cast<int>(DType::kUInt8) == HEDDLE_UINT8 &&
              static_cast<int>(DType::kInt32) == HEDDLE_INT32 &&
              static_cast<int>(DType::kInt64) == HEDDLE_INT64 &&
              static_cast<int>(DType::kBool) == HEDDLE_BOOL);
static_assert(static_cast<int>(heddle::DeviceType::kCpu) == HEDDLE_CPU &&
              static_cast<int>(heddle::DeviceType::kCpuPinned) == HEDDLE_CPU_PINNED &&
              static_cast<int>(heddle::DeviceType::kGpu) == HEDDLE_GPU);
static_assert(
    std::is_same_v<std::variant_alternative_t<HEDDLE_DENSE, AnyArray>, NDArray> &&
    std::is_same_v<std::variant_alternative_t<HEDDLE_ROW_SPARSE, AnyArray>, RowSparseNDArray>);

// ---- Making them

HeddleStatus HeddleArrayCreate(size_t ndim, const int64_t* shape, int dtype, int device_type,
                               int device_id, HeddleArray* array) {
  return Try(__func__, [&](const Call& call) {
    HeddleArray& result = call.Result("array", array);
    result = NewHandle<HeddleArray>(NDArray(call.ToShape(ndim, shape), call.ToDType("dtype", dtype),
                                            call.ToDevice(device_type, device_id)));
  });
}

HeddleStatus HeddleArrayFromHost(size_t count, const void* values, int values_dtype, size_t ndim,
                                 const int64_t* shape, int dtype, int device_type, int device_id,
                                 HeddleArray* array) {
  return Try(__func__, [&](const Call& call) {
    HeddleArray& result = call.Result("array", array);
    call.Elements("values", count, values);
    const Shape dims = call.ToShape(ndim, shape);
    const DType to = call.ToDType("dtype", dtype);
    const Device device = call.ToDevice(device_type, device_id);
    result = DispatchDType(call.ToHostDType("values_dtype", values_dtype, to), [&](auto type) {
      using T = typename decltype(type)::type;
      const std::span<const T> typed(static_cast<const T*>(values), count);
      return NewHandle<HeddleArray>(NDArray::FromData(typed, dims, to, device));
    });
  });
}

HeddleStatus HeddleArrayFree(HeddleArray array) { return Free(__func__, "array", array); }

HeddleStatus HeddleArrayShare(HeddleArray array, HeddleArray* same) {
  return Try(__func__, [&](const Call& call) {
    HeddleArray& result = call.Result("same", same);
    result = NewHandle<HeddleArray>(call.Get("array", array));
  });
}

HeddleStatus HeddleArraySlice(HeddleArray array, int64_t begin, int64_t end, HeddleArray* view) {
  return Try(__func__, [&](const Call& call) {
    HeddleArray& result = call.Result("view", view);
    result = NewHandle<HeddleArray>(call.Dense("array", array).Slice(begin, end));
  });
}

HeddleStatus HeddleArrayReshape(HeddleArray array, size_t ndim, const int64_t* shape,
                                HeddleArray* view) {
  return Try(__func__, [&](const Call& call) {
    HeddleArray& result = call.Result("view", view);
    result = NewHandle<HeddleArray>(call.Dense("array", array).Reshape(call.ToShape(ndim, shape)));
  });
}

// ---- Looking at them

HeddleStatus HeddleArrayGetShape(HeddleArray array, size_t* ndim, const int64_t** shape) {
  return Try(__func__, [&](const Call& call) {
    std::visit(
        [&](const auto& any) {
          if (ndim != nullptr) *ndim = any.shape().ndim();
          if (shape != nullptr) *shape = any.shape().begin();
        },
        call.Get("array", array));
  });
}

HeddleStatus HeddleArrayGetSize(HeddleArray array, int64_t* elements) {
  return Try(__func__, [&](const Call& call) {
    call.Result("elements", elements) =
        std::visit([](const auto& any) { return any.shape().size(); }, call.Get("array", array));
  });
}

HeddleStatus HeddleArrayGetDType(HeddleArray array, int* dtype) {
  return Try(__func__, [&](const Call& call) {
    call.Result("dtype", dtype) = static_cast<int>(
        std::visit([](const auto& any) { return any.dtype(); }, call.Get("array", array)));
  });
}

HeddleStatus HeddleArrayGetDevice(HeddleArray array, int* device_type, int* device_id) {
  return Try(__func__, [&](const Call& call) {
    const Device device =
        std::visit([](const auto& any) { return any.device(); }, call.Get("array", array));
    if (device_type != nullptr) *device_type = static_cast<int>(device.type);
    if (device_id != nullptr) *device_id = device.id;
  });
}

HeddleStatus HeddleArrayGetKind(HeddleArray array, int* kind) {
  return Try(__func__, [&](const Call& call) {
    call.Result("kind", kind) = static_cast<int>(call.Get("array", array).index());
  });
}

HeddleStatus HeddleArrayGetVar(HeddleArray array, HeddleVar* var) {
  return Try(__func__, [&](const Call& call) {
    HeddleVar& result = call.Result("var", var);
    result = NewHandle<HeddleVar>(
        std::visit([](const auto& any) { return any.var(); }, call.Get("array", array)));
  });
}

// ---- Queued operations

namespace {

struct CopyTo {
  int priority;

  void operator()(const NDArray& from, const NDArray& to) const { from.CopyTo(to, priority); }
  void operator()(const RowSparseNDArray& from, const NDArray& to) const {
    from.CopyTo(to, priority);
  }
  void operator()(const RowSparseNDArray& from, const RowSparseNDArray& to) const {
    from.CopyTo(to, priority);
  }
  void operator()(const NDArray& from, const RowSparseNDArray& to) const {
    RowSparseNDArray::FromDense(from, priority).CopyTo(to, priority);
  }
};

enum class Operation { kAdd, kSubtract, kMultiply, kDivide };
static_assert(static_cast<int>(Operation::kAdd) == HEDDLE_ADD &&
              static_cast<int>(Operation::kSubtract) == HEDDLE_SUBTRACT &&
              static_cast<int>(Operation::kMultiply) == HEDDLE_MULTIPLY &&
              static_cast<int>(Operation::kDivide) == HEDDLE_DIVIDE);

Operation ToOperation(const Call& call, int operation) {
  return call.OneOf<Operation>("operation", operation, 4);
}

// `other` is an array or a number.
template <class Other>
void Combine(const NDArray& array, Operation operation, const Other& other) {
  switch (operation) {
    case Operation::kAdd:
      array += other;
      break;
    case Operation::kSubtract:
      array -= other;
      break;
    case Operation::kMultiply:
      array *= other;
      break;
    case Operation::kDivide:
      array /= other;
      break;
  }
}

}  // namespace

HeddleStatus HeddleArrayCopyTo(HeddleArray source, HeddleArray destination, int priority) {
  return Try(__func__, [&](const Call& call) {
    std::visit(CopyTo{priority}, call.Get("source", source), call.Get("destination", destination));
  });
}

HeddleStatus HeddleArrayFill(HeddleArray array, double value, int priority) {
  return Try(__func__, [&](const Call& call) { call.Dense("array", array).Fill(value, priority); });
}

HeddleStatus HeddleArrayCopyFromHost(HeddleArray array, size_t count, const void* values,
                                     int values_dtype, int priority) {
  return Try(__func__, [&](const Call& call) {
    const NDArray dense = call.Dense("array", array);
    call.Elements("values", count, values);
    DispatchDType(call.ToHostDType("values_dtype", values_dtype, dense.dtype()), [&](auto type) {
      using T = typename decltype(type)::type;
      dense.CopyFromHost(std::span<const T>(static_cast<const T*>(values), count), priority);
    });
  });
}

HeddleStatus HeddleArrayCombine(HeddleArray array, int operation, HeddleArray other) {
  return Try(__func__, [&](const Call& call) {
    const Operation how = ToOperation(call, operation);
    const AnyArray left = call.Get("array", array);
    const AnyArray right = call.Get("other", other);
    if (const auto* dense = std::get_if<NDArray>(&right)) {
      Combine(call.Dense("array", array), how, *dense);
      return;
    }
    if (how != Operation::kAdd) call.Refuse("other", "a dense array", "a row-sparse one");
    std::visit([&](const auto& any) { any += std::get<RowSparseNDArray>(right); }, left);
  });
}

HeddleStatus HeddleArrayCombineScalar(HeddleArray array, int operation, double value) {
  return Try(__func__, [&](const Call& call) {
    const Operation how = ToOperation(call, operation);
    const AnyArray any = call.Get("array", array);
    if (const auto* dense = std::get_if<NDArray>(&any)) {
      Combine(*dense, how, heddle::Scalar(value));
    } else if (how == Operation::kMultiply) {
      std::get<RowSparseNDArray>(any) *= value;
    } else {
      call.Refuse("array", "a dense array", "a row-sparse one");
    }
  });
}

HeddleStatus HeddleArrayCopy(HeddleArray array, HeddleArray* copy) {
  return Try(__func__, [&](const Call& call) {
    HeddleArray& result = call.Result("copy", copy);
    result = NewHandle<HeddleArray>(
        std::visit([](const auto& any) { return AnyArray(any.Copy()); }, call.Get("array", array)));
  });
}

HeddleStatus HeddleArrayCopyAsKind(HeddleArray array, int kind, HeddleArray* copy) {
  return Try(__func__, [&](const Call& call) {
    HeddleArray& result = call.Result("copy", copy);
    const AnyArray from = call.Get("array", array);
    enum class Kind { kDense = HEDDLE_DENSE, kRowSparse = HEDDLE_ROW_SPARSE };
    const auto to_kind = call.OneOf<Kind>("kind", kind, 2);
    AnyArray to;
    if (from.index() == static_cast<std::size_t>(to_kind)) {
      to = std::visit([](const auto& any) { return AnyArray(any.Copy()); }, from);
    } else if (to_kind == Kind::kDense) {
      to = std::get<RowSparseNDArray>(from).ToDense();
    } else {
      to = RowSparseNDArray::FromDense(std::get<NDArray>(from));
    }
    result = NewHandle<HeddleArray>(std::move(to));
  });
}

// ---- Waiting

HeddleStatus HeddleArrayWaitToRead(HeddleArray array, int64_t timeout_ms) {
  return Try(__func__, [&](const Call& call) {
    const AnyArray any = call.Get("array", array);
    WaitFor(timeout_ms, [&](auto... deadline) {
      std::visit([&](const auto& waited) { waited.WaitToRead(deadline...); }, any);
    });
  });
}

HeddleStatus HeddleArrayWaitToWrite(HeddleArray array, int64_t timeout_ms) {
  return Try(__func__, [&](const Call& call) {
    const AnyArray any = call.Get("array", array);
    WaitFor(timeout_ms, [&](auto... deadline) {
      std::visit([&](const auto& waited) { waited.WaitToWrite(deadline...); }, any);
    });
  });
}

HeddleStatus HeddleArrayCopyToHost(HeddleArray array, size_t count, void* values,
                                   int values_dtype) {
  return Try(__func__, [&](const Call& call) {
    const AnyArray any = call.Get("array", array);
    const DType to = call.ToDType("values_dtype", values_dtype);
    call.Elements("values", count, values);
    std::visit(
        [&](const auto& from) {
          if (!std::cmp_equal(from.shape().size(), count)) {
            call.Refuse("count", fmt::format("the {} elements of the array", from.shape().size()),
                        fmt::to_string(count));
          }
          // Through an array of its own: another thread may write to this one after a wait.
          const NDArray copy(from.shape(), to, heddle::Cpu(), from.engine());
          from.CopyTo(copy);
          copy.WaitToRead();
          if (count > 0) {
            std::memcpy(values, copy.const_data(), static_cast<std::size_t>(copy.bytes()));
          }
        },
        any);
  });
}

HeddleStatus HeddleArrayGetData(HeddleArray array, void** data) {
  return Try(__func__, [&](const Call& call) {
    void*& result = call.Result("data", data);
    result = call.Dense("array", array).data();
  });
}

HeddleStatus HeddleArrayGetConstData(HeddleArray array, const void** data) {
  return Try(__func__, [&](const Call& call) {
    const void*& result = call.Result("data", data);
    result = call.Dense("array", array).const_data();
  });
}
