// A queue that takes little memory while it is short or empty: a server or worker of a large job
// has very many.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "engine/block_pool.h"

namespace heddle::kvstore::dist {

// Elements stay where they are until they are removed.
template <class T>
class Fifo {
 public:
  std::size_t size() const { return items_.size() - head_; }
  bool empty() const { return items_.size() == head_; }
  T& operator[](std::size_t i) { return *items_[head_ + i]; }
  const T& operator[](std::size_t i) const { return *items_[head_ + i]; }
  T& front() { return *items_[head_]; }
  const T& front() const { return *items_[head_]; }
  T& back() { return *items_.back(); }

  T& emplace_back() { return *items_.emplace_back(engine::MakeInBlock<T>()); }
  void pop_front() {
    items_[head_++].reset();
    if (head_ * 2 < items_.size()) return;
    items_.erase(items_.begin(), items_.begin() + static_cast<std::ptrdiff_t>(head_));
    head_ = 0;
  }
  // Removes those from the `first` on for which `remove` is true.
  template <class Predicate>
  void RemoveFrom(std::size_t first, Predicate remove) {
    std::size_t kept = head_ + first;
    for (std::size_t i = kept; i < items_.size(); ++i) {
      if (remove(*items_[i])) continue;
      if (kept != i) items_[kept] = std::move(items_[i]);
      ++kept;
    }
    items_.resize(kept);
  }
  void clear() {
    items_.clear();
    head_ = 0;
  }

 private:
  std::vector<engine::BlockPtr<T>> items_;  // those before head_ are gone
  std::size_t head_ = 0;
};

}  // namespace heddle::kvstore::dist
