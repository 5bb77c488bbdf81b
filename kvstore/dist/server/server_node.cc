#include "kvstore/dist/server/server_node.h"

#include <heddle/error.h>

#include <chrono>
#include <utility>

#include "kvstore/dist/membership.h"

namespace heddle::kvstore::dist {

namespace {

ServerOptions MachineOptions(const DistOptions& options) {
  ServerOptions machine;
  machine.warn_after = options.warning_time;
  machine.unfinished_bytes_max = static_cast<std::uint64_t>(options.peer_bytes_max);
  return machine;
}

}  // namespace

ServerNode::ServerNode(const DistOptions& options, const EngineOptions& engine,
                       ServerProgram program, const TransportFactory& make_transport)
    : MemberNode(machine_),
      options_(options),
      incarnation_(NewIncarnation()),
      engine_(engine),
      parts_(
          engine_,
          [this](const PartId& id, const std::exception_ptr& error) {
            Drive([&](Time now, Outputs& out) REQUIRES(mutex_) {
              traced_parts_.OnUpdated(id);
              machine_.OnUpdated(now, id, error, out);
            });
            OnTurnEnd();
          },
          [this](const PartId& id, PassResult result) {
            Drive([&](Time now, Outputs& out) REQUIRES(mutex_) {
              traced_parts_.OnUpdated(id);
              machine_.OnPassed(now, id, std::move(result), out);
            });
            OnTurnEnd();
          }),
      traced_parts_(parts_, engine::TraceOf(engine_)),
      control_(
          engine_, parts_, std::move(program),
          [this](const std::function<void()>& body) {
            MutexLock lock(mutex_);
            body();
          },
          [this](const ControlId& id, ControlResult result) {
            Drive([&](Time now, Outputs& out) REQUIRES(mutex_) {
              machine_.OnControlDone(now, id, std::move(result), out);
            });
          }),
      machine_(MachineOptions(options), traced_parts_, control_) {
  {
    // What comes as soon as there is a transport waits until all is made.
    MutexLock lock(mutex_);
    transport_ = make_transport(*this, incarnation_);
    member_.emplace(OptionsOfMember(options, incarnation_, transport_->address()));
    trace_.Use(engine::TraceOf(engine_));
    Start(*transport_);
    made_.store(true, std::memory_order_release);  // pairs with the acquire in OnTurnEnd
  }
  state_signal_.emplace([this] { return DescribeState(); });
}

ServerNode::~ServerNode() {
  state_signal_.reset();
  engine_.Stop();  // updates under way end
  Stop();
}

void ServerNode::Run() {
  const auto deadline = std::chrono::steady_clock::now() + options_.connect_deadline;
  JoinJob(*transport_, options_, deadline);
  {
    MutexLock lock(mutex_);
    while (!member_->failure() && !member_->roster()) changed_.Wait(mutex_);
    saw_roster_ = true;
  }
  ConnectToServers(deadline);
  {
    MutexLock lock(mutex_);
    while (!member_->failure() && !member_->shutdown_wanted()) changed_.Wait(mutex_);
  }
  Drive([&](Time, Outputs& out) REQUIRES(mutex_) {
    if (member_->failure()) {
      TellWorkers(out);
    } else {
      member_->ShutDown(out);
    }
  });
  MutexLock lock(mutex_);
  ThrowIfFailed(*member_, options_);
}

// Why this server ends. A worker that saw it end before it heard from the scheduler would take this
// server for the cause.
void ServerNode::TellWorkers(Outputs& out) const {
  if (!member_->roster()) return;  // nor have they
  for (const NodeEntry& entry : member_->roster()->nodes) {
    if (entry.node.role != Role::kWorker) continue;
    out.Send(entry.node, {.kind = Kind::kJobFailed,
                          .incarnation = entry.incarnation,
                          .meta = Encode(*member_->failure())});
  }
}

// To those of a lower rank; the others connect to this one.
void ServerNode::ConnectToServers(std::chrono::steady_clock::time_point deadline) {
  RosterBody roster;
  {
    MutexLock lock(mutex_);
    if (member_->failure()) return;
    roster = *member_->roster();
  }
  const auto is_over = [this] {
    MutexLock lock(mutex_);
    return member_->failure().has_value() || member_->shutdown_wanted();
  };
  for (const NodeEntry& node : roster.nodes) {
    if (node.node.role != Role::kServer || node.node.rank >= roster.rank) continue;
    try {
      transport_->Connect(node.node, node.address, deadline, is_over);
    } catch (const Error&) {
      if (WillEnd()) return;  // Run says how
      throw;
    }
    HandleLinked(node.node);
  }
}

// A short job may have ended before its servers have met: the other one closes already, and this
// one hears of it in a moment.
bool ServerNode::WillEnd() {
  const auto until = std::chrono::steady_clock::now() + kWordOfScheduler;
  MutexLock lock(mutex_);
  while (!member_->failure() && !member_->shutdown_wanted()) {
    if (!changed_.WaitUntil(mutex_, until)) return false;
  }
  return true;
}

void ServerNode::HandleLinked(NodeId server) {
  Drive([&](Time, Outputs& out) REQUIRES(mutex_) { machine_.OnLinked(server.rank, out); });
}

void ServerNode::OnConnected(NodeId peer, Incarnation /*incarnation*/,
                             const std::string& /*address*/) {
  if (peer.role == Role::kServer) HandleLinked(peer);
}

std::string ServerNode::DescribeState() { return DescribeMachines() + "\n" + engine_.DumpState(); }

void ServerNode::OnMemberChanged(Time now, Outputs& out) {
  if (!member_->roster() || std::exchange(has_roster_, true)) return;
  transport_->SetSelf(member_->self());
  trace_.SetPlace(member_->self(), incarnation_, options_.job_id);
  const RosterBody& roster = *member_->roster();
  parts_.SetPlacement({.num_servers = roster.num_servers,
                       .cut_bytes = roster.cut_bytes,
                       .slice_bytes = roster.slice_bytes},
                      roster.rank);
  machine_.OnRoster(now, roster, out);
}

// Acknowledgements go once nothing else is at hand.
void ServerNode::OnTurnEnd() {
  MemberNode::OnTurnEnd();
  // A transport that cannot listen waits for its thread to end while its maker holds the lock.
  if (!made_.load(std::memory_order_acquire)) return;
  Drive([&](Time, Outputs& out) REQUIRES(mutex_) { machine_.EndTurn(out); });
}

}  // namespace heddle::kvstore::dist
