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
#include <string>
#include <utility>
#include <vector>

#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/protocol/message.h"

namespace heddle::kvstore::dist {

struct Outgoing {
  NodeId to;
  Message message;
  // Of requests with a payload: the bytes are the program's until the answer of this token is
  // given.
  std::uint64_t token = 0;
};

// The end of something that the program asked a machine for.
struct Answer {
  std::uint64_t token;       // as given with the request
  std::exception_ptr error;  // null: success
  Message message;           // what was answered; empty where nothing is
};

struct Outputs {
  // Of the scheduler: peers that are known by another name from here on. Before the messages.
  std::vector<std::pair<NodeId, NodeId>> renames;
  std::vector<Outgoing> messages;
  std::vector<Answer> answers;
  std::vector<std::pair<LogLevel, std::string>> log;
  // Peers that are not wanted. After the messages, in order, so that they hear why.
  std::vector<NodeId> disconnects;

  void Send(NodeId to, Message message, std::uint64_t token = 0) {
    messages.push_back({to, std::move(message), token});
  }
};

// Outputs in the memory of those that this thread has used last.
class ReusedOutputs {
 public:
  ReusedOutputs() {
    if (Outputs* const spare = Spare()) outputs_ = std::exchange(*spare, {});
  }
  ReusedOutputs(const ReusedOutputs&) = delete;
  ReusedOutputs& operator=(const ReusedOutputs&) = delete;
  ~ReusedOutputs() {
    if (outputs_.messages.capacity() > kKeptMax || outputs_.answers.capacity() > kKeptMax) return;
    outputs_.renames.clear();
    outputs_.messages.clear();
    outputs_.answers.clear();
    outputs_.log.clear();
    outputs_.disconnects.clear();
    if (Outputs* const spare = Spare()) *spare = std::move(outputs_);
  }

  Outputs& operator*() { return outputs_; }

 private:
  static constexpr std::size_t kKeptMax = 64;

  // Null at the end of the thread: stores may be static variables, whose destructors run later.
  static Outputs* Spare() {
    thread_local bool over = false;
    struct Kept {
      ~Kept() { over = true; }
      Outputs outputs;
    };
    if (over) return nullptr;
    thread_local Kept kept;
    return &kept.outputs;
  }

  Outputs outputs_;
};

}  // namespace heddle::kvstore::dist
