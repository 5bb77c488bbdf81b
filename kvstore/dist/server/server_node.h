// The node of a server.
#pragma once

#include <heddle/dist.h>
#include <heddle/engine.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "kvstore/dist/member_node.h"
#include "kvstore/dist/node.h"
#include "kvstore/dist/protocol/server.h"
#include "kvstore/dist/server/array_parts.h"
#include "kvstore/dist/server/server_control.h"
#include "kvstore/dist/server/traced_parts.h"
#include "kvstore/dist/state_signal.h"

namespace heddle::kvstore::dist {

class ServerNode final : private MemberNode<ServerMachine> {
 public:
  ServerNode(const DistOptions& options, const EngineOptions& engine, ServerProgram program,
             const TransportFactory& make_transport);
  ~ServerNode() override;

  // Joins, and serves until the job has ended. As RunServer.
  void Run();
  std::string DescribeState();

 private:
  // Node
  void OnMemberChanged(Time now, Outputs& out) override REQUIRES(mutex_);
  void OnTurnEnd() override;
  bool MayBeAwaited() const override REQUIRES(mutex_) {
    return member_->failure() || member_->shutdown_wanted() || (has_roster_ && !saw_roster_);
  }
  void OnConnected(NodeId peer, Incarnation incarnation, const std::string& address) override;

  void ConnectToServers(std::chrono::steady_clock::time_point deadline) EXCLUDES(mutex_);
  bool WillEnd() EXCLUDES(mutex_);
  void HandleLinked(NodeId server) EXCLUDES(mutex_);

  void TellWorkers(Outputs& out) const REQUIRES(mutex_);

  const DistOptions options_;
  const Incarnation incarnation_;
  Engine engine_;
  ArrayParts parts_ GUARDED_BY(mutex_);
  TracedParts traced_parts_ GUARDED_BY(mutex_);
  ArrayControl control_ GUARDED_BY(mutex_);
  ServerMachine machine_ GUARDED_BY(mutex_);
  std::unique_ptr<Transport> transport_;
  std::atomic<bool> made_{false};  // all of the above
  bool has_roster_ GUARDED_BY(mutex_) = false;
  bool saw_roster_ GUARDED_BY(mutex_) = false;  // Run did
  std::optional<StateOnSignal> state_signal_;   // goes first
};

}  // namespace heddle::kvstore::dist
