// A peer of the TCP transport, with its connections.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <boost/asio/steady_timer.hpp>

#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/transport/tcp/connection.h"
#include "kvstore/dist/transport/tcp/handshake.h"
#include "kvstore/dist/transport/tcp/reactor.h"

namespace heddle::kvstore::dist {

// Index of a link among those of a peer.
inline constexpr std::size_t kLinks = 2;
constexpr std::size_t IndexOf(Link link) { return link == Link::kBulk ? 0 : 1; }

// Since when a connection is cut. One that is cut again and again, without a message that passes in
// between, is cut all the while; but if none was to pass, a while in between will do.
class CutTime {
 public:
  using Clock = std::chrono::steady_clock;

  bool cut() const { return cut_; }
  // `progress`, `idle`: of the Connection. Returns since when it counts as cut.
  Clock::time_point Cut(Clock::time_point now, std::uint64_t progress, bool idle,
                        std::chrono::milliseconds limit) {
    const auto sound_for = idle ? limit / 8 : limit;
    const bool goes_on = since_ && progress == progress_ && now - resumed_ < sound_for;
    if (!goes_on && !cut_) since_ = now;
    cut_ = true;
    progress_ = progress;
    return *since_;
  }
  void Resumed(Clock::time_point now) {
    cut_ = false;
    resumed_ = now;
  }

 private:
  bool cut_ = false;
  std::optional<Clock::time_point> since_;
  Clock::time_point resumed_;
  std::uint64_t progress_ = 0;
};

// The handlers of its connections run in one reactor, so its events come one after another.
//   (P1) Links are set under the transport's peers_mutex_, and not taken away while the peer is
//        open.
//   (P2) Ended is called once a link; Lose once, when all links have ended, or one has broken, or
//        was cut for too long. After it there are no events of the peer.
struct Peer {
  Peer(Reactor& its_reactor, NodeId node, Incarnation its_incarnation, std::string its_address,
       bool was_dialled)
      : reactor(its_reactor),
        role(node.role),
        incarnation(its_incarnation),
        address(std::move(its_address)),
        dialled(was_dialled),
        id(node),
        patience(its_reactor.context()),
        cut_limits{boost::asio::steady_timer(its_reactor.context()),
                   boost::asio::steady_timer(its_reactor.context())} {}

  bool any_cut() const { return cuts[0].cut() || cuts[1].cut(); }

  Reactor& reactor;
  const Role role;
  const Incarnation incarnation;
  const std::string address;
  const bool dialled;                     // by this node, which dials again after a cut
  std::atomic<NodeId> id;                 // Rename changes it
  std::atomic<bool> disconnected{false};  // by this node: no OnLost
  std::atomic<bool> lost{false};          // set in the reactor
  std::array<std::shared_ptr<Connection>, kLinks> links;
  // To make each connection: of this node if it dials, else the last of the peer's that was heeded.
  std::array<std::atomic<std::uint32_t>, kLinks> attempts{};

  // The reactor's.
  int links_ended = 0;
  boost::asio::steady_timer patience;
  std::array<CutTime, kLinks> cuts;
  std::array<boost::asio::steady_timer, kLinks> cut_limits;
};

}  // namespace heddle::kvstore::dist
