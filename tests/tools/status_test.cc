// `heddle status` of real jobs.
#include <chrono>
#include <csignal>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/tools/child_process.h"
#include "tests/tools/free_port.h"

namespace heddle::tools {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

using Strings = std::vector<std::string>;

constexpr const char* kSecret = "HEDDLE_TOKEN=the secret of the job";

// A job of 2 workers, which push and pull for ever, and a server.
class StatusTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const Strings worker = {WORKER_PROGRAM, "forever"};
    processes_.push_back(Start({HEDDLE_COMMAND, "scheduler"}, {}));
    processes_.push_back(Start({HEDDLE_COMMAND, "server"}, {}));
    for (const char* const rank : {"HEDDLE_RANK=0", "HEDDLE_RANK=1"}) {
      processes_.push_back(Start(worker, {rank}));
    }
    for (const std::size_t i : {2, 3}) ASSERT_EQ(processes_[i]->ReadLine(), "started");
  }

  std::unique_ptr<RunningProgram> Start(const Strings& command, Strings environment) const {
    for (const std::string& entry :
         {std::string("HEDDLE_ROOT_HOST=127.0.0.1"), "HEDDLE_ROOT_PORT=" + port_,
          std::string("HEDDLE_JOB_WORKERS=2"), std::string("HEDDLE_JOB_SERVERS=1"),
          std::string("HEDDLE_HEARTBEAT_MS=50"), std::string("HEDDLE_WARNING_MS=200"),
          // Who stands still is not given up.
          std::string("HEDDLE_DEAD_AFTER=1000"), std::string(kSecret)}) {
      environment.push_back(entry);
    }
    return std::make_unique<RunningProgram>(command, environment);
  }
  ProgramResult Status(const Strings& options, const std::string& secret = kSecret) const {
    Strings command = {HEDDLE_COMMAND, "status", "127.0.0.1:" + port_};
    command.insert(command.end(), options.begin(), options.end());
    return RunProgram(command, {secret});
  }
  // Looks until `done` likes what it sees.
  template <class Done>
  json Await(const Done& done) const {
    json status;
    do {
      const ProgramResult result = Status({"--json"});
      EXPECT_EQ(result.status, 0) << result.output;
      status = json::parse(result.output, nullptr, /*allow_exceptions=*/false);
    } while (!HasFailure() && !done(status));
    return status;
  }
  static json NodeOf(const json& status, const std::string& role, int rank) {
    for (const json& node : status.at("nodes")) {
      if (node.at("role") == role && node.at("rank") == rank) return node;
    }
    ADD_FAILURE() << "no " << role << " " << rank << " in " << status;
    return {};
  }

  const std::string port_ = FreePort();
  std::vector<std::unique_ptr<RunningProgram>> processes_;
};

TEST_F(StatusTest, ShowsWhoIsThereAndWhatTheyDo) {
  const json status = Await([](const json& seen) {
    for (const json& node : seen.at("nodes")) {
      if (node.value("requests_per_second", 0.0) <= 0) return false;
    }
    return true;
  });
  EXPECT_EQ(status.at("phase"), "running");
  EXPECT_EQ(status.at("num_workers"), 2);
  EXPECT_EQ(status.at("nodes").size(), 3u) << "who asks is no part of the job";
  const json server = NodeOf(status, "server", 0);
  EXPECT_GT(server.at("rounds").get<int>(), 0);
  EXPECT_GT(server.at("rounds_per_second").get<double>(), 0);
  EXPECT_GT(server.at("bytes").get<int>(), 0);
  EXPECT_EQ(server.at("presence"), "here");
  EXPECT_LE(NodeOf(status, "worker", 1).at("open_requests").get<int>(), 10) << "it waits for each";
  const ProgramResult text = Status({});
  EXPECT_EQ(text.status, 0);
  EXPECT_THAT(text.output,
              AllOf(HasSubstr("job at 127.0.0.1:" + port_ + ": running"), HasSubstr("worker 0 "),
                    HasSubstr("worker 1 "), HasSubstr("server 0 "), Not(HasSubstr("\033"))));
}

