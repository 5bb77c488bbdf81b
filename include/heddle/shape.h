// Shape: the extents of an array, outermost first, 64-bit each.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <utility>

namespace heddle {

// A value. Up to four dimensions lie inside it, without allocating. No dimensions: a scalar, one
// element. Errors: InvalidArgument for a negative extent, or when the number of elements exceeds
// 2^63 - 1.
class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<std::int64_t> dims) { Assign({dims.begin(), dims.size()}); }
  explicit Shape(std::span<const std::int64_t> dims) { Assign(dims); }
  Shape(const Shape& other) { CopyFrom(other); }
  Shape(Shape&& other) noexcept : Shape() { Swap(other); }  // leaves a scalar
  Shape& operator=(Shape other) noexcept {
    Swap(other);
    return *this;
  }

  std::size_t ndim() const { return ndim_; }
  std::int64_t size() const { return size_; }  // elements
  std::int64_t operator[](std::size_t axis) const { return begin()[axis]; }
  const std::int64_t* begin() const { return more_ ? more_.get() : few_; }
  const std::int64_t* end() const { return begin() + ndim_; }

  friend bool operator==(const Shape& a, const Shape& b) {
    return a.ndim_ == b.ndim_ && std::equal(a.begin(), a.end(), b.begin());
  }

 private:
  static constexpr std::size_t kFew = 4;

  void Assign(std::span<const std::int64_t> dims);
  void CopyFrom(const Shape& other);
  void Swap(Shape& other) noexcept {
    std::swap(ndim_, other.ndim_);
    std::swap(size_, other.size_);
    std::swap(few_, other.few_);
    std::swap(more_, other.more_);
  }

  std::size_t ndim_ = 0;
  std::int64_t size_ = 1;
  std::int64_t few_[kFew] = {};
  std::unique_ptr<std::int64_t[]> more_;  // all extents when there are more than kFew
};

// "(2, 3)", "(5,)", "()".
std::string ToString(const Shape& shape);

}  // namespace heddle
