// Goal: a job whose connections are reset at any byte computes what it would have computed, and one
// whose servers are lost says why (docs/distributed.md, When a part dies). Method: whole jobs in
// one process, each connection of which goes through a proxy that cuts it. The values are whole
// numbers, which add up exactly in any order, so that anything lost or applied twice shows.
#include <heddle/error.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvstore/dist/transport/transport.h"
#include "tests/kvstore/dist/cutting_proxy.h"
#include "tests/kvstore/dist/forwarding_transport.h"
#include "tests/kvstore/dist/job.h"

namespace heddle::kvstore::dist {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kWorkers = 2;
constexpr int kRounds = 20;

class CutJobs : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, CutJobs, ::testing::Values("dist_sync", "dist_async"),
                         [](const auto& info) { return info.param; });

TEST_P(CutJobs, LoseAndDoubleNothing) {
  const bool sync = GetParam() == std::string("dist_sync");
  std::atomic<int> cuts = 0;
  std::atomic<std::uint64_t> seed = kvstore_test::TestSeed();
  {
    Job job({.network = Network::kTcp,
             .num_workers = kWorkers,
             .num_servers = 2,
             .wrap = [&](std::unique_ptr<Transport> transport) {
               return dist_test::ThroughProxies(
                   std::move(transport),
                   {.seed = seed.fetch_add(1000), .bytes_max = 600'000, .count = 30}, cuts);
             }});
    job.RunWorkers(GetParam(), [&](int rank, KVStore& store, Engine& engine) {
      if (!sync) store.SetOptimizer(MakeOptimizer("sgd", {{"learning_rate", 1.0}}));
      const std::vector<std::int64_t> counts = {10, 3000, 20'000, 200'000};
      const auto filled = [&](std::int64_t count, float value) {
        return NDArray::Full({count}, value, DType::kFloat32, Cpu(), engine);
      };
      for (const std::int64_t count : counts) store.Init(count, filled(count, 5));
      for (int round = 1; round <= kRounds; ++round) {
        for (const std::int64_t count : counts) {
          store.Push(count, filled(count, static_cast<float>(rank + round)));
          NDArray out({count}, DType::kFloat32, Cpu(), engine);
          store.Pull(count, out);
          out.WaitToRead();
          if (!sync) continue;
          EXPECT_EQ(out.ToVector<float>(), std::vector<float>(static_cast<std::size_t>(count),
                                                              static_cast<float>(2 * round + 1)));
        }
      }
      store.Barrier();
      if (sync) return;
      // 5, and all pushes of both ranks subtracted
      constexpr int kPushed = kRounds * (kRounds + 1) + kRounds;
      for (const std::int64_t count : counts) {
        NDArray out({count}, DType::kFloat32, Cpu(), engine);
        store.Pull(count, out);
        EXPECT_EQ(out.ToVector<float>(),
                  std::vector<float>(static_cast<std::size_t>(count), 5.0f - kPushed));
      }
    });
  }
  EXPECT_GE(cuts, 10);
}

// Heartbeats, which go to the scheduler, tell that a server is alive that takes in all it is sent;
// no word of it arrives, as if it confirmed nothing. Only that can end the wait.
TEST(MuteServers, AreLostAndTheStoreSaysWhy) {
  std::atomic<int> cuts = 0;
  std::atomic<bool> mute = false;
  Job job({.network = Network::kTcp,
           .op_deadline = std::chrono::minutes(2),
           .wrap =
               [&](std::unique_ptr<Transport> transport) {
                 return dist_test::ThroughProxies(std::move(transport), {.servers_are_mute = &mute},
                                                  cuts);
               },
           .confirm_limit = std::chrono::milliseconds(400),
           .fails = true});
  job.RunWorkers("dist_sync", [&](int /*rank*/, KVStore& store, Engine& engine) {
    constexpr std::int64_t kCount = 1 << 20;
    NDArray values = NDArray::Full({kCount}, 1, DType::kFloat32, Cpu(), engine);
    store.Init("weight", values);
    mute = true;
    store.Push("weight", values);
    try {
      store.Pull("weight", values);
      values.WaitToRead();
      ADD_FAILURE() << "a value came from a server that says nothing";
    } catch (const NetworkError& error) {
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr("'weight'"), HasSubstr("server 0 (127.0.0.1:"),
                        HasSubstr("it is alive, but has confirmed nothing for 0.4 s of what was "
                                  "sent to it")));
    }
  });
}

// A worker comes to a server after another worker has ended the job.
class Refused final : public ForwardingTransport {
 public:
  Refused(std::unique_ptr<Transport> transport, std::latch& refused)
      : ForwardingTransport(std::move(transport)), refused_(refused) {}

  void Connect(NodeId peer, const std::string& address,
               std::chrono::steady_clock::time_point deadline,
               const std::function<bool()>& given_up) override {
    if (peer.role != Role::kServer) {
      return ForwardingTransport::Connect(peer, address, deadline, given_up);
    }
    refused_.count_down();
    throw NetworkError("it refused: this node is closing");
  }

 private:
  std::latch& refused_;
};

// It has not heard of that yet: the scheduler tells it a moment later than the server's refusal.
TEST(GoneServers, AreNotTakenForTheCauseByAWorkerThatComesToThem) {
  std::latch refused(1);
  std::atomic<int> made = 0;
  Job job({.num_workers = 2,
           .wrap = [&](std::unique_ptr<Transport> transport) -> std::unique_ptr<Transport> {
             const bool is_of_first_worker =
                 ++made == 3;  // behind the scheduler's and the server's
             if (!is_of_first_worker) return transport;
             return std::make_unique<Refused>(std::move(transport), refused);
           },
           .fails = true});
  std::atomic<int> told = 0;
  std::vector<std::thread> workers;
  for (int rank = 0; rank < 2; ++rank) {
    workers.emplace_back([&, rank] {
      try {
        const auto node = job.Join(rank);
        refused.wait();
        node->Fail("out of luck");
      } catch (const NetworkError& error) {
        EXPECT_THAT(error.what(), HasSubstr("out of luck"));
        ++told;
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  EXPECT_EQ(told, 1);
}

// docs/security.md: a minute by default, twenty times what heartbeats may take.
TEST(MuteServers, AreGivenTwentyTimesAsLongAsHeartbeats) {
  DistOptions options;
  options.role = DistRole::kWorker;
  EXPECT_EQ(TcpOptionsOf(options).confirm_limit, std::chrono::minutes(1));
  options.dead_after = 5;
  options.heartbeat_interval = std::chrono::milliseconds(10);
  EXPECT_EQ(TcpOptionsOf(options).confirm_limit, std::chrono::seconds(1));
}

}  // namespace
}  // namespace heddle::kvstore::dist
