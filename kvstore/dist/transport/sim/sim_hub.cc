#include "kvstore/dist/transport/sim/sim_hub.h"

#include <heddle/error.h>

#include <algorithm>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"

namespace heddle::kvstore::dist {

namespace {

// How often a node that waits for another one to listen looks whether it still wants to.
constexpr std::chrono::milliseconds kGivenUpAsked{50};

// Copies the runs of one payload into those of another, which have as many bytes.
void CopyRuns(std::span<const std::span<const std::byte>> from,
              std::span<const std::span<std::byte>> to) {
  std::size_t run = 0;
  std::size_t at = 0;
  for (std::span<const std::byte> bytes : from) {
    while (!bytes.empty()) {
      CHECK(run < to.size(), "a landing shorter than its payload");
      const std::size_t count = std::min(bytes.size(), to[run].size() - at);
      std::copy_n(bytes.data(), count, to[run].data() + at);
      bytes = bytes.subspan(count);
      at += count;
      if (at == to[run].size()) {
        ++run;
        at = 0;
      }
    }
  }
}

Payload CopyOf(const Payload& payload) {
  if (payload.empty()) return {};
  auto bytes = std::make_shared<std::vector<std::byte>>(payload.bytes());
  const std::span<std::byte> whole(*bytes);
  CopyRuns(payload.runs(), {&whole, 1});
  Payload copy(bytes, std::span<const std::byte>(whole));
  copy.set_owned_alone();
  return copy;
}

}  // namespace

class SimTransport : public Transport {
 public:
  SimTransport(SimHub& hub, std::size_t endpoint) : hub_(hub), endpoint_(endpoint) {}
  ~SimTransport() override { hub_.Close(endpoint_); }
  SimTransport(const SimTransport&) = delete;
  SimTransport& operator=(const SimTransport&) = delete;

  SendId Send(NodeId to, Message message, std::function<void()> sent) override {
    // As a socket would: the bytes are no longer needed.
    message.payload = CopyOf(message.payload);
    if (sent) sent();
    hub_.Send(endpoint_, to, std::move(message));
    return 0;
  }
  Revoked Revoke(NodeId /*to*/, SendId /*id*/) override { return Revoked::kSent; }
  void Flush() override {}
  bool RunOne(std::chrono::steady_clock::time_point /*until*/) override { return false; }
  void Interrupt() override {}
  std::string address() const override { return hub_.AddressOf(endpoint_); }
  void SetSelf(NodeId self) override { hub_.SetSelf(endpoint_, self); }
  bool Rename(NodeId from, NodeId to) override { return hub_.Rename(endpoint_, from, to); }
  void Connect(NodeId peer, const std::string& address,
               std::chrono::steady_clock::time_point deadline,
               const std::function<bool()>& given_up) override {
    hub_.Connect(endpoint_, peer, address, deadline, given_up);
  }
  void Disconnect(NodeId peer) override { hub_.Disconnect(endpoint_, peer); }
  void Close() override { hub_.Close(endpoint_); }

