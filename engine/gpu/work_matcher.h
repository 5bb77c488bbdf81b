// Finds out which op a piece of a device's work is of. Two kinds of records say it together, which
// come in any order: a call of the driver belongs to an op, and work comes from a call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_map>

#include "engine/gpu/device_trace.h"

namespace heddle::engine {

// Remembers the last calls of ops, and the last work whose call is not known yet: much of it is
// nobody's. Threads: one at a time.
class WorkMatcher {
 public:
  explicit WorkMatcher(std::size_t remembered_max = std::size_t{1} << 16)
      : remembered_max_(remembered_max) {}

  // Call emit(work) for each work that both kinds of records are there of, with its op.

  template <class Emit>
  void OnCall(std::uint32_t call, std::uint64_t op, const Emit& emit) {
    if (ops_.insert_or_assign(call, op).second) Remember(ops_, calls_, call);
    const auto [begin, end] = waiting_.equal_range(call);
    for (auto it = begin; it != end; ++it) Give(it->second, op, emit);
    waiting_.erase(begin, end);
  }

  template <class Emit>
  void OnWork(std::uint32_t call, const internal::DeviceWork& work, const Emit& emit) {
    const auto found = ops_.find(call);
    if (found != ops_.end()) return Give(work, found->second, emit);
    waiting_.emplace(call, work);
    Remember(waiting_, waiting_calls_, call);
  }

 private:
  template <class Emit>
  static void Give(internal::DeviceWork work, std::uint64_t op, const Emit& emit) {
    work.op = op;
    emit(work);
  }

  template <class Map>
  void Remember(Map& map, std::deque<std::uint32_t>& order, std::uint32_t call) {
    order.push_back(call);
    if (order.size() <= remembered_max_) return;
    map.erase(order.front());
    order.pop_front();
  }

  const std::size_t remembered_max_;
  std::unordered_map<std::uint32_t, std::uint64_t> ops_;
  std::deque<std::uint32_t> calls_;  // of ops_, oldest first
  std::unordered_multimap<std::uint32_t, internal::DeviceWork> waiting_;
  std::deque<std::uint32_t> waiting_calls_;  // of waiting_, also those that have gone since
};

}  // namespace heddle::engine
