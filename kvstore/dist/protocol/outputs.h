// What a state machine wants done: it only says so, the node that runs it does it.
//
// The machines of the protocol (scheduler.h, server.h, worker.h) have no thread, clock or socket. A
// node calls one with what has happened (a message came, a peer was lost, time went by, the
// program wants something), one call at a time, and afterwards does what the outputs say, in order.
#pragma once

#include <heddle/logging.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/protocol/message.h"

namespace heddle::kvstore::dist {

struct Outgoing {
  NodeId to = {};
  Message message = {};
  // Of requests with a payload: the bytes are the program's until the answer of this token is
  // given.
  std::uint64_t token = 0;
  Time deadline{0};  // when that answer comes at the latest; 0: whenever it comes
};

// A request that was sent has become more urgent.
struct Raised {
  NodeId to = {};
  PartId part = {};
  std::uint64_t sequence = 0;
  std::uint64_t token = 0;  // as sent
  std::int32_t priority = 0;
};

// The end of something that the program asked a machine for.
struct Answer {
  std::uint64_t token = 0;        // as given with the request
  std::exception_ptr error = {};  // null: success
  Message message = {};           // what was answered; empty where nothing is
};

struct Outputs {
  // Of the scheduler: peers that are known by another name from here on. Before the messages.
  std::vector<std::pair<NodeId, NodeId>> renames;
  std::vector<Outgoing> messages;
  std::vector<Raised> raised;  // after the messages
  // Of requests that need them no more. Whose memory it is may run code of the program's when the
  // last handle goes: not under the node's lock. Before the answers.
  std::vector<Payload> given_back;
  std::vector<Answer> answers;
  std::vector<std::pair<LogLevel, std::string>> log;
  // Peers that are not wanted. After the messages, in order, so that they hear why.
  std::vector<NodeId> disconnects;

  // A message to `to`, to be filled in.
  Message& Add(NodeId to, std::uint64_t token = 0) {
    Outgoing& outgoing = messages.emplace_back();
    outgoing.to = to;
    outgoing.token = token;
    return outgoing.message;
  }
  void GiveBack(Payload& payload) {
    if (payload.owner() != nullptr) given_back.push_back(std::exchange(payload, {}));
  }
  void Send(NodeId to, Message message, std::uint64_t token = 0) {
    Add(to, token) = std::move(message);
  }
};

// Outputs in the memory of those that this thread has used last.
class ReusedOutputs {
 public:
  ReusedOutputs() : kept_(TakeKept()) {
    if (kept_ == nullptr) own_.emplace();
  }
  ReusedOutputs(const ReusedOutputs&) = delete;
  ReusedOutputs& operator=(const ReusedOutputs&) = delete;
  ~ReusedOutputs() {
    if (kept_ != nullptr) kept_->GiveBack();
  }

  Outputs& operator*() { return kept_ != nullptr ? kept_->outputs : *own_; }

 private:
  struct Kept {
    static constexpr std::size_t kCapacityMax = 256;

    ~Kept() { over = true; }
    void GiveBack() {
      if (outputs.messages.capacity() > kCapacityMax || outputs.answers.capacity() > kCapacityMax) {
        outputs = {};
      }
      outputs.renames.clear();
      outputs.messages.clear();
      outputs.raised.clear();
      outputs.given_back.clear();
      outputs.answers.clear();
      outputs.log.clear();
      outputs.disconnects.clear();
      taken = false;
    }

    Outputs outputs;
    bool taken = false;
  };

  // Null inside another one's life, and at the end of the thread: stores may be static variables,
  // whose destructors run later.
  static Kept* TakeKept() {
    if (over) return nullptr;
    thread_local Kept kept;
    return std::exchange(kept.taken, true) ? nullptr : &kept;
  }

  inline static thread_local bool over = false;

  Kept* const kept_;
  std::optional<Outputs> own_;
};

}  // namespace heddle::kvstore::dist
