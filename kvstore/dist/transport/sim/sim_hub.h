// A network in one process for nodes with threads: many transports, and one thread that carries
// their messages.
//
// Each message takes a time of its own, drawn from the seed, in a virtual time that stands still
// while nothing is under way: messages overtake one another as much as the delays allow, and no run
// takes longer for it. As transport.h promises, none is lost or doubled while both ends are
// connected; Cut ends connections for good, as a pulled cable would.
//
// Threads: all methods, any thread. All events of all transports come from the hub's own thread,
// one at a time, with no lock held; RunOne therefore never leads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/protocol/message.h"
#include "kvstore/dist/transport/sim/sim_network.h"
#include "kvstore/dist/transport/transport.h"

namespace heddle::kvstore::dist {

struct SimEndpointOptions {
  NodeId self;  // rank -1: not known yet
  Incarnation incarnation = 0;
  std::string address;  // where it listens; empty: one of the hub's choice, "sim:3"
  // Peers that connect are provisional (Transport::Rename), whatever rank they say they have.
  bool peers_are_provisional = false;
};

// Outlives its transports.
class SimHub {
 public:
  // Of `faults` only the delays count.
  explicit SimHub(std::uint64_t seed, const SimFaults& faults = {});
  ~SimHub();
  SimHub(const SimHub&) = delete;
  SimHub& operator=(const SimHub&) = delete;

  // `events` outlives the transport. NetworkError if the address is taken.
  std::unique_ptr<Transport> MakeTransport(const SimEndpointOptions& options,
                                           TransportEvents& events) EXCLUDES(mutex_);
  // The process at `address` is off the network: all its connections are lost, on both sides, with
  // what is under way on them, and nothing connects to it any more.
  void Cut(const std::string& address) EXCLUDES(mutex_);

 private:
  friend class SimTransport;

  // What an endpoint knows of a peer.
  struct Peer {
    std::size_t endpoint = 0;      // the other end
    std::uint64_t connection = 0;  // the same number on both sides
    Time last_due{0};              // when the last message from there is due here
  };
  struct Endpoint {
    SimEndpointOptions options;
    TransportEvents* events = nullptr;  // null: closed
    std::int32_t provisional = -1;      // the last rank given to a peer without one
    bool cut = false;
    bool turn_open = false;  // has had events since its last OnTurnEnd
    std::map<NodeId, Peer> peers;
  };
  struct Delivery {
    enum class Kind : std::uint8_t { kConnected, kMessage, kLost };
    Kind kind = Kind::kMessage;
    std::size_t to = 0;
    std::uint64_t connection = 0;
    NodeId from;          // of kConnected and kLost: what the peer is called
    std::string address;  // likewise, of the peer
    Incarnation incarnation = 0;
    Message message{};
    std::string why{};
  };

  // For SimTransport.
  void Send(std::size_t from, NodeId to, Message message) EXCLUDES(mutex_);
  void Connect(std::size_t from, NodeId peer, const std::string& address,
               std::chrono::steady_clock::time_point deadline,
               const std::function<bool()>& given_up) EXCLUDES(mutex_);
  bool Rename(std::size_t at, NodeId from, NodeId to) EXCLUDES(mutex_);
  void SetSelf(std::size_t at, NodeId self) EXCLUDES(mutex_);
  void Disconnect(std::size_t at, NodeId peer) EXCLUDES(mutex_);
  void Close(std::size_t at) EXCLUDES(mutex_);
  std::string AddressOf(std::size_t at) EXCLUDES(mutex_);

  std::optional<std::size_t> FindLocked(const std::string& address) REQUIRES(mutex_);
  static std::map<NodeId, Peer>::iterator PeerOf(Endpoint& endpoint, std::uint64_t connection);
  // The other end hears of the loss, after all that was sent to it.
  void TellLostLocked(std::size_t from, const Peer& peer, const std::string& why) REQUIRES(mutex_);
  void RunThread() EXCLUDES(mutex_);
  void Deliver(Delivery delivery) EXCLUDES(mutex_);
  void EndTurn(std::size_t at) EXCLUDES(mutex_);
  // Calls the endpoint's events without the lock; Close waits for the end of it.
  void Call(std::size_t at, const std::function<void(TransportEvents&)>& call) EXCLUDES(mutex_);

  const SimFaults faults_;
  Mutex mutex_;
  CondVar changed_;
  SimRandom random_ GUARDED_BY(mutex_);
  Time now_ GUARDED_BY(mutex_){0};
  std::multimap<Time, Delivery> under_way_ GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Endpoint>> endpoints_ GUARDED_BY(mutex_);
  std::uint64_t connections_ GUARDED_BY(mutex_) = 0;  // made so far
  std::optional<std::size_t> calling_ GUARDED_BY(mutex_);
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace heddle::kvstore::dist
