// The connecting end: finds, connects, and passes the handshake, on the calling thread.
#pragma once

#include <chrono>
#include <functional>
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
  bool shared_memory = true;        // with a peer on this host
  const TlsContext* tls = nullptr;  // null: none
};

// A connected channel behind its handshake. As long as nobody listens, or the listener vanishes, it
// tries again. InvalidArgument for an address that is none; NetworkError if the peer refuses, or is
// not who is wanted, or if TLS fails; TimeoutError at the deadline, with what was seen last; all
// name peer and address.
Channel ConnectTo(const ConnectTarget& target, const Identity& self, Link link, HelloBody* peer);

}  // namespace heddle::kvstore::dist
