#include "kvstore/dist/scheduler_node.h"

#include <heddle/error.h>

#include "kvstore/dist/membership.h"

namespace heddle::kvstore::dist {

SchedulerNode::SchedulerNode(const DistOptions& options, const TransportFactory& make_transport,
                             const engine::TraceSource& trace) {
  const Incarnation incarnation = NewIncarnation();
  if (trace != nullptr) {
    trace_.SetPlace({Role::kScheduler, 0}, incarnation);
    trace_.Use(trace);
  }
  SchedulerOptions machine;
  machine.num_workers = options.num_workers;
  machine.num_servers = options.num_servers;
  if (options.slice_bytes > 0) machine.slice_bytes = options.slice_bytes;
  machine.cut_bytes = options.cut_bound * 4;  // as of float32
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
  }
  Start(*transport_);
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
}

void SchedulerNode::HandleLost(Time now, NodeId peer, const std::string& address,
                               const std::string& why, Outputs& out) {
  machine_->OnLost(now, peer, address, why, out);
}

void SchedulerNode::HandleTime(Time now, Outputs& out) { machine_->OnTime(now, out); }

}  // namespace heddle::kvstore::dist
