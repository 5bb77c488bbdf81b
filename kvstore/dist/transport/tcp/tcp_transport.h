// The transport of production: TCP, by Boost.Asio; shared memory between processes of one host.
//
// Two connections a peer: one for messages of more than 64 KiB, one for all others, so that what is
// urgent or small does not queue behind what is long. On each of them messages leave by priority.
//
// Who does the work: see Reception in reactor.h. Workers receive on the threads that wait
// (kCallersFirst), servers on threads of their own (kThread). What must be answered while those are
// busy (heartbeats) needs a TcpTransport of its own: any number may live in a process.
//
// Cuts. A connection over TCP that is reset, or that the network gives up, is made again, by the
// end that made it before; nothing is lost or doubled by that (connection.h). The peer is lost if
// nobody listens there any more, or another process does; if its process does not know the
// connection; or if it takes longer than cut_limit. So it is if the connection stands, but it does
// not confirm what it was sent, for confirm_limit (confirm_watch.h). What has been Disconnected
// from, or closes, is not connected again; nor is shared memory, which nothing cuts.
//
// Errors: InvalidArgument and NetworkError name address and setting, or file, TimeoutError what was
// waited for. A stranger that does not pass the handshake (handshake.h, before it tls.h) is told
// why and logged; acceptor.h says what it costs. Threads: see transport.h. Locks, in the order in
// which one may be taken under another: peers_, Connection::tx_mutex_; none is held while events,
// owners of payloads or `sent` run.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/protocol/wire.h"
#include "kvstore/dist/transport/tcp/reactor.h"
#include "kvstore/dist/transport/tcp/tls.h"
#include "kvstore/dist/transport/transport.h"

namespace heddle::kvstore::dist {

struct TcpOptions {
  NodeId self;  // rank -1: not known yet
  Incarnation incarnation = 0;
  std::string job_id;
  std::string token;  // empty: peers must have none either, and prove nothing

  TlsOptions tls;

  // Whether others may connect, and where. With `listen_fd` (not -1) it is a socket that listens
  // already, which the transport closes. `port` 0: one that is free, but not `reserved_port`, which
  // somebody else means to listen on.
  bool listen = false;
  std::string bind_address = "127.0.0.1";  // numeric
  std::uint16_t port = 0;
  std::uint16_t reserved_port = 0;
  int listen_fd = -1;
  std::string node_host;  // what address() says; empty: the bind address
  // Where address and port come from, for errors: "root_port 9091 (DMLC_PS_ROOT_PORT)".
  std::string setting;
  // Peers that connect are provisional (Transport::Rename), whatever rank they say they have: for a
  // scheduler, which assigns ranks.
  bool peers_are_provisional = false;

  Reception reception = Reception::kCallersFirst;
  int io_threads = 1;                 // with kThread
  std::chrono::microseconds spin{0};  // to poll the network, yielding, before sleeping
  int io_cpu = -1;                    // the first own thread runs on this CPU, the next on the next

  // Streams are captured in files whose names begin so: "job.wire.0-server0-bulk.sent". Empty: none
  // are.
  std::string capture;

  bool shared_memory = true;  // with peers of this host
  bool bulk_link = true;      // false: one connection a peer that this node connects to
  WireLimits limits;
  std::chrono::milliseconds handshake_limit{10'000};
  // A connection that is cut for so long is the loss of the peer.
  std::chrono::milliseconds cut_limit{3'000};
  // So is a peer that lives, but has not confirmed for so long what it was sent over TCP.
  std::chrono::milliseconds confirm_limit{60'000};
  std::size_t strangers_max = 128;
  std::size_t pool_bytes_max = std::size_t{64} << 20;  // kept for payloads without a landing
};

// Since the start; headers count, handshakes do not.
struct TcpStats {
  std::uint64_t messages_sent = 0;
  std::uint64_t bytes_sent = 0;
  std::uint64_t writes = 0;  // calls to the system
  std::uint64_t messages_received = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t reads = 0;
  std::uint64_t strangers_refused = 0;
};

class TcpTransport : public Transport {
 public:
  // Payloads and their messages up to this use the urgent connection.
  static constexpr std::uint64_t kUrgentBytesMax = 64 << 10;

  // `events` outlives the transport, or its Close.
  static std::unique_ptr<TcpTransport> Create(TcpOptions options, TransportEvents& events);

  virtual TcpStats stats() const = 0;
};

}  // namespace heddle::kvstore::dist