TEST_F(StatusTest, NamesWhatStallsAndWhoIsMissing) {
  processes_[3]->Signal(SIGSTOP);
  const json status = Await(
      [](const json& seen) { return NodeOf(seen, "server", 0).value("stalled_parts", 0) > 0; });
  EXPECT_THAT(NodeOf(status, "server", 0).at("stall").get<std::string>(),
              AllOf(HasSubstr("key 'sum'"), HasSubstr("missing: workers 1")));
  EXPECT_THAT(Status({}).output,
              AllOf(HasSubstr("stalled at server 0"), HasSubstr("missing: workers 1")));
  processes_[3]->Signal(SIGCONT);
  Await([](const json& seen) { return NodeOf(seen, "server", 0).at("stalled_parts") == 0; });
}

TEST_F(StatusTest, OnATerminalItRefreshes) {
  // A terminal of script(1)'s; each look begins by clearing it.
  RunningProgram live(
      {"script", "-qefc",
       std::string(HEDDLE_COMMAND) + " status 127.0.0.1:" + port_ + " --every 0.05", "/dev/null"},
      {kSecret});
  for (int look = 0; look < 3; ++look) {
    EXPECT_THAT(live.ReadUntil("job at"), HasSubstr("\033[2J"));
    EXPECT_THAT(live.ReadUntil("server 0"), HasSubstr("server 0"));
  }
}

TEST_F(StatusTest, AFullDiskIsNamed) {
  const ProgramResult result = RunProgram({"/bin/sh", "-c", "exec \"$@\" > /dev/full", "sh",
                                           HEDDLE_COMMAND, "status", "127.0.0.1:" + port_},
                                          {kSecret});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, AllOf(HasSubstr("No space left on device"), Not(HasSubstr("job"))));
}

TEST_F(StatusTest, WhoDoesNotKnowTheTokenLearnsNothing) {
  for (const char* const wrong : {"HEDDLE_TOKEN=another secret", "HEDDLE_TOKEN="}) {
    const ProgramResult result = Status({"--json", "--timeout", "5"}, wrong);
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output, AllOf(HasSubstr("token"), Not(HasSubstr("secret")),
                                     Not(HasSubstr("running")), Not(HasSubstr("rounds"))));
  }
  EXPECT_EQ(Status({"--json"}).status, 0) << "the job goes on";
}

// A long address touched the next column.
TEST(Status, ColumnsAreAsWideAsWhatIsInThem) {
  const std::string port = FreePort();
  const Strings job = {"HEDDLE_ROOT_HOST=127.0.0.1", "HEDDLE_ROOT_PORT=" + port,
                       "HEDDLE_JOB_WORKERS=1", "HEDDLE_JOB_SERVERS=1", kSecret};
  const std::string name(40, 'n');
  Strings named = job;
  named.insert(named.end(), {"HEDDLE_NODE_HOST=" + name, "HEDDLE_BIND_ADDRESS=127.0.0.1"});
  RunningProgram scheduler({HEDDLE_COMMAND, "scheduler"}, job);
  RunningProgram server({HEDDLE_COMMAND, "server"}, named);
  std::string output;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (output.find(name) == std::string::npos && !HasFailure() &&
         std::chrono::steady_clock::now() < end) {
    const ProgramResult result =
        RunProgram({HEDDLE_COMMAND, "status", "127.0.0.1:" + port}, {kSecret});
    EXPECT_EQ(result.status, 0) << result.output;
    output = result.output;
  }
  EXPECT_THAT(output, ::testing::ContainsRegex("\n +address +heard +requests"));
  EXPECT_THAT(output, ::testing::ContainsRegex("\nserver[ 0-9]* +" + name + ":[0-9]+  here "));
}

TEST(Status, WhereNobodyListensTheAddressIsNamed) {
  const std::string port = FreePort();
  const ProgramResult result =
      RunProgram({HEDDLE_COMMAND, "status", "127.0.0.1:" + port, "--timeout", "0.3"});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("127.0.0.1:" + port));
}

TEST(Status, BadAddressesAreNamed) {
  for (const char* const bad : {"nowhere", "host:", ":80", "host:x", "host:70000"}) {
    const ProgramResult result = RunProgram({HEDDLE_COMMAND, "status", bad});
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output, AllOf(HasSubstr("host:port"), HasSubstr(bad)));
  }
  EXPECT_THAT(RunProgram({HEDDLE_COMMAND, "status"}).output, HasSubstr("HEDDLE_ROOT_HOST"));
}

}  // namespace
}  // namespace heddle::tools
