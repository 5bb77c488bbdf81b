// The node of a scheduler.
#pragma once

#include <heddle/dist.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "kvstore/dist/node.h"
#include "kvstore/dist/protocol/scheduler.h"

namespace heddle::kvstore::dist {

class SchedulerNode final : private Node {
 public:
  using TransportFactory =
      std::function<std::unique_ptr<Transport>(TransportEvents& events, Incarnation incarnation)>;

  SchedulerNode(const DistOptions& options, const TransportFactory& make_transport);
  ~SchedulerNode();

  // Until the job has ended. As RunScheduler.
  void Run();
  std::string DescribeState();
  std::string address() const { return transport_->address(); }

 private:
  void HandleConnected(NodeId peer, Incarnation incarnation, const std::string& address) override;
  void HandleMessage(Time now, NodeId from, Message message, Outputs& out) override;
  void HandleLost(Time now, NodeId peer, const std::string& address, const std::string& why,
                  Outputs& out) override;
  void HandleTime(Time now, Outputs& out) override;
  std::optional<Time> NextTime() const override { return machine_->next_time(); }

  std::unique_ptr<Transport> transport_;
  std::optional<SchedulerMachine> machine_ GUARDED_BY(mutex_);
};

}  // namespace heddle::kvstore::dist
