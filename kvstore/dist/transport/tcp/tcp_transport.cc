#include "kvstore/dist/transport/tcp/tcp_transport.h"

#include <heddle/error.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include <boost/asio/post.hpp>
#include <fmt/format.h>

#include "base/log.h"
#include "base/mutex.h"
#include "kvstore/dist/protocol/words.h"
#include "kvstore/dist/transport/tcp/connector.h"
#include "kvstore/dist/transport/tcp/tcp_transport_impl.h"

namespace heddle::kvstore::dist {
namespace {

using boost::system::error_code;

// When one connection of a peer has ended in order, the other one follows within this.
constexpr std::chrono::seconds kOtherLinkTime{1};
// How long a peer that this node has disconnected from may take to close its end.
constexpr std::chrono::seconds kLingerTime{5};
constexpr std::chrono::seconds kCloseTime{1};
// A connection can be cut so that only the accepting end is told, by a firewall that has forgotten
// it for example. Who has connected notices when it says something, so it does.
constexpr int kWordsPerCutLimit = 4;

}  // namespace

TcpTransportImpl::TcpTransportImpl(TcpOptions options, TransportEvents& events)
    : options_(std::move(options)),
      events_(events),
      pool_(BufferPool::Create(options_.pool_bytes_max)),
      tls_(options_.tls.enabled() ? std::make_unique<TlsContext>(options_.tls) : nullptr),
      self_(options_.self) {
  const int count = options_.reception == Reception::kThread ? std::max(options_.io_threads, 1) : 1;
  for (int i = 0; i < count; ++i) {
    reactors_.push_back(std::make_unique<Reactor>(
        Reactor::Options{.reception = options_.reception,
                         .spin = options_.spin,
                         .owner = this,
                         .cpu = options_.io_cpu < 0 ? -1 : options_.io_cpu + i,
                         .flush = [this] {
                           events_.OnTurnEnd();
                           TcpTransportImpl::Flush();
                         }}));
  }
  if (!options_.listen) return;
  acceptor_ = std::make_unique<Acceptor>(
      *reactors_[0], options_, tls_.get(),
      Acceptor::Callbacks{.identity = [this] { return identity(); },
                          .admit =
                              [this](const HelloBody& hello, const std::string& address,
                                     Channel& channel, const Acceptor::Welcome& welcome) {
                                return Admit(hello, address, channel, welcome);
                              }});
}

Identity TcpTransportImpl::identity() const {
  MutexLock lock(peers_mutex_);
  return {.node = self_,
          .incarnation = options_.incarnation,
          .job_id = options_.job_id,
          .token = options_.token};
}

// ---- Sending

TcpTransportImpl::PeerPtr TcpTransportImpl::Find(NodeId id) const {
  MutexLock lock(peers_mutex_);
  const auto found = peers_.find(id);
  return found == peers_.end() ? nullptr : found->second;
}

std::shared_ptr<Connection> TcpTransportImpl::LinkFor(NodeId to, bool bulk) const {
  MutexLock lock(peers_mutex_);
  const auto found = peers_.find(to);
  if (found == peers_.end()) return nullptr;
  const auto& links = found->second->links;
  const std::size_t wanted = IndexOf(bulk ? Link::kBulk : Link::kUrgent);
  return links[wanted] != nullptr ? links[wanted] : links[1 - wanted];
}

// The lowest bit of an id says which link was wanted.
Transport::SendId TcpTransportImpl::Send(NodeId to, Message message, std::function<void()> sent) {
  const bool bulk = message.body_bytes() > kUrgentBytesMax;
  const SendId id =
      next_send_.fetch_add(1, std::memory_order_relaxed) * 2 + static_cast<SendId>(bulk);
  const std::shared_ptr<Connection> link = LinkFor(to, bulk);
  if (link == nullptr) {
    message.payload = {};
    if (sent) sent();
    return id;
  }
  counts_.messages_sent.fetch_add(1, std::memory_order_relaxed);
  const bool now = !reactors_[0]->FlushesSoon();
  if (link->Send(id, std::move(message), std::move(sent), now)) LeaveWaiting(link);
  return id;
}

void TcpTransportImpl::SendTogether(std::span<Outgoing> messages) {
  static_assert(kCopiedMax <= kUrgentBytesMax);
  const std::shared_ptr<Connection> link = LinkFor(messages.front().to, /*bulk=*/false);
  if (link == nullptr) return;
  counts_.messages_sent.fetch_add(messages.size(), std::memory_order_relaxed);
  if (link->SendTogether(messages, !reactors_[0]->FlushesSoon())) LeaveWaiting(link);
}

void TcpTransportImpl::LeaveWaiting(const std::shared_ptr<Connection>& link) {
  {
    MutexLock lock(waiting_mutex_);
    waiting_.push_back(link);
    anything_waits_.store(true, std::memory_order_seq_cst);
  }
  // Whoever was to flush may have looked just before.
  if (!reactors_[0]->FlushesSoon()) Flush();
}

void TcpTransportImpl::Raise(NodeId to, SendId id, std::int32_t priority) {
  const std::shared_ptr<Connection> link = LinkFor(to, id % 2 != 0);
  if (link != nullptr) link->Raise(id, priority);
}

Revoked TcpTransportImpl::Revoke(NodeId to, SendId id) {
  const std::shared_ptr<Connection> link = LinkFor(to, id % 2 != 0);
  return link == nullptr ? Revoked::kSent : link->Revoke(id);
}

void TcpTransportImpl::Flush() {
  if (!anything_waits_.load(std::memory_order_seq_cst)) return;
  std::vector<std::shared_ptr<Connection>> waiting;
  {
    MutexLock lock(waiting_mutex_);
    waiting.swap(waiting_);
    anything_waits_.store(false, std::memory_order_relaxed);
  }
  for (const auto& link : waiting) link->Flush();
  waiting.clear();
  MutexLock lock(waiting_mutex_);
  if (waiting_.capacity() == 0) waiting_.swap(waiting);  // its memory serves again
}

bool TcpTransportImpl::RunOne(Clock::time_point until) { return reactors_[0]->RunOne(until); }

void TcpTransportImpl::TakeArrived() {
  if (reactors_[0]->TryOne()) events_.OnTurnEnd();
}

void TcpTransportImpl::Interrupt() { reactors_[0]->Interrupt(); }

// ---- Peers that come

std::string TcpTransportImpl::address() const {
  return acceptor_ == nullptr ? std::string() : acceptor_->address();
}

void TcpTransportImpl::SetSelf(NodeId self) {
  MutexLock lock(peers_mutex_);
  self_ = self;
}

bool TcpTransportImpl::Rename(NodeId from, NodeId to) {
  MutexLock lock(peers_mutex_);
  const auto found = peers_.find(from);
  if (found == peers_.end() || peers_.contains(to)) return false;
  PeerPtr peer = found->second;
  peers_.erase(found);
  peer->id.store(to, std::memory_order_release);
  peers_.emplace(to, std::move(peer));
  return true;
}

std::string TcpTransportImpl::FindPlace(const HelloBody& hello, const std::string& address,
                                        PeerPtr* peer, Place* place) {
  if (closing_.load(std::memory_order_acquire)) return "this node is closing";
  const bool provisional = options_.peers_are_provisional || hello.node.rank < 0;
  // The other connection of a process that is connected already?
  for (const auto& [id, known] : peers_) {
    if (known->role != hello.node.role || known->incarnation != hello.incarnation) continue;
    if (!provisional && id.rank >= 0 && id.rank != hello.node.rank) continue;
    const auto& link = known->links[IndexOf(hello.link)];
    // If the peer has not heard the welcome, it does not know that the connection was there.
    if (link != nullptr && link->can_resume() && !known->dialled &&
        (hello.resumes || link->received() == 0)) {
      *peer = known;
      *place = Place::kOfACut;
      return {};
    }
    if (hello.resumes) break;
    if (link != nullptr) {
      return fmt::format("{} has this connection already, from {}", ToString(id), known->address);
    }
    *peer = known;
    *place = Place::kNewLink;
    return {};
  }
  if (hello.resumes) return "the connection that was cut is not known here any more";
  const NodeId id = provisional ? NodeId{hello.node.role, next_provisional_} : hello.node;
  const auto same = peers_.find(id);
  if (same != peers_.end()) {
    return fmt::format(
        "{} is connected already, from {}, and is another process (incarnations "
        "{:016x} and {:016x})",
        ToString(id), same->second->address, same->second->incarnation, hello.incarnation);
  }
  if (provisional) --next_provisional_;
  *peer = std::make_shared<Peer>(NextReactor(), id, hello.incarnation, address, false);
  *place = Place::kNewPeer;
  return {};
}

std::optional<Channel> TcpTransportImpl::ShareMemory(const HelloBody& hello,
                                                     const std::string& address) const {
  if (!options_.shared_memory || hello.meeting == MeetingName{}) return std::nullopt;
  try {
    return MeetAt(hello.meeting, Connection::RingBytesOf(hello.link));
  } catch (const NetworkError& error) {
    Log(LogLevel::kDebug, "{} at {}: without shared memory: {}", ToString(hello.node), address,
        error.what());
    return std::nullopt;
  }
}

std::string TcpTransportImpl::Admit(const HelloBody& hello, const std::string& address,
                                    Channel& channel, const Acceptor::Welcome& welcome) {
  std::optional<Channel> shared = ShareMemory(hello, address);
  PeerPtr peer;
  Place place{};
  std::shared_ptr<Connection> connection;
  {
    MutexLock lock(peers_mutex_);
    std::string why = FindPlace(hello, address, &peer, &place);
    if (!why.empty()) return why;
    if (place == Place::kOfACut) {
      PostTakeUp(peer, hello, std::move(channel), welcome);
      return {};
    }
    // Before anybody can send on it.
    channel.told_reset =
        !Say(channel.socket.get(), channel.tls.get(), welcome({.shares = shared.has_value()}));
    // It has not heard that memory is shared. What goes through that is not resumed: as if it had
    // not been here, it comes anew.
    if (shared && channel.told_reset) return {};
    if (shared) channel = *std::move(shared);
    connection = MakeConnection(peer, std::move(channel), hello.link);
    peer->attempts[IndexOf(hello.link)].store(hello.attempt, std::memory_order_relaxed);
    if (place == Place::kNewPeer) {
      peers_.emplace(peer->id.load(std::memory_order_relaxed), peer);
      open_.push_back(peer);
    }
  }
  if (place == Place::kNewPeer) {
    events_.OnConnected(peer->id.load(std::memory_order_acquire), peer->incarnation, peer->address);
  }
  Start(peer, hello.link, connection);
  return {};
}

// The number tells connections of peers apart whose rank is not known yet.
std::unique_ptr<WireCapture> TcpTransportImpl::MakeCapture(const Peer& peer, Link link) {
  if (options_.capture.empty()) return nullptr;
  const NodeId id = peer.id.load(std::memory_order_acquire);
  return std::make_unique<WireCapture>(fmt::format(
      "{}.{}-{}{}-{}", options_.capture, next_capture_.fetch_add(1, std::memory_order_relaxed),
      RoleName(id.role), id.rank >= 0 ? std::to_string(id.rank) : "",
      link == Link::kBulk ? "bulk" : "urgent"));
}

std::shared_ptr<Connection> TcpTransportImpl::MakeConnection(const PeerPtr& peer, Channel channel,
                                                             Link link) {
  auto connection =
      std::make_shared<Connection>(peer->reactor, std::move(channel), link, pool_, options_.limits,
                                   counts_, MakeCapture(*peer, link));
  peer->links[IndexOf(link)] = connection;
  return connection;
}

// Its handlers, which know the peer, end with Close.
void TcpTransportImpl::Start(const PeerPtr& peer, Link link,
                             const std::shared_ptr<Connection>& connection) {
  const auto id = [peer] { return peer->id.load(std::memory_order_acquire); };
  connection->Start(
      {.sink = {.land = [this, id](
                            const Message& header,
                            std::uint64_t bytes) { return events_.OnHeader(id(), header, bytes); },
                .deliver =
                    [this, id](Message&& message) {
                      events_.OnMessage(id(), std::move(message));
                      return true;
                    }},
       .ended = [this, peer](bool clean, const std::string& why) { LinkEnded(peer, clean, why); },
       .cut = [this, peer, link](const std::string& why) { LinkCut(peer, link, why); },
       .between_reads =
           [this, peer, connection = connection.get()] {
             const std::shared_ptr<Connection> urgent = LinksOf(peer)[IndexOf(Link::kUrgent)];
             if (urgent == nullptr || urgent.get() == connection) return;
             urgent->Poll();
             Flush();
           }});
  if (connection->can_resume()) connection->ExpectConfirmations(options_.confirm_limit);
}

// ---- Peers that go

void TcpTransportImpl::LinkEnded(const PeerPtr& peer, bool clean, const std::string& why) {
  int links = 0;
  for (const auto& link : LinksOf(peer)) links += link != nullptr ? 1 : 0;
  if (clean && ++peer->links_ended < links && !peer->any_cut()) {
    WaitAtMost(peer, kOtherLinkTime, why);
  } else {
    Lose(peer, why);
  }
}

void TcpTransportImpl::WaitAtMost(const PeerPtr& peer, std::chrono::seconds time,
                                  const std::string& why) {
  peer->patience.expires_after(time);
  peer->patience.async_wait([this, peer, why](const error_code& aborted) {
    peer->reactor.Awake();
    if (!aborted) Lose(peer, why);
  });
}

void TcpTransportImpl::Lose(const PeerPtr& peer, const std::string& why) {
  if (peer->lost.exchange(true, std::memory_order_relaxed)) return;
  peer->patience.cancel();
  for (auto& limit : peer->cut_limits) limit.cancel();
  const auto links = LinksOf(peer);
  for (const auto& link : links) {
    if (link != nullptr) link->Poll();  // what had arrived before
  }
  for (const auto& link : links) {
    if (link != nullptr) link->Close();
  }
  NodeId id;
  {
    MutexLock lock(peers_mutex_);
    id = peer->id.load(std::memory_order_relaxed);
    const auto found = peers_.find(id);
    if (found != peers_.end() && found->second == peer) peers_.erase(found);
  }
  if (!peer->disconnected.load(std::memory_order_acquire)) {
    events_.OnLost(id, peer->address, why);
  }
  MutexLock lock(peers_mutex_);
  peer->links = {};  // they know the peer: P1
  std::erase(open_, peer);
}

void TcpTransportImpl::Connect(NodeId peer_id, const std::string& address,
                               Clock::time_point deadline, const std::function<bool()>& given_up) {
  const auto check_open = [&] {
    if (!closing_.load(std::memory_order_acquire)) return;
    throw NetworkError(
        fmt::format("connect to {} at {}: this node is closing", ToString(peer_id), address));
  };
  check_open();
  if (Find(peer_id) != nullptr) {
    throw InvalidState(
        fmt::format("connect to {} at {}: it is connected", ToString(peer_id), address));
  }
  std::array<std::atomic<std::uint32_t>, kLinks> attempts{};
  ConnectTarget target{
      .peer = peer_id,
      .address = address,
      .deadline = deadline,
      .cancelled =
          [&] { return closing_.load(std::memory_order_acquire) || (given_up && given_up()); },
      .attempts = &attempts[IndexOf(Link::kUrgent)],
      .shared_memory = options_.shared_memory,
      .tls = tls_.get()};
  const Identity self = identity();
  Connected urgent = ConnectTo(target, self, Link::kUrgent);
  std::optional<Connected> bulk;
  target.attempts = &attempts[IndexOf(Link::kBulk)];
  if (options_.bulk_link) bulk = ConnectTo(target, self, Link::kBulk);
  std::vector<std::pair<Link, std::shared_ptr<Connection>>> connections;
  const auto peer =
      std::make_shared<Peer>(NextReactor(), peer_id, urgent.incarnation, address, true);
  for (std::size_t i = 0; i < kLinks; ++i) peer->attempts[i].store(attempts[i].load());
  bool refused = false;
  {
    MutexLock lock(peers_mutex_);
    refused = closing_.load(std::memory_order_acquire) || !peers_.emplace(peer_id, peer).second;
    if (!refused) {
      open_.push_back(peer);
      const auto make = [&](Channel& channel, Link link) REQUIRES(peers_mutex_) {
        connections.emplace_back(link, MakeConnection(peer, std::move(channel), link));
      };
      make(urgent.channel, Link::kUrgent);
      if (bulk) make(bulk->channel, Link::kBulk);
    }
  }
  if (refused) {
    check_open();
    throw InvalidState(
        fmt::format("connect to {} at {}: connected meanwhile", ToString(peer_id), address));
  }
  for (const auto& [link, connection] : connections) {
    Start(peer, link, connection);
    if (connection->can_resume()) connection->SpeakEvery(options_.cut_limit / kWordsPerCutLimit);
  }
}

void TcpTransportImpl::Disconnect(NodeId peer_id) {
  PeerPtr peer;
  std::array<std::shared_ptr<Connection>, kLinks> links;
  {
    MutexLock lock(peers_mutex_);
    const auto found = peers_.find(peer_id);
    if (found == peers_.end()) return;
    peer = found->second;
    links = peer->links;
    peers_.erase(found);
    peer->disconnected.store(true, std::memory_order_release);
  }
  for (const auto& link : links) {
    if (link != nullptr) link->FinishSending();
  }
  boost::asio::post(peer->reactor.context(), [this, peer] {
    peer->reactor.Awake();
    if (peer->lost) return;
    if (peer->any_cut()) return Lose(peer, "");  // nothing can be told to it
    WaitAtMost(peer, kLingerTime, "it did not close its end");
  });
}

void TcpTransportImpl::Close() {
  MutexLock close_lock(close_mutex_);
  if (std::exchange(closed_, true)) return;
  closing_.store(true, std::memory_order_release);
  std::vector<NodeId> ids;
  {
    MutexLock lock(peers_mutex_);
    for (const auto& [id, peer] : peers_) ids.push_back(id);
  }
  for (const NodeId id : ids) Disconnect(id);
  redialer_.Stop();
  for (const auto& reactor : reactors_) reactor->Stop();
  const auto open = [this] {
    MutexLock lock(peers_mutex_);
    return open_;
  };
  // From here on nothing runs but on this thread.
  const auto until = Clock::now() + kCloseTime;
  while (!open().empty() && Clock::now() < until) {
    for (const auto& reactor : reactors_) {
      reactor->RunStopped(Clock::now() + std::chrono::milliseconds(1));
    }
  }
  for (const PeerPtr& peer : open()) Lose(peer, "");  // disconnected from: no event
  if (acceptor_ != nullptr) acceptor_->Close();
  {
    MutexLock lock(waiting_mutex_);
    waiting_.clear();
  }
  // The handlers that all this has ended know what ends with this object.
  for (const auto& reactor : reactors_) reactor->RunStopped(Clock::now());
}

TcpStats TcpTransportImpl::stats() const {
  const auto get = [](const std::atomic<std::uint64_t>& count) {
    return count.load(std::memory_order_relaxed);
  };
  return {.messages_sent = get(counts_.messages_sent),
          .bytes_sent = get(counts_.bytes_sent),
          .writes = get(counts_.writes),
          .messages_received = get(counts_.messages_received),
          .bytes_received = get(counts_.bytes_received),
          .reads = get(counts_.reads),
          .strangers_refused = acceptor_ == nullptr ? 0 : acceptor_->refused()};
}

std::unique_ptr<TcpTransport> TcpTransport::Create(TcpOptions options, TransportEvents& events) {
  return std::make_unique<TcpTransportImpl>(std::move(options), events);
}

}  // namespace heddle::kvstore::dist
