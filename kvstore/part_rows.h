// Which rows of an array have elements in a part of it, and where: parts of a dense array of a job
// are runs of elements, which may begin and end within a row.
//
// Row-sparse values come to a part as its rows' windows: runs of width() elements of each row that
// is there. A row of no more elements than the part comes whole, of a longer one as many elements
// as the part has, those that lie in the part among them.
#pragma once

#include <heddle/shape.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace heddle::kvstore {

// Elements of a row of an array of such a shape.
inline std::int64_t RowSizeOf(const Shape& shape) {
  std::int64_t size = 1;
  for (std::size_t axis = 1; axis < shape.ndim(); ++axis) size *= shape[axis];
  return size;
}

// The elements of a row that lie in a part.
struct RowPiece {
  std::int64_t first;   // the first of them, counted from the beginning of the part
  std::int64_t count;   // how many
  std::int64_t before;  // elements of the row's window that come before them
};

class PartRows {
 public:
  // Rows [first, end), whole.
  static PartRows OfRows(std::int64_t first, std::int64_t end, std::int64_t row_size) {
    return {first, end, row_size, first * row_size, end * row_size, row_size};
  }
  // Those with elements in [begin, end) of an array of rows of `row_size` elements.
  static PartRows OfElements(std::int64_t begin, std::int64_t end, std::int64_t row_size) {
    if (begin == end) return OfRows(0, 0, row_size);
    const std::int64_t end_row = (end - 1) / row_size + 1;
    return {begin / row_size, end_row, row_size, begin, end, std::min(row_size, end - begin)};
  }

  std::int64_t first() const { return first_; }
  std::int64_t end() const { return end_; }
  std::int64_t count() const { return end_ - first_; }
  std::int64_t width() const { return width_; }
  // Whether the part consists of whole rows.
  bool whole() const { return begin_ == first_ * row_size_ && stop_ == end_ * row_size_; }

  // Where the window of a row begins among the elements of that row.
  std::int64_t WindowIn(std::int64_t row) const {
    return std::clamp<std::int64_t>(begin_ - row * row_size_, 0, row_size_ - width_);
  }
  RowPiece PieceOf(std::int64_t row) const {
    const std::int64_t row_begin = row * row_size_;
    const std::int64_t first = std::max(row_begin, begin_);
    const std::int64_t stop = std::min(row_begin + row_size_, stop_);
    return {first - begin_, stop - first, first - row_begin - WindowIn(row)};
  }

 private:
  PartRows(std::int64_t first, std::int64_t end, std::int64_t row_size, std::int64_t begin,
           std::int64_t stop, std::int64_t width)
      : first_(first), end_(end), row_size_(row_size), begin_(begin), stop_(stop), width_(width) {}

  std::int64_t first_;  // rows
  std::int64_t end_;
  std::int64_t row_size_;
  std::int64_t begin_;  // elements of the array
  std::int64_t stop_;
  std::int64_t width_;
};

}  // namespace heddle::kvstore
