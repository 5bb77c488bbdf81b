// Spreads the merge buffers of keys over the devices that push them.
#pragma once

#include <heddle/device.h>

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace heddle::kvstore {

// The largest keys first, each to the device that merges the fewest bytes so far; among equals the
// key that comes first, and the device that was seen first. So the sums of a training step are
// spread evenly over the devices, and the same calls give the same placement.
// Threads: one call at a time.
class MergePlacement {
 public:
  struct Item {
    std::int64_t bytes;
    Device* device;  // written by Place
  };

  // `devices`, which are not empty, join those seen before; the items go to these devices only.
  void Place(std::vector<Item> items, std::span<const Device> devices);

 private:
  std::int64_t& BytesOn(Device device);

  std::vector<std::pair<Device, std::int64_t>> loads_;  // in the order of their first use
};

}  // namespace heddle::kvstore
