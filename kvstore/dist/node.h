// A process of a job at work: a transport, the state machines of its role, and a clock for them.
//
// Threads. The machines run under one lock, `mutex_`, one input at a time: messages come on the
// threads that run the transport, requests on those of the program, time on the node's own thread,
// which keeps the heartbeats going: also while another thread copies gigabytes under the lock, or
// waits there for code of the program's (SendSignOfLife). What the machines say
// (Outputs) is done after the lock is released, so what two inputs said may be sent in either
// order; the protocol allows for that. An input takes microseconds, of many small messages a few
// tens, so those who bring another one meanwhile look on for as long before they sleep.
//
// Small messages that come together are one input: they wait until the transport's turn ends, a
// long one comes, or there are kTogetherMax.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "base/spinning_lock.h"
#include "kvstore/dist/message_trace.h"
#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/protocol/message.h"
#include "kvstore/dist/protocol/outputs.h"
#include "kvstore/dist/transport/transport.h"

namespace heddle::kvstore::dist {

// Makes the transport of a node, which calls its events.
using TransportFactory =
    std::function<std::unique_ptr<Transport>(TransportEvents& events, Incarnation incarnation)>;

class Node : public TransportEvents {
 public:
  Node() = default;
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  void OnConnected(NodeId peer, Incarnation incarnation, const std::string& address) override;
  // Whoever has a place for payloads overrides it.
  std::shared_ptr<Landing> OnHeader(NodeId /*from*/, const Message& /*header*/,
                                    std::uint64_t /*payload_bytes*/) override {
    return nullptr;
  }
  void OnMessage(NodeId from, Message&& message) override EXCLUDES(small_mutex_);
  void OnTurnEnd() override EXCLUDES(small_mutex_);
  void OnLost(NodeId peer, const std::string& address, const std::string& why) override;

 protected:
  // Meta and payload of a small message. Its payload is copied sooner than a place for it is found.
  static constexpr std::size_t kSmallBytes = 1024;

  ~Node() override;  // after Stop

  // `transport` calls this node's events. With the lock held since before it was made: what comes
  // at once waits for it, and finds all in place.
  void Start(Transport& transport) REQUIRES(mutex_);
  // What inputs so far have put out is done; no input comes after it. Not from inside one.
  void Stop();

  // Small messages that have come are an input now.
  void HandleSmall() EXCLUDES(mutex_, small_mutex_);

  static Time Now() { return std::chrono::steady_clock::now().time_since_epoch(); }

  // What the machines make of an input.
  virtual void HandleConnected(NodeId /*peer*/, Incarnation /*incarnation*/,
                               const std::string& /*address*/) REQUIRES(mutex_) {}
  virtual void HandleMessage(Time now, NodeId from, Message&& message, Outputs& out)
      REQUIRES(mutex_) = 0;
  // HandleMessage will be called with it, after others.
  virtual void ExpectMessage(const Message& /*message*/) REQUIRES(mutex_) {}
  virtual void HandleLost(Time now, NodeId peer, const std::string& address, const std::string& why,
                          Outputs& out) REQUIRES(mutex_) = 0;
  virtual void HandleTime(Time now, Outputs& out) REQUIRES(mutex_) = 0;
  // When HandleTime wants to be called.
  virtual std::optional<Time> NextTime() const REQUIRES(mutex_) = 0;
  // Whether what a thread in Join, Run or Close waits for may have come.
  virtual bool MayBeAwaited() const REQUIRES(mutex_) = 0;
  // By the clock's thread, without the lock: when time has gone by, a heartbeat's interval at most.
  // Returns when it wants to be called at the latest.
  virtual std::optional<Time> OnClock(Time /*now*/) { return std::nullopt; }
  // By the clock's thread, which waits for the lock: now and then, until it has it.
  virtual void SendSignOfLife(Time /*waits_since*/, Time /*now*/) {}
  // Without the lock. Small messages (Transport::kCopiedMax) may pass it by.
  virtual void RaisePriority(const Raised& /*raised*/) {}
  virtual void SendMessage(Outgoing&& outgoing) {
    transport_->Send(outgoing.to, std::move(outgoing.message));
  }
  virtual void GiveAnswer(Answer&& /*answer*/) {}

  // input(now, outputs), under the lock, and then what it has put out.
  template <class Input>
  void Drive(const Input& input) EXCLUDES(mutex_) {
    ReusedOutputs out;
    {
      const SpinningLock lock(mutex_);
      input(Now(), *out);
      NoteTimeLocked();
      performing_.fetch_add(1, std::memory_order_relaxed);
    }
    Perform(*out);
    performing_.fetch_sub(1, std::memory_order_release);  // pairs with the acquire in Stop
  }
  void NoteTimeLocked() REQUIRES(mutex_);       // after an input
  void Perform(Outputs& out) EXCLUDES(mutex_);  // once

  Transport& transport() const { return *transport_; }

  MessageTrace trace_;

  Mutex mutex_;
  CondVar changed_;  // after inputs, when MayBeAwaited

 private:
  struct Arrived {
    NodeId from;
    Message message;
  };
  static constexpr std::size_t kTogetherMax = 64;

  void SendAll(std::span<Outgoing> messages) EXCLUDES(mutex_);
  void RunClock() EXCLUDES(mutex_);
  void LockAsClock() ACQUIRE(mutex_);
  void CallClock() EXCLUDES(clock_mutex_);
  void SleepUntil(Time next) EXCLUDES(mutex_, clock_mutex_);

  Transport* transport_ = nullptr;
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::atomic<Time> clock_next_{Time{0}};  // when the clock looks again, if it sleeps
  Mutex clock_mutex_;
  CondVar clock_wakes_;
  bool clock_called_ GUARDED_BY(clock_mutex_) = false;
  // Threads that do what an input has put out. A waiter that the input has woken may want to Stop
  // before it is done.
  std::atomic<int> performing_{0};
  std::thread clock_;

  // Small messages that have come and are not handled: in the order of their connections. Taken
  // with mutex_ held, so that they are handled in this order.
  Mutex small_mutex_;
  std::vector<Arrived> small_ GUARDED_BY(small_mutex_);
  std::atomic<bool> any_small_{false};               // whether small_ has some
  std::vector<Arrived> handled_ GUARDED_BY(mutex_);  // empty but while they are handled
};

}  // namespace heddle::kvstore::dist
