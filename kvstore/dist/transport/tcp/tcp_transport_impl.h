// The inside of the TCP transport: its peers, and what happens to their connections.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/log_limit.h"
#include "base/mutex.h"
#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/transport/tcp/acceptor.h"
#include "kvstore/dist/transport/tcp/buffer_pool.h"
#include "kvstore/dist/transport/tcp/channel.h"
#include "kvstore/dist/transport/tcp/connection.h"
#include "kvstore/dist/transport/tcp/handshake.h"
#include "kvstore/dist/transport/tcp/reactor.h"
#include "kvstore/dist/transport/tcp/redialer.h"
#include "kvstore/dist/transport/tcp/tcp_peer.h"
#include "kvstore/dist/transport/tcp/tcp_transport.h"
#include "kvstore/dist/transport/tcp/tls.h"
#include "kvstore/dist/transport/tcp/wire_capture.h"

namespace heddle::kvstore::dist {

class TcpTransportImpl final : public TcpTransport {
 public:
  TcpTransportImpl(TcpOptions options, TransportEvents& events);
  ~TcpTransportImpl() override { TcpTransportImpl::Close(); }

  SendId Send(NodeId to, Message message, std::function<void()> sent) override;
  void SendTogether(std::span<Outgoing> messages) override;
  void Raise(NodeId to, SendId id, std::int32_t priority) override;
  Revoked Revoke(NodeId to, SendId id) override;
  void Flush() override;
  bool RunOne(std::chrono::steady_clock::time_point until) override;
  void TakeArrived() override;
  void Interrupt() override;
  std::string address() const override;
  void SetSelf(NodeId self) override;
  bool Rename(NodeId from, NodeId to) override;
  void Connect(NodeId peer, const std::string& address,
               std::chrono::steady_clock::time_point deadline,
               const std::function<bool()>& given_up) override;
  void Disconnect(NodeId peer) override;
  void Close() override;
  TcpStats stats() const override;

 private:
  using Clock = std::chrono::steady_clock;
  using PeerPtr = std::shared_ptr<Peer>;

  // Lines of the log about cuts.
  static constexpr int kCutLinesMax = 20;
  static constexpr std::chrono::seconds kCutLinesPeriod{10};

  Identity identity() const;
  std::string Admit(const HelloBody& hello, const std::string& address, Channel& channel,
                    const Acceptor::Welcome& welcome);
  // Through shared memory, if the peer is on this host and both ends want it.
  std::optional<Channel> ShareMemory(const HelloBody& hello, const std::string& address) const;
  enum class Place { kNewPeer, kNewLink, kOfACut };
  std::string FindPlace(const HelloBody& hello, const std::string& address, PeerPtr* peer,
                        Place* place) REQUIRES(peers_mutex_);
  Reactor& NextReactor() { return *reactors_[next_reactor_++ % reactors_.size()]; }
  std::unique_ptr<WireCapture> MakeCapture(const Peer& peer, Link link);
  std::shared_ptr<Connection> MakeConnection(const PeerPtr& peer, Channel channel, Link link)
      REQUIRES(peers_mutex_);
  void Start(const PeerPtr& peer, Link link, const std::shared_ptr<Connection>& connection);
  std::array<std::shared_ptr<Connection>, kLinks> LinksOf(const PeerPtr& peer) const
      EXCLUDES(peers_mutex_) {
    MutexLock lock(peers_mutex_);
    return peer->links;
  }
  PeerPtr Find(NodeId id) const EXCLUDES(peers_mutex_);
  std::shared_ptr<Connection> LinkFor(NodeId to, bool bulk) const EXCLUDES(peers_mutex_);
  // Of a connection that has begun to wait for company.
  void LeaveWaiting(const std::shared_ptr<Connection>& link) EXCLUDES(waiting_mutex_);

  // In the peer's reactor. Cuts, in tcp_transport_cuts.cc:
  void LinkCut(const PeerPtr& peer, Link link, const std::string& why);
  void NoteCut(const Peer& peer, const std::string& why) EXCLUDES(cut_log_mutex_);
  void Redial(const PeerPtr& peer, Link link, Clock::time_point deadline, const std::string& why);
  void PostTakeUp(const PeerPtr& peer, const HelloBody& hello, Channel channel,
                  const Acceptor::Welcome& welcome);
  void TakeUp(const PeerPtr& peer, const HelloBody& hello, Channel& channel,
              const Acceptor::Welcome& welcome);
  void Resume(const PeerPtr& peer, Link link, Channel channel, std::uint64_t received);
  // Peers that go:
  void LinkEnded(const PeerPtr& peer, bool clean, const std::string& why);
  void Lose(const PeerPtr& peer, const std::string& why);
  void WaitAtMost(const PeerPtr& peer, std::chrono::seconds time, const std::string& why);

  const TcpOptions options_;
  TransportEvents& events_;
  const std::shared_ptr<BufferPool> pool_;
  const std::unique_ptr<const TlsContext> tls_;  // null: none
  TcpCounts counts_;
  std::atomic<SendId> next_send_{1};
  std::atomic<int> next_capture_{0};
  std::atomic<bool> closing_{false};

  // Connections with small messages that wait for company. Whoever adds one flushes it, unless
  // somebody else surely does (Reactor::FlushesSoon).
  Mutex waiting_mutex_;
  std::vector<std::shared_ptr<Connection>> waiting_ GUARDED_BY(waiting_mutex_);
  std::atomic<bool> anything_waits_{false};

  Mutex close_mutex_;
  bool closed_ GUARDED_BY(close_mutex_) = false;

  // Declared before what runs in them.
  std::vector<std::unique_ptr<Reactor>> reactors_;
  std::atomic<std::size_t> next_reactor_{0};

  mutable Mutex peers_mutex_;
  NodeId self_ GUARDED_BY(peers_mutex_);
  std::int32_t next_provisional_ GUARDED_BY(peers_mutex_) = -2;
  std::unordered_map<NodeId, PeerPtr> peers_ GUARDED_BY(peers_mutex_);
  std::vector<PeerPtr> open_ GUARDED_BY(peers_mutex_);  // also those disconnected from

  Mutex cut_log_mutex_;
  LogLimit cut_log_limit_ GUARDED_BY(cut_log_mutex_){kCutLinesMax, kCutLinesPeriod};

  std::unique_ptr<Acceptor> acceptor_;
  Redialer redialer_;
};

}  // namespace heddle::kvstore::dist
