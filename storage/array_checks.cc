#include "storage/array_checks.h"

#include <heddle/error.h>

#include <cmath>

#include <fmt/format.h>

namespace heddle::storage {
namespace {

bool FitsInteger(DType dtype, std::int64_t value) {
  switch (dtype) {
    case DType::kInt8:
      return std::in_range<std::int8_t>(value);
    case DType::kUInt8:
      return std::in_range<std::uint8_t>(value);
    case DType::kInt32:
      return std::in_range<std::int32_t>(value);
    case DType::kBool:
      return value == 0 || value == 1;
    default:
      return true;
  }
}

}  // namespace

void ThrowEmpty(const char* operation) {
  throw InvalidArgument(fmt::format("{}: expected an array, got an empty handle", operation));
}

void ThrowOtherEngine(const char* operation, const Shape& shape) {
  throw InvalidArgument(
      fmt::format("{}: expected arrays of one engine, got one of another engine (shape {})",
                  operation, ToString(shape)));
}

void ThrowShape(const char* operation, const Shape& expected, const Shape& given) {
  throw InvalidArgument(
      fmt::format("{}: expected shape {}, got {}", operation, ToString(expected), ToString(given)));
}

void ThrowDType(const char* operation, DType expected, DType given) {
  throw InvalidArgument(
      fmt::format("{}: expected dtype {}, got {}", operation, Name(expected), Name(given)));
}

void ThrowNotOnGpu(const char* operation, Device given) {
  throw InvalidArgument(
      fmt::format("{}: GPUs do not have it yet: expected an array on cpu(i), got one on {}",
                  operation, ToString(given)));
}

void ThrowDevice(const char* operation, Device expected, Device given) {
  throw InvalidArgument(fmt::format("{}: expected device {}, got {}", operation, ToString(expected),
                                    ToString(given)));
}

void CheckRowIdArray(const char* operation, const NDArray& row_ids, const Engine& engine) {
  CheckNotEmpty(operation, row_ids);
  if (&row_ids.engine() != &engine) ThrowOtherEngine(operation, row_ids.shape());
  if (row_ids.dtype() == DType::kBool) {
    throw InvalidArgument(
        fmt::format("{}: expected row ids of a numeric dtype, got bool", operation));
  }
}

void CheckScalar(const char* operation, DType dtype, Scalar value) {
  if (IsFloating(dtype)) return;
  if (!value.is_integer()) {
    // 2.0 is as good as 2.
    const double real = value.real();
    if (real == std::trunc(real) && real >= -0x1p63 && real < 0x1p63 &&
        FitsInteger(dtype, static_cast<std::int64_t>(real))) {
      return;
    }
  } else if (FitsInteger(dtype, value.integer())) {
    return;
  }
  throw InvalidArgument(fmt::format("{}: expected a scalar that {} holds exactly, got {}",
                                    operation, Name(dtype), value.real()));
}

}  // namespace heddle::storage
