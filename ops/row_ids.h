// Row ids: from numbers of any dtype to int64 ids that are sorted and unique, and the search for
// ids among others.
#pragma once

#include <heddle/dtype.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace heddle::ops {

// out[i] = ids[i] as an int64, for out.size() ids of `dtype`, each a whole number in [0, num_rows).
//
// Errors:  InvalidArgument, naming the id and the range, for the first id that has a fraction, is
//          not finite or lies outside; or if dtype is bool. `out` has undefined contents then.
// Threads: any; calls on disjoint outputs may run together.
void ReadRowIds(DType dtype, const void* ids, std::int64_t num_rows, std::span<std::int64_t> out);

// Whether each id is larger than the one before.
bool IsSortedUnique(std::span<const std::int64_t> ids);

// Sorts `ids`, none of them negative, and removes repeats; the ids that remain come first. Returns
// how many. `scratch` is as long as `ids`.
// Cost:    one look at ids that are sorted and unique; else a few passes over them, one for each
//          11 bits of the largest.
std::size_t SortUnique(std::span<std::int64_t> ids, std::span<std::int64_t> scratch);

// Merges two sorted and unique lists into `out`, which has room for both. Returns how many ids.
std::size_t MergeUnique(std::span<const std::int64_t> a, std::span<const std::int64_t> b,
                        std::int64_t* out);

// The place of the first of `ids`, sorted and unique, that is not below `id`, at or after `from`.
// Cost: logarithmic in the distance from `from`.
inline std::size_t LowerBoundFrom(std::span<const std::int64_t> ids, std::size_t from,
                                  std::int64_t id) {
  std::size_t step = 1;
  std::size_t low = from;
  while (low < ids.size() && ids[low] < id) {
    from = low + 1;
    low += step;
    step *= 2;
  }
  const auto* const begin = ids.data();
  return static_cast<std::size_t>(
      std::lower_bound(begin + from, begin + std::min(low, ids.size()), id) - begin);
}

// Finds ids among the sorted and unique ids of a value.
// Cost: constant where those are without gaps (all rows are there), else logarithmic in the
//       distance from the id found before.
class RowFinder {
 public:
  explicit RowFinder(std::span<const std::int64_t> ids)
      : ids_(ids),
        without_gaps_(!ids.empty() &&
                      ids.back() - ids.front() + 1 == static_cast<std::int64_t>(ids.size())) {}

  // The place of `id`, or -1 if it is not there. Ids asked for never decrease.
  std::int64_t Find(std::int64_t id) {
    if (without_gaps_) {
      const std::int64_t place = id - ids_.front();
      return place >= 0 && place < static_cast<std::int64_t>(ids_.size()) ? place : -1;
    }
    next_ = LowerBoundFrom(ids_, next_, id);
    return next_ < ids_.size() && ids_[next_] == id ? static_cast<std::int64_t>(next_) : -1;
  }

 private:
  std::span<const std::int64_t> ids_;
  bool without_gaps_;
  std::size_t next_ = 0;
};

}  // namespace heddle::ops
