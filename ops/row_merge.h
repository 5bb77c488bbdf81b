// Goes through the rows of several row-sparse values in the order of their ids.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>

#include "ops/row_sparse.h"

namespace heddle::ops {

// Calls visit(id, rows) for each id that one input has at least: `rows` are the inputs' rows of
// that id, in list order. For n inputs a row costs n comparisons.
template <class Visit>
void ForEachRow(std::span<const SparseRows> inputs, std::size_t row_bytes, const Visit& visit) {
  constexpr std::int64_t kNoId = std::numeric_limits<std::int64_t>::max();
  constexpr std::size_t kFew = 8;
  struct Head {  // what comes next of an input
    std::int64_t id;
    const std::int64_t* place;
    const std::int64_t* end;
    const std::byte* row;
  };
  std::array<Head, kFew> few_heads;
  std::array<const void*, kFew> few_rows;
  std::unique_ptr<Head[]> more_heads;
  std::unique_ptr<const void*[]> more_rows;
  if (inputs.size() > kFew) {
    more_heads.reset(new Head[inputs.size()]);
    more_rows.reset(new const void*[inputs.size()]);
  }
  Head* const heads = more_heads ? more_heads.get() : few_heads.data();
  const void** const rows = more_rows ? more_rows.get() : few_rows.data();
  for (std::size_t k = 0; k < inputs.size(); ++k) {
    const std::int64_t* const ids = inputs[k].ids.data();
    const std::int64_t* const end = ids + inputs[k].ids.size();
    heads[k] = {ids != end ? *ids : kNoId, ids, end, static_cast<const std::byte*>(inputs[k].rows)};
  }
  for (;;) {
    std::int64_t id = kNoId;
    for (std::size_t k = 0; k < inputs.size(); ++k) id = std::min(id, heads[k].id);
    if (id == kNoId) return;
    std::size_t found = 0;
    for (std::size_t k = 0; k < inputs.size(); ++k) {
      Head& head = heads[k];
      if (head.id != id) continue;
      rows[found++] = head.row;
      head.row += row_bytes;
      ++head.place;
      head.id = head.place != head.end ? *head.place : kNoId;
    }
    visit(id, std::span<const void* const>(rows, found));
  }
}

}  // namespace heddle::ops
