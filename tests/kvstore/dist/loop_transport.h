// A network inside the process: every node has a thread that delivers what is sent to it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kvstore/dist/transport/transport.h"

namespace heddle::kvstore::dist {

class LoopTransport;

class LoopNetwork {
 public:
  std::unique_ptr<Transport> Join(TransportEvents& events, NodeId self, Incarnation incarnation);

 private:
  friend class LoopTransport;
  std::mutex mutex_;
  std::map<std::string, LoopTransport*> listeners_;  // by address
  int next_address_ = 0;
  int next_provisional_ = -2;
};

class LoopTransport final : public Transport {
 public:
  LoopTransport(LoopNetwork& network, TransportEvents& events, NodeId self, Incarnation incarnation)
      : network_(network), events_(events), self_(self), incarnation_(incarnation) {
    {
      const std::lock_guard lock(network_.mutex_);
      address_ = "loop:" + std::to_string(network_.next_address_++);
      network_.listeners_[address_] = this;
    }
    thread_ = std::thread([this] { Deliver(); });
  }
  ~LoopTransport() override { Close(); }

  SendId Send(NodeId to, Message message, std::function<void()> sent) override {
    const std::lock_guard lock(network_.mutex_);
    const auto found = peers_.find(to);
    if (found != peers_.end()) {
      LoopTransport& peer = *found->second;
      message.payload = CopyOf(message.payload);
      peer.Queue([&peer, name = name_at_[&peer], message]() mutable {
        peer.Receive(peer.NameOf(name), std::move(message));
      });
    }
    if (sent) sent();
    return 0;
  }
  Revoked Revoke(NodeId, SendId) override { return Revoked::kSent; }
  void Flush() override {}
  bool RunOne(std::chrono::steady_clock::time_point) override { return false; }
  void Interrupt() override {}
  std::string address() const override { return address_; }
  void SetSelf(NodeId self) override { self_ = self; }
  bool Rename(NodeId from, NodeId to) override {
    const std::lock_guard lock(network_.mutex_);
    const auto found = peers_.find(from);
    if (found == peers_.end() || peers_.count(to) > 0) return false;
    peers_[to] = found->second;
    peers_.erase(from);
    names_[from] = to;
    return true;
  }
  void Connect(NodeId peer, const std::string& address,
               std::chrono::steady_clock::time_point) override {
    LoopTransport* other = nullptr;
    NodeId name = self_;
    {
      const std::lock_guard lock(network_.mutex_);
      other = network_.listeners_.at(address);
      if (name.rank < 0) name.rank = network_.next_provisional_--;
      peers_[peer] = other;
      name_at_[other] = name;
      other->peers_[name] = this;
      other->name_at_[this] = peer;
      other->Queue([other, name, incarnation = incarnation_, from = address_] {
        other->events_.OnConnected(name, incarnation, from);
      });
    }
  }
  void Disconnect(NodeId) override {}
  void Close() override {
    {
      const std::lock_guard lock(network_.mutex_);
      if (closed_) return;
      closed_ = true;
      network_.listeners_.erase(address_);
      for (auto& [name, peer] : peers_) {
        LoopTransport& other = *peer;
        const NodeId mine = name_at_[&other];
        other.Queue([&other, mine, address = address_] {
          const NodeId final_name = other.NameOf(mine);
          {
            const std::lock_guard inner(other.network_.mutex_);
            other.peers_.erase(final_name);
          }
          other.events_.OnLost(final_name, address, "closed");
        });
        std::erase_if(other.peers_, [&](const auto& entry) { return entry.second == this; });
      }
      peers_.clear();
      changed_.notify_all();
    }
    thread_.join();
  }

 private:
  static Payload CopyOf(const Payload& payload) {
    if (payload.empty()) return {};
    auto bytes = std::make_shared<std::vector<std::byte>>();
    for (auto run : payload.runs()) bytes->insert(bytes->end(), run.begin(), run.end());
    Payload copy(bytes, {bytes->data(), bytes->size()});
    copy.set_owned_alone();
    return copy;
  }
  NodeId NameOf(NodeId name) {
    const std::lock_guard lock(network_.mutex_);
    const auto found = names_.find(name);
    return found != names_.end() ? found->second : name;
  }
  void Queue(std::function<void()> event) {  // under the network's lock
    if (closed_) return;
    queue_.push_back(std::move(event));
    changed_.notify_all();
  }
  void Receive(NodeId from, Message message) {
    if (!message.payload.empty()) {
      const Payload payload = std::exchange(message.payload, {});
      const auto landing = events_.OnHeader(from, message, payload.bytes());
      message.payload = payload;
      if (landing != nullptr && landing->BeginRead()) {
        std::size_t at = 0;
        for (std::span<std::byte> run : landing->runs()) {
          std::memcpy(run.data(), payload.runs()[0].data() + at, run.size());
          at += run.size();
        }
        landing->EndRead();
        message.payload = landing->Finish();
      }
    }
    events_.OnMessage(from, std::move(message));
  }
  void Deliver() {
    for (;;) {
      std::function<void()> event;
      {
        std::unique_lock lock(network_.mutex_);
        changed_.wait(lock, [&] { return closed_ || !queue_.empty(); });
        if (closed_) return;
        event = std::move(queue_.front());
        queue_.pop_front();
      }
      event();
      bool empty = false;
      {
        const std::lock_guard lock(network_.mutex_);
        empty = queue_.empty();
      }
      if (empty) events_.OnTurnEnd();
    }
  }

  LoopNetwork& network_;
  TransportEvents& events_;
  NodeId self_;
  const Incarnation incarnation_;
  std::string address_;
  // Guarded by the network's lock.
  std::map<NodeId, LoopTransport*> peers_;
  std::map<LoopTransport*, NodeId> name_at_;  // what the peer calls this node
  std::map<NodeId, NodeId> names_;            // renamed
  std::deque<std::function<void()>> queue_;
  bool closed_ = false;
  std::condition_variable changed_;
  std::thread thread_;
};

inline std::unique_ptr<Transport> LoopNetwork::Join(TransportEvents& events, NodeId self,
                                                    Incarnation incarnation) {
  return std::make_unique<LoopTransport>(*this, events, self, incarnation);
}

}  // namespace heddle::kvstore::dist
