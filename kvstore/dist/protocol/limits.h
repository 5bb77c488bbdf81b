// How far workers may run ahead. Both sides of the protocol count on these being equal.
#pragma once

#include <cstdint>

namespace heddle::kvstore::dist {

// dist_sync: pushes of a part whose round its worker does not know to be complete; dist_async:
// pushes of a part that are not acknowledged. Further requests of the part wait in the worker.
inline constexpr std::uint64_t kPushesAheadMax = 2;

// Requests of a worker about one part that are sent and not answered; the worker keeps to it, and a
// server refuses what lies further ahead of the next sequence number. Of a control part: one.
inline constexpr std::uint64_t kRequestsAheadMax = 64;

// Bytes of a worker's pushes at one server whose rounds it does not know to be complete; beyond it
// the worker asks before it sends (kAsk).
inline constexpr std::uint64_t kUnfinishedBytesMax = std::uint64_t{1} << 30;

// Pushes that a worker may name to a server as missing when it leaves.
inline constexpr std::uint64_t kMissingPushesMax = std::uint64_t{1} << 20;

}  // namespace heddle::kvstore::dist
