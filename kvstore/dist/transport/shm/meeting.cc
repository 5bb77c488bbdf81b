#include "kvstore/dist/transport/shm/meeting.h"

#include <heddle/error.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <openssl/rand.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "base/check.h"
#include "kvstore/dist/transport/shm/fail.h"

namespace heddle::kvstore::dist {
namespace {

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

// The memory, the accepting side's bell, the connecting one's.
using Fds = std::array<int, 3>;

// A message of one byte that carries descriptors, or has room for them.
struct Parcel {
  Parcel() {
    message.msg_iov = &run;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
  }

  char byte = 'm';
  iovec run{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(Fds))] = {};
  msghdr message{};
};

void SendFds(int socket, const Fds& fds) {
  Parcel parcel;
  cmsghdr* const header = CMSG_FIRSTHDR(&parcel.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof fds);
  std::memcpy(CMSG_DATA(header), fds.data(), sizeof fds);
  if (sendmsg(socket, &parcel.message, MSG_NOSIGNAL | MSG_DONTWAIT) != 1) {
    Fail("send shared memory", errno);
  }
}

std::vector<UniqueFd> ReceiveFds(int socket) {
  Parcel parcel;
  const ssize_t bytes = recvmsg(socket, &parcel.message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (bytes < 0) Fail("receive shared memory", errno);
  std::vector<UniqueFd> received;  // the buffer may have room for one more than Fds
  const cmsghdr* const header = CMSG_FIRSTHDR(&parcel.message);
  if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof fd, sizeof fd);
      received.emplace_back(fd);
    }
  }
  if (received.size() != std::tuple_size_v<Fds> || (parcel.message.msg_flags & MSG_CTRUNC) != 0) {
    throw NetworkError("receive shared memory: not the descriptors that were expected");
  }
  return received;
}

UniqueFd NewBell() {
  UniqueFd bell(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (bell.get() < 0) Fail("make an eventfd", errno);
  return bell;
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
  std::vector<UniqueFd> fds = ReceiveFds(channel.socket.get());
  channel.rings = SharedRings::Take(fds[0]);
  channel.peer_bell = std::move(fds[1]);
  channel.own_bell = std::move(fds[2]);
  return channel;
}

Channel MeetAt(const MeetingName& name, std::size_t ring_bytes) {
  Channel channel{.socket = NewSocket()};
  const UnixAddress address(name);
  if (connect(channel.socket.get(), address.get(), address.length) != 0) {
    Fail("meet at a Unix socket", errno);
  }
  if (!PeerIsOfThisUser(channel.socket.get())) throw NetworkError("it is of another user");
  UniqueFd memory;
  channel.rings = SharedRings::Make(ring_bytes, &memory);
  channel.own_bell = NewBell();
  channel.peer_bell = NewBell();
  SendFds(channel.socket.get(), {memory.get(), channel.own_bell.get(), channel.peer_bell.get()});
  return channel;
}

}  // namespace heddle::kvstore::dist
