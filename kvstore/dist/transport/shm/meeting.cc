#include "kvstore/dist/transport/shm/meeting.h"

#include <heddle/error.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <openssl/rand.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "base/check.h"

namespace heddle::kvstore::dist {
namespace {

[[noreturn]] void Fail(const char* what, int error) {
  throw NetworkError(fmt::format("{}: {}", what, std::generic_category().message(error)));
}

struct UnixAddress {
  explicit UnixAddress(const MeetingName& name) {
    std::string text(1, '\0');  // abstract
    text += "heddle-";
    for (const std::byte byte : name) text += fmt::format("{:02x}", static_cast<unsigned>(byte));
    address.sun_family = AF_UNIX;
    static_assert(8 + 2 * sizeof(MeetingName) <= sizeof address.sun_path);
    std::copy(text.begin(), text.end(), address.sun_path);
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + text.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }

  sockaddr_un address{};
  socklen_t length = 0;
};

UniqueFd NewSocket() {
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (fd.get() < 0) Fail("make a Unix socket", errno);
  return fd;
}

bool PeerIsOfThisUser(int fd) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}

// A message of one byte that carries a descriptor, or has room for one.
struct Parcel {
  Parcel() {
    message.msg_iov = &run;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
  }

  char byte = 'm';
  iovec run{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
};

void SendFd(int socket, int fd) {
  Parcel parcel;
  cmsghdr* const header = CMSG_FIRSTHDR(&parcel.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  if (sendmsg(socket, &parcel.message, MSG_NOSIGNAL | MSG_DONTWAIT) != 1) {
    Fail("send shared memory", errno);
  }
}

UniqueFd ReceiveFd(int socket) {
  Parcel parcel;
  const ssize_t bytes = recvmsg(socket, &parcel.message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (bytes < 0) Fail("receive shared memory", errno);
  const cmsghdr* const header = CMSG_FIRSTHDR(&parcel.message);
  if (bytes != 1 || header == nullptr || header->cmsg_level != SOL_SOCKET ||
      header->cmsg_type != SCM_RIGHTS || header->cmsg_len != CMSG_LEN(sizeof(int))) {
    throw NetworkError("receive shared memory: there is none");
  }
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
  return UniqueFd(fd);
}

}  // namespace

MeetingPoint::MeetingPoint() : listener_(NewSocket()) {
  CHECK(RAND_bytes(reinterpret_cast<unsigned char*>(name_.data()), sizeof name_) == 1,
        "no random numbers");
  const UnixAddress address(name_);
  if (bind(listener_.get(), address.get(), address.length) != 0 ||
      listen(listener_.get(), 1) != 0) {
    Fail("listen at a Unix socket", errno);
  }
}

Channel MeetingPoint::Take() {
  Channel channel;
  do {
    channel.socket =
        UniqueFd(accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (channel.socket.get() < 0) Fail("meet at a Unix socket", errno);
  } while (!PeerIsOfThisUser(channel.socket.get()));
  channel.rings = SharedRings::Take(ReceiveFd(channel.socket.get()));
  return channel;
}

Channel MeetAt(const MeetingName& name, std::size_t ring_bytes) {
  Channel channel{.socket = NewSocket(), .rings = nullptr};
  const UnixAddress address(name);
  if (connect(channel.socket.get(), address.get(), address.length) != 0) {
    Fail("meet at a Unix socket", errno);
  }
  if (!PeerIsOfThisUser(channel.socket.get())) throw NetworkError("it is of another user");
  UniqueFd memory;
  channel.rings = SharedRings::Make(ring_bytes, &memory);
  SendFd(channel.socket.get(), memory.get());
  return channel;
}

}  // namespace heddle::kvstore::dist
