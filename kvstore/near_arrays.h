// Arrays that the ops on a value cannot touch by themselves, and copies that stand in for them.
//
// A value on a GPU and the arrays of that GPU are *near* each other, and so are all values and
// arrays on CPUs, pinned memory included. What is not near goes through a copy, queued beside the
// op on the value: in pinned memory for values on CPUs, which a GPU fills and empties by itself, on
// the value's GPU for the others. A failure of the original passes through the copy.
#pragma once

#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>

#include <span>
#include <utility>
#include <vector>

#include "storage/array_state.h"

namespace heddle::kvstore {

inline bool IsOnGpu(Device device) { return device.type == DeviceType::kGpu; }

inline bool IsPartial(const NDArray& array) { return internal::StateOf(array).is_partial; }
inline bool IsPartial(const RowSparseNDArray& /*array*/) { return false; }

// Array: NDArray or RowSparseNDArray.

// Can the ops of a value on `device` touch all of them?
template <class Array>
bool AreNear(std::span<const Array> arrays, Device device);
// Can one op write all of them?
template <class Array>
bool NeedRelays(std::span<const Array> out, Device device);

template <class Array>
std::vector<Array> CopiesNear(std::span<const Array> arrays, Device device, int priority);

// Inputs of an op on a value on `device`, in their order: themselves if they are near, or copies,
// which the constructor queues. The arrays outlive it.
template <class Array>
class NearInputs {
 public:
  NearInputs(std::span<const Array> arrays, Device device, int priority) : view_(arrays) {
    if (AreNear(arrays, device)) [[likely]]
      return;
    copies_ = CopiesNear(arrays, device, priority);
    view_ = copies_;
  }
  NearInputs(const NearInputs&) = delete;
  NearInputs& operator=(const NearInputs&) = delete;

  std::span<const Array> view() const { return view_; }

 private:
  std::vector<Array> copies_;
  std::span<const Array> view_;
};

// Outputs of an op that reads a value on `device`. Those that are not near are copies of relays,
// one for each dtype, which the op writes in their place. So are parts of arrays among several
// outputs: an op does not run if an array is poisoned that it overwrites in part alone, which must
// not keep the others from their value.
template <class Array>
class RelayedOutputs {
 public:
  RelayedOutputs(std::span<const Array> out, Device device);

  // The outputs that are near, and the relays.
  std::span<const Array> near() const { return near_; }
  // Queues the copies from the relays, after the op.
  void Forward(int priority) const;

 private:
  std::vector<Array> near_;
  std::vector<std::pair<Array, Array>> copies_;  // from, to
};

}  // namespace heddle::kvstore
