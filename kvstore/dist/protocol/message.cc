#include "kvstore/dist/protocol/message.h"

#include <fmt/format.h>

#include "kvstore/dist/protocol/ids.h"

namespace heddle::kvstore::dist {

std::string ToString(NodeId node) {
  switch (node.role) {
    case Role::kScheduler:
      return "the scheduler";
    case Role::kServer:
      return node.rank < 0 ? "a server" : fmt::format("server {}", node.rank);
    case Role::kWorker:
      return node.rank < 0 ? "a worker" : fmt::format("worker {}", node.rank);
  }
  return fmt::format("node {} of unknown role {}", node.rank, static_cast<int>(node.role));
}

std::string_view Name(Kind kind) {
  switch (kind) {
    case Kind::kHello:
      return "hello";
    case Kind::kChallenge:
      return "challenge";
    case Kind::kProof:
      return "proof";
    case Kind::kWelcome:
      return "welcome";
    case Kind::kRefused:
      return "refused";
    case Kind::kReceived:
      return "received";
    case Kind::kJoin:
      return "join";
    case Kind::kRoster:
      return "roster";
    case Kind::kHeartbeat:
      return "heartbeat";
    case Kind::kPeerDown:
      return "peer_down";
    case Kind::kJobFailed:
      return "job_failed";
    case Kind::kBarrier:
      return "barrier";
    case Kind::kBarrierDone:
      return "barrier_done";
    case Kind::kLeaveJob:
      return "leave_job";
    case Kind::kShutdown:
      return "shutdown";
    case Kind::kShutdownDone:
      return "shutdown_done";
    case Kind::kStatus:
      return "status";
    case Kind::kStatusReply:
      return "status_reply";
    case Kind::kInit:
      return "init";
    case Kind::kPush:
      return "push";
    case Kind::kPull:
      return "pull";
    case Kind::kPushPull:
      return "pushpull";
    case Kind::kRowPull:
      return "row_pull";
    case Kind::kReset:
      return "reset";
    case Kind::kDescribe:
      return "describe";
    case Kind::kRemove:
      return "remove";
    case Kind::kOpenStore:
      return "open_store";
    case Kind::kSetOptimizer:
      return "set_optimizer";
    case Kind::kSetParameters:
      return "set_parameters";
    case Kind::kSetCompression:
      return "set_compression";
    case Kind::kCommand:
      return "command";
    case Kind::kSaveStates:
      return "save_states";
    case Kind::kLoadStates:
      return "load_states";
    case Kind::kKeys:
      return "keys";
    case Kind::kLeave:
      return "leave";
    case Kind::kCloseStore:
      return "close_store";
    case Kind::kAcks:
      return "acks";
    case Kind::kValue:
      return "value";
    case Kind::kDone:
      return "done";
    case Kind::kError:
      return "error";
    case Kind::kCredit:
      return "credit";
    case Kind::kGrant:
      return "grant";
    case Kind::kAsk:
      return "ask";
    case Kind::kBlockSums:
      return "block_sums";
  }
  return {};
}

}  // namespace heddle::kvstore::dist
