#include "kvstore/near_arrays.h"

#include <algorithm>

#include "storage/array_state.h"

namespace heddle::kvstore {

namespace {

bool IsNear(const NDArray& array, Device device) {
  const Device its = internal::StateOf(array).device;
  return IsOnGpu(its) || IsOnGpu(device) ? its == device : true;
}

// Where what stands in for `array` lies.
Device StandIn(const NDArray& array, Device device) {
  return IsOnGpu(device) ? device : CpuPinned(array.device().id);
}

}  // namespace

bool AreNear(std::span<const NDArray> arrays, Device device) {
  return std::ranges::all_of(arrays, [&](const NDArray& array) { return IsNear(array, device); });
}

std::vector<NDArray> CopiesNear(std::span<const NDArray> arrays, Device device, int priority) {
  std::vector<NDArray> near;
  for (const NDArray& array : arrays) {
    near.push_back(IsNear(array, device) ? array : array.Copy(StandIn(array, device), priority));
  }
  return near;
}

RelayedOutputs::RelayedOutputs(std::span<const NDArray> out, Device device) {
  std::vector<NDArray> relays;
  for (const NDArray& array : out) {
    if (IsNear(array, device)) {
      near_.push_back(array);
      continue;
    }
    auto relay = std::ranges::find(relays, array.dtype(), &NDArray::dtype);
    if (relay == relays.end()) {
      relay = relays.emplace(
          relay, NDArray(array.shape(), array.dtype(), StandIn(array, device), array.engine()));
      near_.push_back(*relay);
    }
    copies_.emplace_back(*relay, array);
  }
}

void RelayedOutputs::Forward(int priority) const {
  for (const auto& [from, to] : copies_) from.CopyTo(to, priority);
}

}  // namespace heddle::kvstore
