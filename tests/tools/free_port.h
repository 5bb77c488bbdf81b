// Ports for the processes that a test starts.
#pragma once

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

// A port that nobody uses. Somebody might by the time it is used, which is one in thousands.
inline std::string FreePort() { return Port().number(); }

}  // namespace heddle::tools
