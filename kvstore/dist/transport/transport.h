// Transports: bytes between the nodes of a job. They know headers, not what messages mean.
//
// Messages of one peer may overtake one another: they leave by priority, on several connections.
// None is lost or doubled while the peer is connected; what had not arrived when a peer is lost, is
// lost.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/protocol/message.h"
#include "kvstore/dist/protocol/outputs.h"
#include "ops/store_mode.h"

namespace heddle::kvstore::dist {

// Where the payload of one message is received. A transport asks for one when the header and meta
// of a message have come, and holds it until the payload is complete or the peer is lost; or until
// the connection is cut, after which the message comes again, and it asks again.
class Landing {
 public:
  virtual ~Landing() = default;
  // Exactly the payload's bytes in all, in order. The same at each call.
  virtual std::span<const std::span<std::byte>> runs() = 0;
  // How bytes that lie in this process's memory already are copied to the runs.
  virtual ops::StoreMode store_mode() const { return ops::StoreMode::kCached; }
  // Held around each read into the runs: false when the memory was given up (a deadline has
  // passed); the transport then drops the rest of the bytes, and the message comes without its
  // payload: it is an answer all the same. Whoever gives it up calls Revoke, which returns once no
  // read is under way.
  virtual bool BeginRead() = 0;
  virtual void EndRead() = 0;
  // What the payload of the complete message shall be.
  virtual Payload Finish() = 0;
};

// A node as its transport sees it. Calls come from threads that run the transport: those of one
// connection one after another, those of different connections at the same time. They must not
// throw.
class TransportEvents {
 public:
  virtual ~TransportEvents() = default;
  // `peer` has connected to this node and passed the handshake; comes before its first message.
  virtual void OnConnected(NodeId /*peer*/, Incarnation /*incarnation*/,
                           const std::string& /*address*/) {}
  // A message with a payload is about to come. Null: the transport receives into memory of its own
  // (from a pool; cache-warm; several runs if it is long).
  virtual std::shared_ptr<Landing> OnHeader(NodeId from, const Message& header,
                                            std::uint64_t payload_bytes) = 0;
  virtual void OnMessage(NodeId from, Message&& message) = 0;
  // All that was at hand has been handled; what runs the transport looks for more, or waits.
  virtual void OnTurnEnd() {}
  // `address` as people know it: "127.0.0.1:9091". Comes once a peer, after its last message.
  virtual void OnLost(NodeId peer, const std::string& address, const std::string& why) = 0;
};

// What Revoke found.
enum class Revoked {
  kSent,     // all bytes have left, or the peer is lost
  kDropped,  // none had: the message will not arrive
  kCopied,   // some had: the transport has copied the rest, and the message will arrive
};

// Threads: every method from any thread, unless said. None calls the events while it holds a lock
// of the transport; Send, Raise, Flush, Revoke and Interrupt call none at all.
class Transport {
 public:
  // Names a message of one peer, for Raise and Revoke.
  using SendId = std::uint64_t;
  // Meta and payload of a message that is copied before Send returns.
  static constexpr std::size_t kCopiedMax = 4096;

  virtual ~Transport() = default;

  // Queues `message` for a connected peer and, where the link is idle, sends from this thread what
  // the socket takes. Small messages (kCopiedMax) may wait for company: until Flush, RunOne, 128 of
  // them, 32 KiB, or some 100 us where the transport has a thread of its own. To a peer that is not
  // connected (any more): dropped. `sent`, unless empty, is called, from any thread, when the
  // payload's bytes are no longer needed; so are the payload's owners released. Either may happen
  // inside Send, Flush and Revoke: neither may take a lock that the callers of those hold.
  virtual SendId Send(NodeId to, Message message, std::function<void()> sent = nullptr) = 0;
  // Sends small messages (kCopiedMax) to one peer, in order: cheaper than one by one.
  virtual void SendTogether(std::span<Outgoing> messages) {
    for (Outgoing& each : messages) Send(each.to, std::move(each.message));
  }
  // A message that has not begun to leave goes by this priority from now on, if it is higher.
  virtual void Raise(NodeId /*to*/, SendId /*id*/, std::int32_t /*priority*/) {}
  // Gives the payload of a message up: when it returns nothing reads its bytes, nor will.
  virtual Revoked Revoke(NodeId to, SendId id) = 0;
  // Sends small messages that wait for company.
  virtual void Flush() = 0;

  // A waiting thread lends itself: flushes, handles what has come, or waits for something to come
  // until `until`; also returns now and then for no reason. Returns at once, with false, if another
  // thread leads (it may be a thread of the transport).
  virtual bool RunOne(std::chrono::steady_clock::time_point until) = 0;
  // A thread that has something else to do lends itself for a moment: handles some of what has
  // come, unless another thread leads. Waits for nothing. A transport may do nothing.
  virtual void TakeArrived() {}
  // Brings the leader back; the next one, if none is now. Takes no lock that is held while events
  // are called, and costs next to nothing while the leader does not sleep.
  virtual void Interrupt() = 0;

  // Address of this node as others may connect to it: "127.0.0.1:9091"; empty if it does not
  // listen.
  virtual std::string address() const = 0;
  // Who this node is, for the connections to come: a worker or server learns its rank after it has
  // connected to the scheduler as rank -1.
  virtual void SetSelf(NodeId self) = 0;
  // Peers that connect without a rank have a provisional one, below -1, which no other peer has
  // had. From here on `from` is known as `to`, in all calls and events that begin later. False,
  // and nothing happens, if `from` is not connected or `to` is.
  virtual bool Rename(NodeId from, NodeId to) = 0;
  // Connects to `peer`; returns when the handshake is done. Tries again while nobody listens yet,
  // or this process has no descriptor left. Errors name peer, address and what came back:
  // InvalidArgument for an address that is none, InvalidState if `peer` is connected, NetworkError
  // if it refuses, is somebody else, or this node closes, TimeoutError at the deadline.
  // NetworkError soon after `given_up`, unless empty, returns true, which is asked several times a
  // second.
  virtual void Connect(NodeId peer, const std::string& address,
                       std::chrono::steady_clock::time_point deadline,
                       const std::function<bool()>& given_up) = 0;
  void Connect(NodeId peer, const std::string& address,
               std::chrono::steady_clock::time_point deadline) {
    Connect(peer, address, deadline, nullptr);
  }
  // Ends the connection to `peer` in order: what is queued is sent first. No OnLost; messages that
  // were on their way from it may still come.
  virtual void Disconnect(NodeId peer) = 0;
  // Ends all connections in order, for a second at most, and returns when no event is under way,
  // nor will be. Not from inside an event.
  virtual void Close() = 0;
};

}  // namespace heddle::kvstore::dist
