// Cuts what one call does to many values on GPUs into few ops.
#pragma once

#include <heddle/device.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace heddle::kvstore {

// Collects items, one a key, and calls queue(items) for those of each device, as soon as there are
// as many as go into one op, and in Flush for the rest.
//
// An op takes so many bytes that its launches cost little beside them, and so few that copies, and
// ops of other streams, that wait for it need not wait for all keys of a large model.
template <class Item, class Queue>
class GpuBatches {
 public:
  static constexpr std::int64_t kBytesMax = std::int64_t{64} << 20;
  static constexpr std::size_t kArraysMax = 1024;

  explicit GpuBatches(Queue queue) : queue_(std::move(queue)) {}

  // `bytes` and `arrays`: of the key.
  void Add(Device device, Item item, std::int64_t bytes, std::size_t arrays) {
    auto batch = std::ranges::find(batches_, device, &Batch::device);
    if (batch == batches_.end()) batch = batches_.insert(batch, {.device = device});
    if (batch->bytes + bytes > kBytesMax || batch->arrays + arrays > kArraysMax) Flush(*batch);
    batch->items.push_back(std::move(item));
    batch->bytes += bytes;
    batch->arrays += arrays;
  }
  void Flush() {
    for (Batch& batch : batches_) Flush(batch);
  }

 private:
  struct Batch {
    Device device;
    std::vector<Item> items = {};
    std::int64_t bytes = 0;
    std::size_t arrays = 0;
  };

  void Flush(Batch& batch) {
    if (!batch.items.empty()) queue_(batch.items);
    batch = {.device = batch.device};
  }

  Queue queue_;
  std::vector<Batch> batches_;
};

}  // namespace heddle::kvstore
