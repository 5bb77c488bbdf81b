// Ports for the processes that a test starts.
#pragma once

#include <random>
#include <string>

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

namespace heddle::tools {

// A TCP socket on a free port of loopback.
class Port {
 public:
  Port() : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof(address);
    EXPECT_EQ(bind(socket_, reinterpret_cast<sockaddr*>(&address), bytes), 0);
    EXPECT_EQ(getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &bytes), 0);
    number_ = ntohs(address.sin_port);
  }
  ~Port() { close(socket_); }
  Port(const Port&) = delete;
  Port& operator=(const Port&) = delete;

  void Listen() const { EXPECT_EQ(listen(socket_, 16), 0); }
  int Accept() const { return accept(socket_, nullptr, nullptr); }
  std::string number() const { return std::to_string(number_); }

 private:
  int socket_;
  int number_;
};

// A port that nobody uses; somebody might by the time it is used, which is one in thousands. It is
// below those that Linux gives to sockets that ask for any, of which a server that starts before
// its scheduler might get the scheduler's.
inline std::string FreePort() {
  static std::mt19937 random{std::random_device{}()};
  std::uniform_int_distribution<int> ports(10'000, 32'000);
  while (true) {
    const int number = ports(random);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<in_port_t>(number));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int probe = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool free = bind(probe, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
    close(probe);
    if (free) return std::to_string(number);
  }
}

}  // namespace heddle::tools