 private:
  SimHub& hub_;
  const std::size_t endpoint_;
};

SimHub::SimHub(std::uint64_t seed, const SimFaults& faults)
    : faults_(faults), random_(seed), thread_([this] { RunThread(); }) {}

SimHub::~SimHub() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

std::unique_ptr<Transport> SimHub::MakeTransport(const SimEndpointOptions& options,
                                                 TransportEvents& events) {
  MutexLock lock(mutex_);
  if (!options.address.empty() && FindLocked(options.address)) {
    throw NetworkError(fmt::format("{}: the address is in use", options.address));
  }
  const std::size_t index = endpoints_.size();
  auto endpoint = std::make_unique<Endpoint>();
  endpoint->options = options;
  endpoint->events = &events;
  if (options.address.empty()) endpoint->options.address = fmt::format("sim:{}", index);
  endpoints_.push_back(std::move(endpoint));
  changed_.NotifyAll();
  return std::make_unique<SimTransport>(*this, index);
}

std::optional<std::size_t> SimHub::FindLocked(const std::string& address) {
  for (std::size_t i = 0; i < endpoints_.size(); ++i) {
    const Endpoint& endpoint = *endpoints_[i];
    if (endpoint.events != nullptr && !endpoint.cut && endpoint.options.address == address) {
      return i;
    }
  }
  return std::nullopt;
}

std::map<NodeId, SimHub::Peer>::iterator SimHub::PeerOf(Endpoint& endpoint,
                                                        std::uint64_t connection) {
  return std::find_if(endpoint.peers.begin(), endpoint.peers.end(),
                      [&](const auto& entry) { return entry.second.connection == connection; });
}

std::string SimHub::AddressOf(std::size_t at) {
  MutexLock lock(mutex_);
  return endpoints_[at]->options.address;
}

void SimHub::SetSelf(std::size_t at, NodeId self) {
  MutexLock lock(mutex_);
  endpoints_[at]->options.self = self;
}

bool SimHub::Rename(std::size_t at, NodeId from, NodeId to) {
  MutexLock lock(mutex_);
  auto& peers = endpoints_[at]->peers;
  if (!peers.contains(from) || peers.contains(to)) return false;
  auto node = peers.extract(from);
  node.key() = to;
  peers.insert(std::move(node));
  return true;
}

void SimHub::Connect(std::size_t from, NodeId peer, const std::string& address,
                     std::chrono::steady_clock::time_point deadline,
                     const std::function<bool()>& given_up) {
  using Clock = std::chrono::steady_clock;
  const auto listens = [&]() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (!FindLocked(address)) {
      changed_.WaitUntil(mutex_, std::min(deadline, Clock::now() + kGivenUpAsked));
    }
    return FindLocked(address).has_value();
  };
  while (!listens()) {
    if (given_up && given_up()) {
      throw NetworkError(
          fmt::format("connect to {} at {}: it was given up", ToString(peer), address));
    }
    if (Clock::now() >= deadline) {
      throw TimeoutError(
          fmt::format("connect to {} at {}: nobody listens there", ToString(peer), address));
    }
  }
  MutexLock lock(mutex_);
  const std::optional<std::size_t> found = FindLocked(address);
  if (!found) {
    throw NetworkError(
        fmt::format("connect to {} at {}: it listens no more", ToString(peer), address));
  }
  Endpoint& self = *endpoints_[from];
  Endpoint& other = *endpoints_[*found];
  if (self.cut || self.events == nullptr) {
    throw NetworkError(
        fmt::format("connect to {} at {}: this node is off the network", ToString(peer), address));
  }
  NodeId name = self.options.self;
  if (other.options.peers_are_provisional || name.rank < 0) name.rank = --other.provisional;
  if (self.peers.contains(peer) || other.peers.contains(name)) {
    throw NetworkError(fmt::format("connect to {} at {}: {} is connected already", ToString(peer),
                                   address, ToString(name)));
  }
  const std::uint64_t connection = ++connections_;
  self.peers[peer] = {.endpoint = *found, .connection = connection};
  other.peers[name] = {.endpoint = from, .connection = connection, .last_due = now_};
  under_way_.emplace(now_, Delivery{.kind = Delivery::Kind::kConnected,
                                    .to = *found,
                                    .connection = connection,
                                    .from = name,
                                    .address = self.options.address,
                                    .incarnation = self.options.incarnation});
  changed_.NotifyAll();
}

void SimHub::Send(std::size_t from, NodeId to, Message message) {
  MutexLock lock(mutex_);
  Endpoint& self = *endpoints_[from];
  const auto peer = self.peers.find(to);
  if (peer == self.peers.end()) return;
  Endpoint& other = *endpoints_[peer->second.endpoint];
  const auto there = PeerOf(other, peer->second.connection);
  if (there == other.peers.end()) return;
  const auto span = static_cast<std::uint64_t>((faults_.delay_max - faults_.delay_min).count());
  const Time due = now_ + faults_.delay_min + Time(random_.Below(span + 1));
  there->second.last_due = std::max(there->second.last_due, due);
  under_way_.emplace(due, Delivery{.kind = Delivery::Kind::kMessage,
                                   .to = peer->second.endpoint,
                                   .connection = peer->second.connection,
                                   .from = {},
                                   .address = {},
                                   .message = std::move(message)});
  changed_.NotifyAll();
}

void SimHub::TellLostLocked(std::size_t from, const Peer& peer, const std::string& why) {
  Endpoint& other = *endpoints_[peer.endpoint];
  const auto there = PeerOf(other, peer.connection);
  if (there == other.peers.end()) return;
  under_way_.emplace(std::max(now_, there->second.last_due),
                     Delivery{.kind = Delivery::Kind::kLost,
                              .to = peer.endpoint,
                              .connection = peer.connection,
                              .from = {},
                              .address = endpoints_[from]->options.address,
                              .why = why});
  changed_.NotifyAll();
}

void SimHub::Disconnect(std::size_t at, NodeId peer) {
  MutexLock lock(mutex_);
  auto& peers = endpoints_[at]->peers;
  const auto found = peers.find(peer);
  if (found == peers.end()) return;
  TellLostLocked(at, found->second, "it closed the connection");
  peers.erase(found);
}

