// From a DType at run time to a C++ type at compile time.
#pragma once

#include <heddle/dtype.h>

#include <string_view>
#include <type_traits>
#include <utility>

namespace heddle::ops {

namespace internal {
[[noreturn]] void FailDispatch(const char* expected);  // a fault of the caller: aborts
}  // namespace internal

// Returns f(std::type_identity<T>{}) with the T of `dtype`: float, double, Float16, BFloat16, a
// fixed width integer or bool. Elements of bool arrays are bytes: read and write them as
// std::uint8_t.
template <typename F>
decltype(auto) DispatchDType(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return std::forward<F>(f)(std::type_identity<float>{});
    case DType::kFloat64:
      return std::forward<F>(f)(std::type_identity<double>{});
    case DType::kFloat16:
      return std::forward<F>(f)(std::type_identity<Float16>{});
    case DType::kBFloat16:
      return std::forward<F>(f)(std::type_identity<BFloat16>{});
    case DType::kInt8:
      return std::forward<F>(f)(std::type_identity<std::int8_t>{});
    case DType::kUInt8:
      return std::forward<F>(f)(std::type_identity<std::uint8_t>{});
    case DType::kInt32:
      return std::forward<F>(f)(std::type_identity<std::int32_t>{});
    case DType::kInt64:
      return std::forward<F>(f)(std::type_identity<std::int64_t>{});
    case DType::kBool:
      return std::forward<F>(f)(std::type_identity<bool>{});
  }
  internal::FailDispatch("dtype is one of DType");
}

// The same for the floating types only. The caller has made sure that IsFloating(dtype).
template <typename F>
decltype(auto) DispatchFloating(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return std::forward<F>(f)(std::type_identity<float>{});
    case DType::kFloat64:
      return std::forward<F>(f)(std::type_identity<double>{});
    case DType::kFloat16:
      return std::forward<F>(f)(std::type_identity<Float16>{});
    case DType::kBFloat16:
      return std::forward<F>(f)(std::type_identity<BFloat16>{});
    default:
      internal::FailDispatch("IsFloating(dtype)");
  }
}

// Throws InvalidArgument, naming the kernel and the dtype, unless IsFloating(dtype).
void RequireFloating(std::string_view kernel, DType dtype);

// Throws InvalidArgument, naming the kernel and the dtype, unless it is float16 or bfloat16.
void Require16BitFloat(std::string_view kernel, DType dtype);

// The type that elements of type T are computed in.
template <typename T>
struct ComputeTypeOf {
  using type = T;
};
template <>
struct ComputeTypeOf<Float16> {
  using type = float;
};
template <>
struct ComputeTypeOf<BFloat16> {
  using type = float;
};
template <typename T>
using ComputeType = typename ComputeTypeOf<T>::type;

// The type through which elements of type T are read and written.
template <typename T>
using StorageType = std::conditional_t<std::is_same_v<T, bool>, std::uint8_t, T>;

}  // namespace heddle::ops
