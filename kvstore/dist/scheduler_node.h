// The node of a scheduler.
#pragma once

#include <heddle/dist.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "engine/trace_source.h"
#include "kvstore/dist/node.h"
#include "kvstore/dist/protocol/scheduler.h"
#include "kvstore/dist/state_signal.h"

namespace heddle::kvstore::dist {

class SchedulerNode final : private Node {
 public:
  // Messages are recorded in `trace`, unless it is null.
  SchedulerNode(const DistOptions& options, const TransportFactory& make_transport,
                const engine::TraceSource& trace = nullptr);
  ~SchedulerNode() override;

  // Until the job has ended. As RunScheduler.
  void Run();
  std::string DescribeState();
  std::string address() const { return transport_->address(); }

 private:
  void HandleConnected(NodeId peer, Incarnation incarnation, const std::string& address) override
      REQUIRES(mutex_);
  void HandleMessage(Time now, NodeId from, Message&& message, Outputs& out) override
      REQUIRES(mutex_);
  void HandleLost(Time now, NodeId peer, const std::string& address, const std::string& why,
                  Outputs& out) override REQUIRES(mutex_);
  void HandleTime(Time now, Outputs& out) override REQUIRES(mutex_);
  std::optional<Time> NextTime() const override REQUIRES(mutex_) { return machine_->next_time(); }
  bool MayBeAwaited() const override REQUIRES(mutex_) { return machine_->done(); }

  // After an input, before what it has put out is sent: whoever ends because it is told of the
  // failure ends after the launcher could know of the cause.
  void TellLauncher() REQUIRES(mutex_);

  int failure_fd_ GUARDED_BY(mutex_);  // -1: none, or it has been told

  std::unique_ptr<Transport> transport_;
  std::optional<SchedulerMachine> machine_ GUARDED_BY(mutex_);
  std::optional<StateOnSignal> state_signal_;  // goes first
};

}  // namespace heddle::kvstore::dist
