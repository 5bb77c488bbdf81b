// A socket without a transport: says and hears bytes.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "kvstore/dist/protocol/message.h"
#include "kvstore/dist/protocol/wire.h"
#include "kvstore/dist/transport/tcp/handshake.h"

namespace heddle::kvstore::dist_test {

using namespace dist;  // NOLINT(google-build-using-namespace)

class PlainSocket {
 public:
  // Comes from 127.0.0.`from`.
  explicit PlainSocket(const std::string& address, int from = 1)
      : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in self{};
    self.sin_family = AF_INET;
    self.sin_addr.s_addr = htonl(INADDR_LOOPBACK - 1 + static_cast<std::uint32_t>(from));
    EXPECT_EQ(bind(fd_, reinterpret_cast<const sockaddr*>(&self), sizeof self), 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to.sin_port =
        htons(static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
    EXPECT_EQ(connect(fd_, reinterpret_cast<const sockaddr*>(&to), sizeof to), 0);
  }
  ~PlainSocket() { close(fd_); }
  PlainSocket(const PlainSocket&) = delete;
  PlainSocket& operator=(const PlainSocket&) = delete;

  void Say(std::string_view text) {
    while (!text.empty()) {
      const ssize_t bytes = send(fd_, text.data(), text.size(), MSG_NOSIGNAL);
      if (bytes <= 0) return;  // it has closed already
      text.remove_prefix(static_cast<std::size_t>(bytes));
    }
  }
  // At most `bytes`; fewer when the other side has closed. Fails after a minute.
  std::string Hear(std::size_t bytes) {
    std::string heard;
    std::array<char, 4096> buffer;
    while (heard.size() < bytes) {
      pollfd wait{.fd = fd_, .events = POLLIN, .revents = 0};
      if (poll(&wait, 1, 60'000) != 1) {
        ADD_FAILURE() << "no answer and no end";
        return heard;
      }
      const ssize_t got =
          recv(fd_, buffer.data(), std::min(buffer.size(), bytes - heard.size()), 0);
      if (got <= 0) return heard;
      heard.append(buffer.data(), static_cast<std::size_t>(got));
    }
    return heard;
  }
  std::string HearAll() { return Hear(std::string::npos); }
  int fd() const { return fd_; }
  // The end of the connection will be a reset, after which the system keeps nothing of it.
  void EndWithReset() {
    const linger now{.l_onoff = 1, .l_linger = 0};
    setsockopt(fd_, SOL_SOCKET, SO_LINGER, &now, sizeof now);
  }

  // As a worker of the job; leaves the connection behind a right handshake.
  void ShakeHands(std::int32_t rank, const std::string& job, Link link = Link::kUrgent,
                  const std::string& token = "") {
    Handshake handshake = Handshake::Connecting(
        {.node = {Role::kWorker, rank}, .incarnation = 5u + rank, .job_id = job, .token = token},
        link);
    Say(handshake.Start());
    while (handshake.wanted() > 0) {
      const std::string heard = Hear(handshake.wanted());
      ASSERT_FALSE(heard.empty());
      Say(handshake.Feed(std::as_bytes(std::span(heard))));
    }
    ASSERT_EQ(handshake.state(), Handshake::State::kDone) << handshake.why();
  }

 private:
  const int fd_;
};

inline std::string Preamble() {
  const auto preamble = EncodePreamble();
  return {reinterpret_cast<const char*>(preamble.data()), preamble.size()};
}

inline std::string HeaderOf(const Message& message) {
  std::array<std::byte, kHeaderBytes> header;
  EncodeHeader(message, header);
  return {reinterpret_cast<const char*>(header.data()), header.size()};
}

}  // namespace heddle::kvstore::dist_test
