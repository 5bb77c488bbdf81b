// The connecting end: finds, connects, and passes the handshake, on the calling thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/transport/tcp/channel.h"
#include "kvstore/dist/transport/tcp/handshake.h"

namespace heddle::kvstore::dist {

struct ConnectTarget {
  NodeId peer;
  std::string address;  // "host:port", "[v6]:port"
  std::chrono::steady_clock::time_point deadline;
  // True once nobody wants the connection any more.
  std::function<bool()> cancelled;
  // Counts the attempts to make this connection.
  std::atomic<std::uint32_t>* attempts;
  bool shared_memory = true;        // with a peer on this host
  const TlsContext* tls = nullptr;  // null: none

  // Of a connection that was cut: which process it was to, and how many of its messages came.
  struct Cut {
    Incarnation incarnation;
    std::uint64_t received;
  };
  std::optional<Cut> cut = std::nullopt;
};

struct Connected {
  Channel channel;
  Incarnation incarnation = 0;  // of the peer
  std::uint64_t received = 0;   // messages of this end, before the cut
};

// A connected channel behind its handshake. As long as nobody listens, or the listener vanishes, or
// this process has no descriptor left, it tries again; after a cut a listener that is not there any
// more is an error at once, and so is another process. InvalidArgument for an address that is none;
// NetworkError if the peer refuses, or is not who is wanted, or if TLS fails; TimeoutError at the
// deadline, with what was seen last; all name peer and address.
Connected ConnectTo(const ConnectTarget& target, const Identity& self, Link link);

}  // namespace heddle::kvstore::dist
