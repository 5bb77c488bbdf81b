#include "kvstore/dist/scheduler_node.h"

#include <heddle/error.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/socket.h>

#include "kvstore/dist/membership.h"

namespace heddle::kvstore::dist {
namespace {

// A number that is passed on to where the socket is not would be something else's by and by.
int FailureSocket(const DistOptions& options) {
  if (options.failure_fd < 0) return -1;
  int domain = 0;
  socklen_t bytes = sizeof(domain);
  const bool is_socket =
      getsockopt(options.failure_fd, SOL_SOCKET, SO_DOMAIN, &domain, &bytes) == 0;
  if (!is_socket || domain != AF_UNIX) {
    throw InvalidArgument(
        fmt::format("{}: expected a Unix socket{}", options.Describe("failure_fd"),
                    is_socket ? ", given another one" : fmt::format(": {}", std::strerror(errno))));
  }
  fcntl(options.failure_fd, F_SETFD, FD_CLOEXEC);
  return options.failure_fd;
}

// Those of so many float32; of more than can be counted as many as can be, which no array has.
std::int64_t CutBytesOf(std::int64_t cut_bound) {
  constexpr auto kElementBytes = static_cast<std::int64_t>(sizeof(float));
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  return cut_bound > kMax / kElementBytes ? kMax : cut_bound * kElementBytes;
}

}  // namespace

SchedulerNode::SchedulerNode(const DistOptions& options, const TransportFactory& make_transport,
                             const engine::TraceSource& trace)
    : failure_fd_(FailureSocket(options)) {
  const Incarnation incarnation = NewIncarnation();
  if (trace != nullptr) {
    trace_.SetPlace({Role::kScheduler, 0}, incarnation, options.job_id);
    trace_.Use(trace);
  }
  SchedulerOptions machine;
  machine.num_workers = options.num_workers;
  machine.num_servers = options.num_servers;
  if (options.slice_bytes > 0) machine.slice_bytes = options.slice_bytes;
  machine.cut_bytes = CutBytesOf(options.cut_bound);
  machine.start_timeout = options.connect_deadline;
  machine.heartbeat_every = options.heartbeat_interval;
  machine.dead_after = options.heartbeat_interval * options.dead_after;
  machine.warn_after = options.warning_time;
  {
    // What connects while the transport is made waits until there is a machine.
    MutexLock lock(mutex_);
    transport_ = make_transport(*this, incarnation);
    machine.address = transport_->address();
    machine_.emplace(Now(), machine);
    Start(*transport_);
  }
  state_signal_.emplace([this] { return DescribeState(); });
}

SchedulerNode::~SchedulerNode() {
  state_signal_.reset();
  Stop();
}

void SchedulerNode::Run() {
  MutexLock lock(mutex_);
  while (!machine_->done()) changed_.Wait(mutex_);
  if (machine_->failure()) throw NetworkError(TextOf(*machine_->failure()));
}

std::string SchedulerNode::DescribeState() {
  MutexLock lock(mutex_);
  return machine_->DescribeState(Now());
}

void SchedulerNode::HandleConnected(NodeId peer, Incarnation /*incarnation*/,
                                    const std::string& address) {
  machine_->OnConnected(peer, address);
}

void SchedulerNode::HandleMessage(Time now, NodeId from, Message&& message, Outputs& out) {
  machine_->OnMessage(now, from, message, out);
  TellLauncher();
}

void SchedulerNode::HandleLost(Time now, NodeId peer, const std::string& address,
                               const std::string& why, Outputs& out) {
  machine_->OnLost(now, peer, address, why, out);
  TellLauncher();
}

void SchedulerNode::HandleTime(Time now, Outputs& out) {
  machine_->OnTime(now, out);
  TellLauncher();
}

void SchedulerNode::TellLauncher() {
  if (failure_fd_ < 0 || !machine_->failure()) return;
  const NodeId node = machine_->failure()->node;
  const std::string name = node.role == Role::kScheduler ? "scheduler" : ToString(node);
  const std::string line = name + "\n";
  // An empty socket takes it whole; a launcher that is gone needs no word.
  send(failure_fd_, line.data(), line.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  failure_fd_ = -1;
}

}  // namespace heddle::kvstore::dist
