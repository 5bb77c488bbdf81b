// Ports that the system chooses, on a host of its own that has few of them.
#include <heddle/error.h>

#include <atomic>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvstore/dist/transport/tcp/connector.h"
#include "tests/kvstore/dist/tcp_node.h"
#include "tools/testing/test_network.h"

namespace heddle::kvstore::dist_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class TcpPorts : public testing::Test {
 protected:
  void SetUp() override {
    try {
      network_.emplace(1, 0, tools::TestNetwork::Link{}, 0);
    } catch (const std::runtime_error& error) {
      GTEST_SKIP() << "a network namespace: " << error.what();
    }
  }

  // Runs `body` on a thread of the host whose system chooses among these ports.
  void WithPorts(int first, int last, const std::function<void()>& body) {
    std::thread([&] {
      tools::TestNetwork::Enter(network_->FileOf(1));
      std::ofstream range("/proc/sys/net/ipv4/ip_local_port_range");
      range << first << ' ' << last << std::flush;
      if (range) {
        body();
      } else {
        ADD_FAILURE() << "cannot set the range of ports";
      }
    }).join();
  }

 private:
  std::optional<tools::TestNetwork> network_;
};

// A server that was given the port of the scheduler, which starts after it, kept that one from
// listening.
TEST_F(TcpPorts, AReservedPortIsNotTakenThoughNoOtherIsLeft) {
  WithPorts(40000, 40003, [] {
    dist::TcpOptions options = OptionsOf(kServer0);
    options.reserved_port = 40002;
    std::vector<std::unique_ptr<TcpNode>> nodes;
    for (int i = 0; i < 3; ++i) {
      nodes.push_back(std::make_unique<TcpNode>(options));
      EXPECT_NE(nodes.back()->transport->address(), "127.0.0.1:40002");
    }
    EXPECT_THROW(TcpNode{options}, NetworkError);
    options.port = 40002;
    EXPECT_EQ(TcpNode(options).transport->address(), "127.0.0.1:40002");
  });
}

// A connection to a port where nobody listens came to be with itself, was taken for a process of
// another role, and kept the port from whom it belonged to.
TEST_F(TcpPorts, AConnectionWithItselfIsNone) {
  WithPorts(40000, 40000, [] {
    const dist::Identity self{.node = kWorker0, .incarnation = 1, .job_id = "test", .token = ""};
    std::atomic<std::uint32_t> attempts{0};
    std::atomic<int> looks{0};
    const dist::ConnectTarget target{.peer = kServer0,
                                     .address = "127.0.0.1:40000",
                                     .deadline = Long(),
                                     .cancelled = [&] { return ++looks == 3; },
                                     .attempts = &attempts};
    try {
      dist::ConnectTo(target, self, dist::Link::kUrgent);
      ADD_FAILURE() << "connected";
    } catch (const NetworkError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("server 0 at 127.0.0.1:40000"),
                                      HasSubstr("Connection refused"), Not(HasSubstr("worker"))));
    }
    dist::TcpOptions options = OptionsOf(kServer0);
    options.port = 40000;
    EXPECT_EQ(TcpNode(options).transport->address(), "127.0.0.1:40000");
  });
}

}  // namespace
}  // namespace heddle::kvstore::dist_test
