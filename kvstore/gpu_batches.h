// Cuts what one call does to many values on GPUs into few ops.
//
// The keys of a call are independent: none waits for what another one needs. An op for several keys
// waits for all that any of them needs; so only keys share one that each of them, with an op of its
// own, would wait for the same. Copies that the call makes of arrays that lie elsewhere are no part
// of that, since they end whatever the program does: keys that need some share ops with each other,
// so that these are few, but not with keys that need none.
#pragma once

#include <heddle/device.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/held_up.h"

namespace heddle::kvstore {

// Collects the places of keys in a list, and calls queue(places) for those of each device that wait
// for the same, as soon as there are as many as go into one op, and in Flush for the rest.
//
// An op takes so many bytes that its launches cost little beside them, and so few that copies, and
// ops of other streams, that wait for it need not wait for all keys of a large model.
template <class Queue>
class GpuBatches {
 public:
  static constexpr std::int64_t kBytesMax = std::int64_t{64} << 20;
  static constexpr std::size_t kArraysMax = 1024;

  explicit GpuBatches(Queue queue) : queue_(std::move(queue)) {}

  // `held_up_by`: of the ops that the key would have alone, see engine/held_up.h.
  // `copies`: the op for the key will wait for copies that the call makes.
  // `bytes` and `arrays`: of the key.
  void Add(Device device, std::uint64_t held_up_by, bool copies, std::size_t place,
           std::int64_t bytes, std::size_t arrays) {
    if (held_up_by == engine::kUnknownOps) {
      queue_(std::span<const std::size_t>(&place, 1));
      return;
    }
    Batch& batch = batches_[{device.id, held_up_by, copies}];
    if (batch.bytes + bytes > kBytesMax || batch.arrays + arrays > kArraysMax) Flush(batch);
    batch.places.push_back(place);
    batch.bytes += bytes;
    batch.arrays += arrays;
  }
  void Flush() {
    for (auto& [what, batch] : batches_) Flush(batch);
  }

 private:
  struct Batch {
    std::vector<std::size_t> places;
    std::int64_t bytes = 0;
    std::size_t arrays = 0;
  };

  void Flush(Batch& batch) {
    if (!batch.places.empty()) queue_(std::span<const std::size_t>(batch.places));
    batch = {};
  }

  Queue queue_;
  // By device and what they wait for.
  std::map<std::tuple<int, std::uint64_t, bool>, Batch> batches_;
};

}  // namespace heddle::kvstore
