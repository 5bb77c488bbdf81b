// Connections of peers that are cut: who has connected connects again, and both go on.
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include <boost/asio/post.hpp>
#include <fmt/format.h>

#include "base/log.h"
#include "base/mutex.h"
#include "kvstore/dist/protocol/words.h"
#include "kvstore/dist/transport/tcp/connector.h"
#include "kvstore/dist/transport/tcp/tcp_transport_impl.h"

namespace heddle::kvstore::dist {

using boost::system::error_code;

void TcpTransportImpl::LinkCut(const PeerPtr& peer, Link link, const std::string& why) {
  if (peer->lost.load(std::memory_order_relaxed)) return;
  const auto now = Clock::now();
  const auto connection = LinksOf(peer)[IndexOf(link)];
  const auto since = peer->cuts[IndexOf(link)].Cut(now, connection->progress(), connection->idle(),
                                                   options_.cut_limit);
  const auto until = since + options_.cut_limit;
  if (peer->disconnected.load(std::memory_order_acquire) || peer->links_ended > 0 || now >= until) {
    return Lose(peer, why);
  }
  NoteCut(*peer, why);
  auto& limit = peer->cut_limits[IndexOf(link)];
  limit.expires_at(until);
  limit.async_wait([this, peer, link, why](const error_code& aborted) {
    peer->reactor.Awake();
    if (aborted || !peer->cuts[IndexOf(link)].cut()) return;
    Lose(peer, fmt::format("{}, and it was not connected again for {}", why,
                           InSeconds(options_.cut_limit)));
  });
  if (peer->dialled) Redial(peer, link, until, why);
}

void TcpTransportImpl::NoteCut(const Peer& peer, const std::string& why) {
  MutexLock lock(cut_log_mutex_);
  const auto left_out = cut_log_limit_.Take(Clock::now());
  if (!left_out) return;
  Log(LogLevel::kWarning, "a connection with {} at {} was cut: {}; it is made again{}",
      ToString(peer.id.load(std::memory_order_acquire)), peer.address, why,
      *left_out > 0 ? fmt::format(" (so were {} more)", *left_out) : "");
}

void TcpTransportImpl::Redial(const PeerPtr& peer, Link link, Clock::time_point deadline,
                              const std::string& why) {
  const std::uint64_t received = LinksOf(peer)[IndexOf(link)]->received();
  const auto dial = [this, peer, link, deadline, why, received, self = identity()] {
    const ConnectTarget target{
        .peer = peer->id.load(std::memory_order_acquire),
        .address = peer->address,
        .deadline = deadline,
        .cancelled =
            [&] {
              return closing_.load(std::memory_order_acquire) ||
                     peer->lost.load(std::memory_order_relaxed);
            },
        .attempts = &peer->attempts[IndexOf(link)],
        .shared_memory = false,
        .tls = tls_.get(),
        .cut = ConnectTarget::Cut{.incarnation = peer->incarnation, .received = received}};
    const auto connected = std::make_shared<Connected>();
    std::string wrong;
    try {
      *connected = ConnectTo(target, self, link);
    } catch (const std::exception& error) {
      wrong = fmt::format("{}, then {}", why, error.what());
    }
    boost::asio::post(peer->reactor.context(), [this, peer, link, connected, wrong] {
      peer->reactor.Awake();
      if (!wrong.empty()) return Lose(peer, wrong);
      Resume(peer, link, std::move(connected->channel), connected->received);
    });
  };
  try {
    redialer_.Start(dial);
  } catch (const std::exception& error) {
    Lose(peer, fmt::format("{}, then it could not be connected again: {}", why, error.what()));
  }
}

void TcpTransportImpl::PostTakeUp(const PeerPtr& peer, const HelloBody& hello, Channel channel,
                                  const Acceptor::Welcome& welcome) {
  const auto taken = std::make_shared<Channel>(std::move(channel));
  boost::asio::post(peer->reactor.context(), [this, peer, hello, welcome, taken] {
    peer->reactor.Awake();
    TakeUp(peer, hello, *taken, welcome);
  });
}

void TcpTransportImpl::TakeUp(const PeerPtr& peer, const HelloBody& hello, Channel& channel,
                              const Acceptor::Welcome& welcome) {
  const auto connection = LinksOf(peer)[IndexOf(hello.link)];
  // It closes without a word; when the peer comes again it is told.
  if (connection == nullptr || peer->disconnected.load(std::memory_order_acquire)) return;
  // The peer has given this one up, and goes on with another.
  auto& attempts = peer->attempts[IndexOf(hello.link)];
  if (hello.attempt <= attempts.load(std::memory_order_relaxed)) return;
  attempts.store(hello.attempt, std::memory_order_relaxed);
  connection->Cut();
  channel.told_reset =
      !Say(channel.socket.get(), channel.tls.get(), welcome({.received = connection->received()}));
  Resume(peer, hello.link, std::move(channel), hello.received);
}

void TcpTransportImpl::Resume(const PeerPtr& peer, Link link, Channel channel,
                              std::uint64_t received) {
  const auto connection = LinksOf(peer)[IndexOf(link)];
  if (connection == nullptr || peer->lost.load(std::memory_order_relaxed)) return;
  peer->cuts[IndexOf(link)].Resumed(Clock::now());
  peer->cut_limits[IndexOf(link)].cancel();
  if (!connection->Resume(std::move(channel), received, MakeCapture(*peer, link))) {
    Lose(peer, "it says that it has received what was not sent to it");
  }
}

}  // namespace heddle::kvstore::dist
