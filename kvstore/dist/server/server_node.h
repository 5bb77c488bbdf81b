// The node of a server.
#pragma once

#include <heddle/dist.h>
#include <heddle/engine.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "kvstore/dist/node.h"
#include "kvstore/dist/protocol/member.h"
#include "kvstore/dist/protocol/server.h"
#include "kvstore/dist/server/array_parts.h"
#include "kvstore/dist/server/server_control.h"
#include "kvstore/dist/state_signal.h"

namespace heddle::kvstore::dist {

class ServerNode final : private Node {
 public:
  ServerNode(const DistOptions& options, const EngineOptions& engine, ServerController controller,
             const TransportFactory& make_transport);
  ~ServerNode() override;

  // Joins, and serves until the job has ended. As RunServer.
  void Run();
  std::string DescribeState();

 private:
  // Node
  void HandleMessage(Time now, NodeId from, Message message, Outputs& out) override
      REQUIRES(mutex_);
  void HandleLost(Time now, NodeId peer, const std::string& address, const std::string& why,
                  Outputs& out) override REQUIRES(mutex_);
  void HandleTime(Time now, Outputs& out) override REQUIRES(mutex_);
  void OnTurnEnd() override;
  std::optional<Time> NextTime() const override REQUIRES(mutex_);

  void Follow(Time now, Outputs& out) REQUIRES(mutex_);

  const DistOptions options_;
  const Incarnation incarnation_;
  Engine engine_;
  ArrayParts parts_ GUARDED_BY(mutex_);
  ArrayControl control_ GUARDED_BY(mutex_);
  ServerMachine machine_ GUARDED_BY(mutex_);
  std::unique_ptr<Transport> transport_;
  std::optional<Member> member_ GUARDED_BY(mutex_);
  bool joined_ GUARDED_BY(mutex_) = false;        // before it, member_ knows no time
  bool told_failure_ GUARDED_BY(mutex_) = false;  // to machine_
  std::optional<StateOnSignal> state_signal_;     // goes first
};

}  // namespace heddle::kvstore::dist
