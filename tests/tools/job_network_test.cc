// Jobs over networks that are not loopback: several hosts, delay, loss, little bandwidth, links
// that are cut, hosts with two interfaces, IPv6; and the token from a file. Method: real processes
// in network namespaces (test_network.h), whose results are checked by the workers' program.
// Skipped, with a message, where the machine does not allow namespaces.
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kvstore/support.h"
#include "tests/tools/job_processes.h"
#include "tools/testing/temp_folder.h"
#include "tools/testing/test_network.h"

namespace heddle::tools {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using Process = JobProcesses::Process;
using std::chrono::milliseconds;
using std::chrono::seconds;

class JobNetwork : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string why_not = TestNetwork::WhyNot();
    if (!why_not.empty()) GTEST_SKIP() << why_not;
    std::ofstream(folder_ / "token") << "from a file\n";
  }
  // The scheduler on host 1, server 0 on host 2, worker 0 on host 3, worker 1 on host 4; they work
  // for `cycles`, or until End.
  JobSpec Spec(TestNetwork& network, const std::string& root_host,
               const std::vector<std::string>& more = {}, const std::string& cycles = "") {
    std::vector<std::string> environment = {"HEDDLE_ROOT_HOST=" + root_host, "HEDDLE_TOKEN=",
                                            "HEDDLE_TOKEN_FILE=" + (folder_ / "token")};
    environment.insert(environment.end(), more.begin(), more.end());
    return {.num_workers = 2,
            .num_servers = 1,
            .program = {FAULT_PROGRAM, "dist_sync", cycles.empty() ? folder_ / "end" : cycles},
            .environment = environment,
            .prefix = [&network](const std::string& role, int rank) {
              return network.On(role == "scheduler" ? 1 : role == "server" ? 2 : 3 + rank);
            }};
  }
  void End() { std::ofstream(folder_ / "end") << "end\n"; }
  void ExpectSuccess(JobProcesses& job) {
    EXPECT_TRUE(job.WaitForEnd(Clock::now() + kForever));
    for (const Process& process : job.processes()) EXPECT_EQ(process.status, 0) << process.name;
    if (HasFailure()) ADD_FAILURE() << job.Describe().substr(0, 20'000);
  }
  void WaitForWork(JobProcesses& job) {
    for (const char* const worker : {"worker 0", "worker 1"}) {
      ASSERT_TRUE(job.WaitForOutput(job.Find(worker), "joined", Clock::now() + kForever))
          << job.Describe();
    }
  }
  // What a process says of itself and the others when asked.
  std::string StateOf(JobProcesses& job, const std::string& name, const std::string& word) {
    Process& process = job.Find(name);
    EXPECT_TRUE(job.WaitUntil(Clock::now() + kForever, [&] {
      process.program->Signal(SIGUSR1);
      return process.Output().find(word) != std::string::npos;
    }));
    return process.Output();
  }

  const std::uint64_t seed_ = kvstore_test::TestSeed();
  std::mt19937_64 random_{seed_};
  const TempFolder folder_;
};

TEST_F(JobNetwork, HostsFarApartThatLoseFrames) {
  TestNetwork network(4, 1, {.delay = milliseconds(5), .loss = 0.01}, seed_);
  JobProcesses job(Spec(network, "10.77.0.1", {}, "2"), random_);
  ExpectSuccess(job);
  EXPECT_GT(network.frames_lost(), 0u);
}

// What waits for such a link waits behind one another, heartbeats too; what its queue does not take
// is sent again.
TEST_F(JobNetwork, HostsBehindSlowLinks) {
  TestNetwork network(4, 1, {.bits_per_second = 20e6, .queue_bytes = 32 << 10}, seed_);
  JobProcesses job(Spec(network, "10.77.0.1", {}, "2"), random_);
  ExpectSuccess(job);
  EXPECT_GT(network.frames_lost(), 0u);
}

TEST_F(JobNetwork, AddressesOfVersion6) {
  TestNetwork network(4, 1, {}, seed_);
  JobProcesses job(Spec(network, "fd00:77::1"), random_);
  WaitForWork(job);
  EXPECT_THAT(StateOf(job, "scheduler", "server 0 ("), HasSubstr("server 0 ([fd00:77::2]:"));
  End();
  ExpectSuccess(job);
}

// The scheduler is reached over network 0; the server listens on the interface that it is told.
TEST_F(JobNetwork, AHostWithTwoInterfaces) {
  for (const char* const variable : {"DMLC_INTERFACE", "HEDDLE_INTERFACE"}) {
    TestNetwork network(4, 2, {}, seed_);
    JobSpec spec = Spec(network, "10.77.0.1");
    spec.prefix = [&network, variable](const std::string& role, int rank) {
      std::vector<std::string> prefix = network.On(role == "scheduler" ? 1
                                                   : role == "server"  ? 2
                                                                       : 3 + rank);
      if (role == "server") {
        prefix.insert(prefix.end(), {"/usr/bin/env", std::string(variable) + "=eth1"});
      }
      return prefix;
    };
    JobProcesses job(spec, random_);
    WaitForWork(job);
    EXPECT_THAT(StateOf(job, "scheduler", "server 0 ("), HasSubstr("server 0 (10.77.1.2:"))
        << variable;
    End();
    ExpectSuccess(job);
    std::filesystem::remove(folder_ / "end");
  }
}

// Shorter than the heartbeats allow: whatever was under way comes later, once.
TEST_F(JobNetwork, ALinkThatIsCutForAWhile) {
  TestNetwork network(4, 1, {}, seed_);
  JobProcesses job(Spec(network, "10.77.0.1", {"HEDDLE_DEAD_AFTER=20"}), random_);
  WaitForWork(job);
  for (const int host : {4, 2}) {  // a worker's, the server's
    network.Cut(host, true);
    EXPECT_FALSE(job.WaitUntil(Clock::now() + milliseconds(1200),
                               [&] { return job.Find("worker 0").status.has_value(); }));
    network.Cut(host, false);
  }
  End();
  ExpectSuccess(job);
}

// Longer: the host's process is named by those that go on without it, and itself names what it
// cannot reach.
TEST_F(JobNetwork, ALinkThatStaysCutNamesTheDead) {
  TestNetwork network(4, 1, {}, seed_);
  JobProcesses job(Spec(network, "10.77.0.1", {"HEDDLE_HEARTBEAT_MS=300", "HEDDLE_DEAD_AFTER=10"}),
                   random_);
  WaitForWork(job);
  network.Cut(4, true);
  EXPECT_TRUE(job.WaitForEnd(Clock::now() + kForever));
  for (const Process& process : job.processes()) EXPECT_NE(process.status, 0) << process.name;
  for (const char* const name : {"scheduler", "server 0", "worker 0"}) {
    EXPECT_THAT(job.Find(name).Output(), ContainsRegex("worker 1 (at |\\()10.77.0.4:")) << name;
  }
  EXPECT_THAT(job.Find("worker 1").Output(), ContainsRegex("scheduler (at |\\()10.77.0.1:"));
  if (HasFailure()) ADD_FAILURE() << job.Describe().substr(0, 20'000);
}

}  // namespace
}  // namespace heddle::tools
