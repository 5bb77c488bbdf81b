#include "ops/dispatch.h"

#include <heddle/error.h>

#include <fmt/format.h>

#include "base/check.h"

namespace heddle::ops {

void internal::FailDispatch(const char* expected) {
  heddle::internal::CheckFailed(__FILE__, __LINE__, expected);
}

void RequireFloating(std::string_view kernel, DType dtype) {
  if (!IsFloating(dtype)) {
    throw InvalidArgument(
        fmt::format("{}: expected a floating dtype, got {}", kernel, Name(dtype)));
  }
}

void Require16BitFloat(std::string_view kernel, DType dtype) {
  if (dtype != DType::kFloat16 && dtype != DType::kBFloat16) {
    throw InvalidArgument(
        fmt::format("{}: expected float16 or bfloat16, got {}", kernel, Name(dtype)));
  }
}

}  // namespace heddle::ops
