#include "kvstore/dist/membership.h"

#include <heddle/error.h>

#include <random>

#include <fmt/format.h>

namespace heddle::kvstore::dist {

Incarnation NewIncarnation() {
  std::random_device device;
  Incarnation incarnation = 0;
  while (incarnation == 0) incarnation = (std::uint64_t{device()} << 32) | device();
  return incarnation;
}

std::string SchedulerAddress(const DistOptions& options) {
  const bool is_ipv6 = options.root_host.find(':') != std::string::npos;
  return is_ipv6 ? fmt::format("[{}]:{}", options.root_host, options.root_port)
                 : fmt::format("{}:{}", options.root_host, options.root_port);
}

MemberOptions OptionsOfMember(const DistOptions& options, Incarnation incarnation,
                              const std::string& address) {
  MemberOptions member;
  member.join.role = static_cast<Role>(options.role);
  member.join.rank = options.rank.value_or(-1);
  member.join.incarnation = incarnation;
  member.join.address = address;
  member.join.num_workers = options.num_workers;
  member.join.num_servers = options.num_servers;
  member.scheduler_address = SchedulerAddress(options);
  member.start_timeout = options.connect_deadline;
  member.heartbeat_every = options.heartbeat_interval;
  member.dead_after = options.heartbeat_interval * options.dead_after;
  return member;
}

std::string TextOf(const FailureBody& failure) {
  return failure.address.empty()
             ? fmt::format("{}: {}", ToString(failure.node), failure.why)
             : fmt::format("{} at {}: {}", ToString(failure.node), failure.address, failure.why);
}

void ThrowIfFailed(const Member& member) {
  if (!member.failure()) return;
  if (member.refused()) throw InvalidArgument(member.failure()->why);
  throw NetworkError(TextOf(*member.failure()));
}

}  // namespace heddle::kvstore::dist
