// Transports: bytes between the nodes of a job. They know headers, not what messages mean.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/protocol/message.h"

namespace heddle::kvstore::dist {

// Where the payload of one message is received. A transport asks for one when the header and meta
// of a message have come, and holds it until the payload is complete or the peer is lost.
class Landing {
 public:
  virtual ~Landing() = default;
  // Exactly the payload's bytes in all, in order.
  virtual std::span<const std::span<std::byte>> runs() = 0;
  // Held around each read into the runs: false when the memory was given up (a deadline has
  // passed); the transport then drops the bytes. Whoever gives it up calls Revoke, which returns
  // once no read is under way.
  virtual bool BeginRead() = 0;
  virtual void EndRead() = 0;
  // What the payload of the complete message shall be.
  virtual Payload Finish() = 0;
};

// A node as its transport sees it. Calls may come from any thread that runs the transport: those of
// one connection one after another, those of different connections at the same time.
class TransportEvents {
 public:
  virtual ~TransportEvents() = default;
  // A message with a payload is about to come. Null: the transport receives into memory of its own
  // (from a pool; cache-warm).
  virtual std::shared_ptr<Landing> OnHeader(NodeId from, const Message& header,
                                            std::uint64_t payload_bytes) = 0;
  virtual void OnMessage(NodeId from, Message message) = 0;
  // `address` as people know it: "127.0.0.1:9091". Comes once a peer, after its last message.
  virtual void OnLost(NodeId peer, const std::string& address, const std::string& why) = 0;
};

// Threads: every method from any thread, unless said. None calls the events while the caller holds
// a lock of the transport; Send and Flush may call none at all.
class Transport {
 public:
  virtual ~Transport() = default;

  // Queues `message` for a connected peer and, where the link is idle, sends from this thread what
  // the socket takes. Messages to one peer may overtake one another (by priority, on several
  // connections). To a peer that is lost: dropped. `sent`, unless empty, is called, from any
  // thread, when the payload's bytes are no longer needed.
  virtual void Send(NodeId to, Message message, std::function<void()> sent = nullptr) = 0;
  // Sends small messages that wait for company.
  virtual void Flush() = 0;
  // A waiting thread lends itself: handles what has come, or waits for something to come until
  // `until`. Returns at once, with false, if another thread leads. Interrupt brings the leader
  // back.
  virtual bool RunOne(std::chrono::steady_clock::time_point until) = 0;
  virtual void Interrupt() = 0;

  // Address of this node as others may connect to it.
  virtual std::string address() const = 0;
  // Connects to `peer`; returns when the handshake is done. NetworkError, or TimeoutError at the
  // deadline, naming peer, address and what came back.
  virtual void Connect(NodeId peer, const std::string& address,
                       std::chrono::steady_clock::time_point deadline) = 0;
  // Ends the connection to `peer` in order: what is queued is sent first. No OnLost.
  virtual void Disconnect(NodeId peer) = 0;
  // No events after it returns.
  virtual void Close() = 0;
};

}  // namespace heddle::kvstore::dist
