#include "kvstore/dist/transport/tcp/channel.h"

#include <cerrno>

#include <sys/socket.h>

namespace heddle::kvstore::dist {

Transferred ReadFrom(int socket, TlsStream* tls, const iovec* runs, std::size_t count) {
  if (tls != nullptr) return tls->Read(runs, count);
  const ssize_t bytes = readv(socket, runs, static_cast<int>(count));
  return {bytes, errno};
}

Transferred WriteTo(int socket, TlsStream* tls, iovec* runs, std::size_t count) {
  if (tls != nullptr) return tls->Write(runs, count);
  msghdr header{};
  header.msg_iov = runs;
  header.msg_iovlen = count;
  const ssize_t bytes = sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
  return {bytes, errno};
}

bool Say(int socket, TlsStream* tls, std::string_view text) {
  if (text.empty()) return true;
  // Only read.
  iovec run{const_cast<char*>(text.data()), text.size()};
  return WriteTo(socket, tls, &run, 1).bytes >= 0;
}

}  // namespace heddle::kvstore::dist