void SimHub::Close(std::size_t at) {
  MutexLock lock(mutex_);
  Endpoint& endpoint = *endpoints_[at];
  for (const auto& [name, peer] : endpoint.peers) {
    TellLostLocked(at, peer, "it closed the connection");
  }
  endpoint.peers.clear();
  endpoint.events = nullptr;
  while (calling_ == at) changed_.Wait(mutex_);
}

void SimHub::Cut(const std::string& address) {
  MutexLock lock(mutex_);
  const std::optional<std::size_t> found = FindLocked(address);
  if (!found) return;
  Endpoint& endpoint = *endpoints_[*found];
  endpoint.cut = true;
  const std::string why = "the connection was cut";
  for (auto& [name, peer] : endpoint.peers) {
    const std::uint64_t connection = peer.connection;
    std::erase_if(under_way_, [&](const auto& entry) {
      return entry.second.connection == connection && entry.second.kind == Delivery::Kind::kMessage;
    });
    Endpoint& other = *endpoints_[peer.endpoint];
    const auto there = PeerOf(other, connection);
    if (there != other.peers.end()) {
      there->second.last_due = now_;
      TellLostLocked(peer.endpoint, {.endpoint = *found, .connection = connection}, why);
    }
    peer.last_due = now_;
    TellLostLocked(*found, peer, why);
  }
}

void SimHub::RunThread() {
  while (true) {
    Delivery delivery;
    bool end_turn = false;
    std::vector<std::size_t> open;  // turns that end since nothing is under way
    {
      MutexLock lock(mutex_);
      while (under_way_.empty() && !stopping_) {
        for (std::size_t i = 0; i < endpoints_.size(); ++i) {
          if (std::exchange(endpoints_[i]->turn_open, false)) open.push_back(i);
        }
        if (!open.empty()) break;
        changed_.Wait(mutex_);
      }
      if (stopping_) return;
      if (open.empty()) {
        const auto first = under_way_.begin();
        now_ = std::max(now_, first->first);
        delivery = std::move(first->second);
        under_way_.erase(first);
        endpoints_[delivery.to]->turn_open = true;
        end_turn = random_.Chance(250);
        if (end_turn) endpoints_[delivery.to]->turn_open = false;
      }
    }
    for (const std::size_t at : open) EndTurn(at);
    if (!open.empty()) continue;
    const std::size_t to = delivery.to;
    Deliver(std::move(delivery));
    if (end_turn) EndTurn(to);
  }
}

void SimHub::EndTurn(std::size_t at) {
  Call(at, [](TransportEvents& events) { events.OnTurnEnd(); });
}

void SimHub::Call(std::size_t at, const std::function<void(TransportEvents&)>& call) {
  TransportEvents* events = nullptr;
  {
    MutexLock lock(mutex_);
    events = endpoints_[at]->events;
    if (events == nullptr) return;
    calling_ = at;
  }
  call(*events);
  MutexLock lock(mutex_);
  calling_.reset();
  changed_.NotifyAll();
}

void SimHub::Deliver(Delivery delivery) {
  {
    MutexLock lock(mutex_);
    Endpoint& endpoint = *endpoints_[delivery.to];
    const auto peer = PeerOf(endpoint, delivery.connection);
    if (peer == endpoint.peers.end()) return;
    delivery.from = peer->first;
    if (delivery.kind == Delivery::Kind::kLost) endpoint.peers.erase(peer);
  }
  Call(delivery.to, [&](TransportEvents& events) {
    if (delivery.kind == Delivery::Kind::kConnected) {
      events.OnConnected(delivery.from, delivery.incarnation, delivery.address);
      return;
    }
    if (delivery.kind == Delivery::Kind::kLost) {
      events.OnLost(delivery.from, delivery.address, delivery.why);
      return;
    }
    Message& message = delivery.message;
    if (const std::uint64_t bytes = message.payload.bytes(); bytes > 0) {
      const Payload payload = std::exchange(message.payload, {});
      const std::shared_ptr<Landing> landing = events.OnHeader(delivery.from, message, bytes);
      if (landing == nullptr) {
        message.payload = payload;
      } else if (landing->BeginRead()) {
        CopyRuns(payload.runs(), landing->runs());
        landing->EndRead();
        message.payload = landing->Finish();
      }
    }
    events.OnMessage(delivery.from, std::move(message));
  });
}

}  // namespace heddle::kvstore::dist
