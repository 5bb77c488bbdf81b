#include "kvstore/merge_placement.h"

#include <algorithm>

#include "base/check.h"

namespace heddle::kvstore {

std::int64_t& MergePlacement::BytesOn(Device device) {
  for (auto& [known, bytes] : loads_) {
    if (known == device) return bytes;
  }
  return loads_.emplace_back(device, 0).second;
}

void MergePlacement::Place(std::vector<Item> items, std::span<const Device> devices) {
  CHECK(!devices.empty());
  std::stable_sort(items.begin(), items.end(),
                   [](const Item& a, const Item& b) { return a.bytes > b.bytes; });
  for (const Item& item : items) {
    const Device best =
        *std::min_element(devices.begin(), devices.end(), [this](Device a, Device b) {
          const std::int64_t bytes = BytesOn(a);  // not where it lies: the next call may move it
          return bytes < BytesOn(b);
        });
    BytesOn(best) += item.bytes;
    *item.device = best;
  }
}

}  // namespace heddle::kvstore
