#include "kvstore/dist/membership.h"

#include <heddle/error.h>

#include <initializer_list>
#include <random>

#include <fmt/format.h>

#include "kvstore/dist/protocol/words.h"

namespace heddle::kvstore::dist {
namespace {

// "root_host 10.0.0.1 (DMLC_PS_ROOT_URI), token (not set)".
std::string Describe(const DistOptions& options, std::initializer_list<const char*> fields) {
  std::string text;
  for (const char* const field : fields) {
    text += fmt::format("{}{}", text.empty() ? "" : ", ", options.Describe(field));
  }
  return text;
}

}  // namespace

Incarnation NewIncarnation() {
  std::random_device device;
  Incarnation incarnation = 0;
  while (incarnation == 0) incarnation = (std::uint64_t{device()} << 32) | device();
  return incarnation;
}

std::string SchedulerAddress(const DistOptions& options) {
  return JoinAddress(options.root_host, options.root_port);
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

void ThrowIfFailed(const Member& member, const DistOptions& options) {
  if (!member.failure()) return;
  const std::string text = TextOf(*member.failure());
  if (!member.refused()) throw NetworkError(text);
  throw InvalidArgument(
      fmt::format("{} ({})", text, Describe(options, {"rank", "num_workers", "num_servers"})));
}

void ConnectToScheduler(Transport& transport, const DistOptions& options,
                        std::chrono::steady_clock::time_point deadline) {
  const auto with_settings = [&options](const Error& error) {
    return fmt::format("{} ({})", error.what(),
                       Describe(options, {"root_host", "root_port", "job_id", "token"}));
  };
  try {
    transport.Connect({Role::kScheduler, 0}, SchedulerAddress(options), deadline);
  } catch (const TimeoutError& error) {
    throw TimeoutError(with_settings(error));
  } catch (const NetworkError& error) {
    throw NetworkError(with_settings(error));
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(with_settings(error));
  }
}

}  // namespace heddle::kvstore::dist
