// What carries the bytes of a connection.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

#include <sys/uio.h>

#include "base/unique_fd.h"
#include "kvstore/dist/transport/shm/shared_rings.h"
#include "kvstore/dist/transport/tcp/tls.h"

namespace heddle::kvstore::dist {

// The bytes go through `rings`, or through `tls`, or through the socket as they are.
struct Channel {
  UniqueFd socket;
  std::unique_ptr<SharedRings> rings{};
  UniqueFd own_bell{}, peer_bell{};  // with rings
  std::unique_ptr<TlsStream> tls{};
  // The socket has told that the connection is reset, which it does once: from now on it looks as
  // if the peer had closed it.
  bool told_reset = false;
};

// As readv and sendmsg on a socket that does not block; `tls` may be null. Of EPROTO the stream
// knows why.
Transferred ReadFrom(int socket, TlsStream* tls, const iovec* runs, std::size_t count);
Transferred WriteTo(int socket, TlsStream* tls, iovec* runs, std::size_t count);

// A few hundred bytes on a new connection: there is room. False: the connection has failed.
bool Say(int socket, TlsStream* tls, std::string_view text);

}  // namespace heddle::kvstore::dist
