#include <heddle/error.h>
#include <heddle/shape.h>

#include <algorithm>
#include <iterator>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace heddle {

void Shape::Assign(std::span<const std::int64_t> dims) {
  std::int64_t size = 1;
  bool none = false;  // an extent of 0 makes the size 0, whatever the others multiply to
  bool overflow = false;
  for (const std::int64_t extent : dims) {
    if (extent < 0) {
      throw InvalidArgument(fmt::format("shape ({}): expected extents of at least 0, got {}",
                                        fmt::join(dims, ", "), extent));
    }
    if (extent == 0) {
      none = true;
    } else {
      overflow = __builtin_mul_overflow(size, extent, &size) || overflow;
    }
  }
  if (overflow && !none) {
    throw InvalidArgument(
        fmt::format("shape ({}): expected at most 2^63 - 1 elements", fmt::join(dims, ", ")));
  }
  if (dims.size() > kFew) more_ = std::make_unique<std::int64_t[]>(dims.size());
  std::ranges::copy(dims, more_ ? more_.get() : few_);
  ndim_ = dims.size();
  size_ = none ? 0 : size;
}

void Shape::CopyFrom(const Shape& other) {
  if (other.more_) more_ = std::make_unique<std::int64_t[]>(other.ndim_);
  std::ranges::copy(other, more_ ? more_.get() : few_);
  ndim_ = other.ndim_;
  size_ = other.size_;
}

std::string ToString(const Shape& shape) {
  return fmt::format("({}{})", fmt::join(shape.begin(), shape.end(), ", "),
                     shape.ndim() == 1 ? "," : "");
}

}  // namespace heddle
