// Who and what the messages of a job are about.
//
// A *node* is a process of a job: the scheduler, a server or a worker, with a rank among its role.
// A *part* is what the protocol orders: a run of elements (or of rows) of one key, small enough to
// travel as one message. Keys are cut into parts once, by Placement; every part lives on one
// server, and has requests, rounds and a value of its own. A *shard* is all parts of a key on one
// server.
#pragma once

#include <heddle/dist.h>

#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace heddle::kvstore::dist {

using Role = DistRole;

// Aligned as atomics of its size are.
struct alignas(8) NodeId {
  Role role = Role::kScheduler;
  std::int32_t rank = 0;  // 0 for the scheduler; below 0: not known yet

  friend auto operator<=>(const NodeId&, const NodeId&) = default;
};

inline constexpr NodeId kTheScheduler{.role = Role::kScheduler, .rank = 0};
constexpr NodeId TheServer(std::int32_t rank) { return {.role = Role::kServer, .rank = rank}; }
constexpr NodeId TheWorker(std::int32_t rank) { return {.role = Role::kWorker, .rank = rank}; }

// "worker 1", "server 0", "the scheduler"; "a worker" while the rank is not known (below 0).
std::string ToString(NodeId node);

// Random for each process that joins a job, so that what an earlier process of the same rank sent
// is known for what it is. 0: none.
using Incarnation = std::uint64_t;

// Since some moment of the process; virtual in simulations. The state machines know no other clock.
using Time = std::chrono::nanoseconds;

// A part of one key in one store of a job. `store` counts the stores of a process in the order of
// their creation; `key` is KeyId of the key's name. Requests that are about a whole server
// (optimizer, commands) go to the pseudo-part ControlPart.
struct PartId {
  std::uint32_t store = 0;
  std::uint32_t part = 0;
  std::uint64_t key = 0;

  friend auto operator<=>(const PartId&, const PartId&) = default;
};

inline constexpr std::uint32_t kControlPart = 0xffffffff;
constexpr PartId ControlPart(std::uint32_t store) {
  return {.store = store, .part = kControlPart, .key = 0};
}

struct PartIdHash {
  std::size_t operator()(const PartId& id) const {
    // Of `key` all bits are random already.
    return static_cast<std::size_t>(id.key + 0x9e3779b97f4a7c15u * (id.part + 1) +
                                    (std::uint64_t{id.store} << 56));
  }
};

}  // namespace heddle::kvstore::dist

template <>
struct std::hash<heddle::kvstore::dist::NodeId> {
  std::size_t operator()(const heddle::kvstore::dist::NodeId& node) const {
    return static_cast<std::size_t>(node.role) * 0x1000003 + static_cast<std::size_t>(node.rank);
  }
};
