// The arrays that a queued op holds.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <span>

namespace heddle::kvstore {

// Handles, as many as a list has: a few in the op itself, so that queueing it allocates nothing.
template <class Array>
class HeldArrays {
 public:
  explicit HeldArrays(std::span<const Array> arrays)
      : size_(arrays.size()), more_(size_ > kFew ? std::make_unique<Array[]>(size_) : nullptr) {
    std::copy(arrays.begin(), arrays.end(), more_ != nullptr ? more_.get() : few_.data());
  }

  std::span<const Array> view() const {
    return {more_ != nullptr ? more_.get() : few_.data(), size_};
  }

 private:
  static constexpr std::size_t kFew = 4;

  std::size_t size_;
  std::array<Array, kFew> few_;
  std::unique_ptr<Array[]> more_;  // all of them when there are more than kFew
};

}  // namespace heddle::kvstore
