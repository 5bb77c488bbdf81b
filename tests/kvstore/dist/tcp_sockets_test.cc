// How the TCP transport sets its sockets up, as the kernel sees them.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/kvstore/dist/tcp_node.h"

namespace heddle::kvstore::dist_test {
namespace {

using testing::Each;
using testing::SizeIs;

// Of all connections over TCP that this process has, both ends if both are its own.
std::vector<int> ConnectedSockets() {
  std::vector<int> sockets;
  for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::atoi(file.path().filename().c_str());
    sockaddr_in peer{};
    socklen_t length = sizeof peer;
    const int got = getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length);
    if (got == 0 && peer.sin_family == AF_INET) sockets.push_back(fd);
  }
  return sockets;
}

std::string CongestionControlOf(int fd) {
  std::array<char, 32> name{};
  socklen_t length = name.size() - 1;
  EXPECT_EQ(getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), &length), 0);
  return name.data();
}

TEST(TcpSockets, NothingPacesConnectionsWithinAHost) {
  constexpr std::string_view kReno = "reno";
  const int socket_of_its_own = socket(AF_INET, SOCK_STREAM, 0);
  const bool allowed =
      setsockopt(socket_of_its_own, IPPROTO_TCP, TCP_CONGESTION, kReno.data(), kReno.size()) == 0;
  close(socket_of_its_own);
  if (!allowed) GTEST_SKIP() << "this system refuses the algorithm";

  dist::TcpOptions over_tcp = OptionsOf(kServer0, Reception::kThread);
  over_tcp.shared_memory = false;
  TcpNode server(over_tcp);
  over_tcp = OptionsOf(kWorker0);
  over_tcp.shared_memory = false;
  TcpNode worker(over_tcp);
  worker.transport->Connect(kServer0, server.transport->address(), Long());
  // Through both connections, so that both ends have them.
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{1} << 20}) {
    worker.transport->Send(kServer0,
                           {.kind = Kind::kPush, .payload = PayloadOf(std::string(bytes, 'x'))});
  }
  worker.transport->Flush();
  ASSERT_TRUE(server.WaitForMessages(2));
  std::vector<std::string> algorithms;
  for (const int fd : ConnectedSockets()) algorithms.push_back(CongestionControlOf(fd));
  EXPECT_THAT(algorithms, SizeIs(4));
  EXPECT_THAT(algorithms, Each(kReno));
}

}  // namespace
}  // namespace heddle::kvstore::dist_test
