// What the nodes of all roles need to meet.
#pragma once

#include <heddle/dist.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>

#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/protocol/member.h"
#include "kvstore/dist/transport/transport.h"

namespace heddle::kvstore::dist {

Incarnation NewIncarnation();

std::string SchedulerAddress(const DistOptions& options);
// Of a node that listens at `address`; workers do not.
MemberOptions OptionsOfMember(const DistOptions& options, Incarnation incarnation,
                              const std::string& address);

// Whoever finds another node gone gives the scheduler this long to say why.
constexpr std::chrono::seconds kWordOfScheduler{1};

// "worker 1 (127.0.0.1:4711) has failed: ..."
std::string TextOf(const FailureBody& failure);
// NetworkError, or InvalidArgument, with the settings that it may not have liked, if the scheduler
// does not want this node.
void ThrowIfFailed(const Member& member, const DistOptions& options);

// As Transport::Connect; errors say where the settings came from that lead to the scheduler.
void ConnectToScheduler(Transport& transport, const DistOptions& options,
                        std::chrono::steady_clock::time_point deadline);

inline std::optional<Time> Earlier(std::optional<Time> a, std::optional<Time> b) {
  if (!a || !b) return a ? a : b;
  return std::min(*a, *b);
}

}  // namespace heddle::kvstore::dist
