#include "kvstore/nccl/job_meeting.h"

#include <fmt/format.h>

namespace heddle::kvstore {

JobMeeting::Bytes JobMeeting::Add(const Bytes& bytes) {
  const std::string key = fmt::format("{}", meetings_++);
  Engine& engine = store_->engine();
  const NDArray own = NDArray::FromVector(bytes, {static_cast<std::int64_t>(bytes.size())},
                                          DType::kUInt8, Cpu(), engine);
  const NDArray sum(own.shape(), own.dtype(), Cpu(), engine);
  store_->Init(key, own);  // a push needs a key; by this one its value is replaced
  store_->PushPull(key, own, sum);
  Bytes sums = sum.ToVector<std::uint8_t>();
  store_->Remove(key);
  return sums;
}

std::vector<NDArray> JobMeeting::Share(const std::vector<NDArray>& values) {
  const std::int64_t meeting = meetings_++;
  std::vector<std::string> keys;
  for (std::size_t i = 0; i < values.size(); ++i) keys.push_back(fmt::format("{}.{}", meeting, i));
  store_->Init(KeyList(keys), values);
  std::vector<NDArray> shared;
  if (rank() == 0) {
    shared = values;
  } else {
    for (const NDArray& value : values) {
      shared.emplace_back(value.shape(), value.dtype(), value.device(), store_->engine());
    }
    store_->Pull(KeyList(keys), shared);
    for (const NDArray& array : shared) array.WaitToRead();
  }
  for (const std::string& key : keys) store_->Remove(key);
  return shared;
}

}  // namespace heddle::kvstore
