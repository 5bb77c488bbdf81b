#include "kvstore/near_arrays.h"

#include <algorithm>
#include <cstddef>

#include "storage/array_state.h"
#include "storage/row_sparse_state.h"

namespace heddle::kvstore {

namespace {

template <class Array>
bool IsNear(const Array& array, Device device) {
  const Device its = internal::StateOf(array).device;
  return IsOnGpu(its) || IsOnGpu(device) ? its == device : true;
}

// Can an op that reads a value on `device` write `array`, one of `outputs`, itself?
template <class Array>
bool IsWritten(const Array& array, Device device, std::size_t outputs) {
  return IsNear(array, device) && (outputs == 1 || !IsPartial(array));
}

// Where what stands in for `array` lies.
template <class Array>
Device StandIn(const Array& array, Device device) {
  if (IsNear(array, device)) return array.device();
  return IsOnGpu(device) ? device : CpuPinned(array.device().id);
}

}  // namespace

template <class Array>
bool AreNear(std::span<const Array> arrays, Device device) {
  return std::ranges::all_of(arrays, [&](const Array& array) { return IsNear(array, device); });
}

template <class Array>
bool NeedRelays(std::span<const Array> out, Device device) {
  return !std::ranges::all_of(
      out, [&](const Array& array) { return IsWritten(array, device, out.size()); });
}

template <class Array>
std::vector<Array> CopiesNear(std::span<const Array> arrays, Device device, int priority) {
  std::vector<Array> near;
  for (const Array& array : arrays) {
    near.push_back(IsNear(array, device) ? array : array.Copy(StandIn(array, device), priority));
  }
  return near;
}

template <class Array>
RelayedOutputs<Array>::RelayedOutputs(std::span<const Array> out, Device device) {
  std::vector<Array> relays;
  for (const Array& array : out) {
    if (IsWritten(array, device, out.size())) {
      near_.push_back(array);
      continue;
    }
    auto relay = std::ranges::find(relays, array.dtype(), &Array::dtype);
    if (relay == relays.end()) {
      relay = relays.emplace(
          relay, Array(array.shape(), array.dtype(), StandIn(array, device), array.engine()));
      near_.push_back(*relay);
    }
    copies_.emplace_back(*relay, array);
  }
}

template <class Array>
void RelayedOutputs<Array>::Forward(int priority) const {
  for (const auto& [from, to] : copies_) from.CopyTo(to, priority);
}

#define HEDDLE_INSTANTIATE(Array)                                                     \
  template bool AreNear<Array>(std::span<const Array>, Device);                       \
  template bool NeedRelays<Array>(std::span<const Array>, Device);                    \
  template std::vector<Array> CopiesNear<Array>(std::span<const Array>, Device, int); \
  template class RelayedOutputs<Array>
HEDDLE_INSTANTIATE(NDArray);
HEDDLE_INSTANTIATE(RowSparseNDArray);
#undef HEDDLE_INSTANTIATE

}  // namespace heddle::kvstore
