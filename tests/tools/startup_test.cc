// How the processes of a distributed job fail to start: each ends soon, and says which setting,
// from which variable, with which value, at which address, and what came back.
//
// "Soon" is at once, or at the connect deadline where others may still come, which these tests set
// to a second or two; a process that forgot it would keep to the default of a minute.
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "kvstore/dist/protocol/wire.h"
#include "tests/tools/child_process.h"
#include "tests/tools/free_port.h"
#include "tools/testing/temp_folder.h"

namespace heddle::tools {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

using Strings = std::vector<std::string>;

const Strings kScheduler = {HEDDLE_COMMAND, "scheduler"};
const Strings kServer = {HEDDLE_COMMAND, "server"};
const Strings kWorker = {DIST_PROGRAM, "dist_sync", "1"};

const std::string kSoon = "HEDDLE_CONNECT_DEADLINE_MS=1000";

// Settings of a job with one server and `num_workers`, and what `more` changes.
Strings Settings(const std::string& port, Strings more = {}, int num_workers = 1) {
  Strings settings = {"DMLC_PS_ROOT_URI=127.0.0.1", "DMLC_PS_ROOT_PORT=" + port,
                      "DMLC_NUM_WORKER=" + std::to_string(num_workers), "DMLC_NUM_SERVER=1",
                      "HEDDLE_TOKEN=secret"};
  settings.insert(settings.end(), more.begin(), more.end());
  return settings;
}

// Runs it to its end, which must be a failure, and returns what it says.
std::string Fail(const Strings& command, const Strings& settings) {
  const auto started = std::chrono::steady_clock::now();
  const ProgramResult result = RunProgram(command, settings);
  const auto took = std::chrono::steady_clock::now() - started;
  EXPECT_EQ(result.status, 1) << result.output;
  EXPECT_LT(took, std::chrono::seconds(40)) << "the default deadline is a minute";
  return result.output;
}

TEST(Startup, WorksInAnyOrder) {
  for (const bool scheduler_first : {true, false}) {
    const Strings settings = Settings(FreePort(), {}, 2);
    std::vector<std::unique_ptr<RunningProgram>> programs;
    const auto start = [&](const Strings& command) {
      programs.push_back(std::make_unique<RunningProgram>(command, settings));
    };
    if (scheduler_first) start(kScheduler);
    start(kWorker);
    start(kServer);
    start(kWorker);
    if (!scheduler_first) start(kScheduler);
    std::string output;
    for (const auto& program : programs) {
      const ProgramResult result = program->Wait();
      EXPECT_EQ(result.status, 0) << result.output;
      output += result.output;
    }
    EXPECT_THAT(output, AllOf(HasSubstr("rank 0 of 2 has 3\n"), HasSubstr("rank 1 of 2 has 3\n")));
  }
}

// It would write into something else.
TEST(Startup, ADescriptorThatIsNotTheLaunchersIsNamed) {
  const std::string port = FreePort();
  EXPECT_THAT(Fail({HEDDLE_COMMAND, "scheduler", "--failure-fd", "99"}, Settings(port)),
              AllOf(HasSubstr("failure_fd 99 (--failure-fd): expected a Unix socket"),
                    HasSubstr("Bad file descriptor")));
  EXPECT_THAT(Fail(kScheduler, Settings(port, {"HEDDLE_FAILURE_FD=0"})),
              HasSubstr("failure_fd 0 (HEDDLE_FAILURE_FD): expected a Unix socket"));
}

// Sent a moment after the process was started, it used to end it.
TEST(Startup, UserSignal1DoesNotEndAProcessThatIsAboutToStart) {
  for (const char* const role : {"scheduler", "server"}) {
    const TempFolder folder;
    const std::string token = folder / "token";
    RunProgram({"mkfifo", "-m", "600", token});
    RunningProgram program(
        {HEDDLE_COMMAND, role},
        {"HEDDLE_ROOT_HOST=127.0.0.1", "HEDDLE_ROOT_PORT=" + FreePort(), "HEDDLE_JOB_WORKERS=1",
         "HEDDLE_JOB_SERVERS=1", "HEDDLE_CONNECT_DEADLINE_MS=300", "HEDDLE_TOKEN_FILE=" + token});
    std::ofstream file(token);  // the process reads it now
    program.Signal(SIGUSR1);
    file << "secret\n";
    file.close();
    const ProgramResult result = program.Wait();
    EXPECT_EQ(result.status, 1) << role;  // nobody else has come
    EXPECT_THAT(result.output, HasSubstr("heddle: ")) << role;
  }
}

TEST(Startup, LaunchRunsAJob) {
  const ProgramResult result = RunProgram(
      {HEDDLE_COMMAND, "launch", "-n", "3", "-s", "2", "--", DIST_PROGRAM, "dist_sync", "5"});
  EXPECT_EQ(result.status, 0) << result.output;
  for (const char* const rank : {"0", "1", "2"}) {
    EXPECT_THAT(result.output,
                HasSubstr("[worker " + std::string(rank) + "] rank " + rank + " of 3 has 6\n"));
  }
}

TEST(Startup, OptionsOfACommandWinOverVariables) {
  const std::string port = FreePort();
  EXPECT_THAT(Fail({HEDDLE_COMMAND, "server", "--root-port", port}, Settings("1", {kSoon})),
              AllOf(HasSubstr("127.0.0.1:" + port), HasSubstr("(--root-port)")));
}

TEST(Startup, MissingSettingsAreNamedWithTheirVariables) {
  struct Case {
    std::string field, heddles, old;
  };
  for (const Case& c : {Case{"root_host", "HEDDLE_ROOT_HOST", "DMLC_PS_ROOT_URI"},
                        Case{"root_port", "HEDDLE_ROOT_PORT", "DMLC_PS_ROOT_PORT"},
                        Case{"num_workers", "HEDDLE_JOB_WORKERS", "DMLC_NUM_WORKER"},
                        Case{"num_servers", "HEDDLE_JOB_SERVERS", "DMLC_NUM_SERVER"}}) {
    for (const Strings& command : {kScheduler, kServer, kWorker}) {
      EXPECT_THAT(
          Fail(command, Settings("9091", {c.old + "="})),
          AllOf(HasSubstr(c.field + " is missing"), HasSubstr(c.heddles), HasSubstr(c.old)));
    }
  }
}

TEST(Startup, BadValuesAreNamedWithTheirVariables) {
  for (const Strings& command : {kScheduler, kServer, kWorker}) {
    EXPECT_THAT(
        Fail(command, Settings("70000")),
        AllOf(HasSubstr("root_port"), HasSubstr("'70000'"), HasSubstr("DMLC_PS_ROOT_PORT")));
  }
  EXPECT_THAT(Fail(kScheduler, Settings(FreePort(), {"DMLC_ROLE=worker"})),
              AllOf(HasSubstr("heddle scheduler"), HasSubstr("role worker (DMLC_ROLE)")));
  EXPECT_THAT(
      Fail(kServer, Settings(FreePort(), {"HEDDLE_BIND_ADDRESS=0.0.0.0", "HEDDLE_TOKEN="})),
      AllOf(HasSubstr("0.0.0.0"), HasSubstr("HEDDLE_TOKEN "), HasSubstr("HEDDLE_TOKEN_FILE")));
}

TEST(Startup, ABusyPortIsNamedWithItsVariableAndTheSystemsError) {
  const Port port;
  port.Listen();
  EXPECT_THAT(Fail(kScheduler, Settings(port.number())),
              AllOf(HasSubstr("127.0.0.1:" + port.number()), HasSubstr("DMLC_PS_ROOT_PORT"),
                    HasSubstr("Address already in use")));
}

// A documentation address, which no machine has.
TEST(Startup, AnAddressThatCannotBeBoundIsNamedWithItsVariableAndTheSystemsError) {
  for (const Strings& command : {kScheduler, kServer}) {
    EXPECT_THAT(Fail(command, Settings(FreePort(), {"HEDDLE_BIND_ADDRESS=203.0.113.7"})),
                AllOf(HasSubstr("bind_address 203.0.113.7 (HEDDLE_BIND_ADDRESS)"),
                      HasSubstr("Cannot assign requested address")));
  }
  EXPECT_THAT(Fail(kServer, Settings(FreePort(), {"DMLC_NODE_HOST=203.0.113.7"})),
              HasSubstr("node_host 203.0.113.7 (DMLC_NODE_HOST)"));
}

TEST(Startup, AWrongOptionOfTheCommandIsStatusOne) {
  EXPECT_EQ(RunProgram({HEDDLE_COMMAND, "launch", "-n", "0", "--", "true"}).status, 1);
  EXPECT_EQ(RunProgram({HEDDLE_COMMAND, "launch", "--", "true"}).status, 1);
  EXPECT_EQ(RunProgram({HEDDLE_COMMAND, "launch", "--help"}).status, 0);
}

TEST(Startup, WhereNobodyListensAddressVariableAndErrorAreNamedAtTheDeadline) {
  const std::string port = FreePort();
  for (const Strings& command : {kServer, kWorker}) {
    EXPECT_THAT(Fail(command, Settings(port, {kSoon})),
                AllOf(HasSubstr("127.0.0.1:" + port), HasSubstr("DMLC_PS_ROOT_PORT"),
                      HasSubstr("Connection refused")));
  }
}

TEST(Startup, AListenerThatNeverAnswersIsGivenUpAtTheDeadline) {
  const Port port;
  port.Listen();  // the system accepts, nobody answers
  for (const Strings& command : {kServer, kWorker}) {
    EXPECT_THAT(Fail(command, Settings(port.number(), {kSoon})),
                AllOf(HasSubstr("127.0.0.1:" + port.number()), HasSubstr("DMLC_PS_ROOT_PORT")));
  }
}

// What the scheduler and those that have come say when others do not come.
TEST(Startup, WhoIsMissingIsNamedAtTheDeadline) {
  const Strings settings = Settings(FreePort(), {"HEDDLE_CONNECT_DEADLINE_MS=3000"}, 3);
  RunningProgram scheduler(kScheduler, settings), server(kServer, settings);
  Strings of_worker = settings;
  of_worker.emplace_back("HEDDLE_RANK=1");
  RunningProgram worker(kWorker, of_worker);
  for (RunningProgram* const program : {&scheduler, &server, &worker}) {
    const ProgramResult result = program->Wait();
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output, AllOf(HasSubstr("within 3.0 s"), HasSubstr("2 of 3 workers"),
                                     HasSubstr("worker 1"), HasSubstr("127.0.0.1:")));
  }
}

// A scheduler waits for a job of one server and two workers; a process whose settings are others
// does not fit.
class StrangerTest : public ::testing::Test {
 protected:
  Strings Mine(Strings more) const {
    more.insert(more.begin(), "HEDDLE_JOB_ID=job-1");
    return Settings(port_, more, 2);
  }
  std::string Refused(const Strings& command, const Strings& more) const {
    return Fail(command, Mine(more));
  }

  const std::string port_ = FreePort();
  RunningProgram scheduler_{kScheduler, Mine({})};
};

TEST_F(StrangerTest, WrongCountsAreRefusedNamingBoth) {
  EXPECT_THAT(Refused(kWorker, {"DMLC_NUM_WORKER=3"}),
              AllOf(HasSubstr("127.0.0.1:" + port_), HasSubstr("2 workers"), HasSubstr("3 workers"),
                    HasSubstr("num_workers 3 (DMLC_NUM_WORKER)")));
  EXPECT_THAT(Refused(kServer, {"DMLC_NUM_SERVER=2"}),
              AllOf(HasSubstr("1 servers"), HasSubstr("num_servers 2 (DMLC_NUM_SERVER)")));
}

TEST_F(StrangerTest, ASecondProcessOfARankIsRefusedAndTheJobGoesOn) {
  RunningProgram first(kWorker, Mine({"HEDDLE_RANK=1"})), second(kWorker, Mine({"HEDDLE_RANK=1"}));
  // The job must not be over before the later one has come.
  EXPECT_THAT(scheduler_.ReadUntil("joined already"), HasSubstr("joined already"));
  RunningProgram other(kWorker, Mine({"HEDDLE_RANK=0"})), server(kServer, Mine({}));
  const ProgramResult one = first.Wait(), two = second.Wait();
  EXPECT_EQ(one.status + two.status, 1) << one.output << two.output;
  EXPECT_THAT(one.output + two.output,
              AllOf(HasSubstr("worker 1"), HasSubstr("already"), HasSubstr("rank 1 of 2 has 3")));
  EXPECT_EQ(other.Wait().status, 0);
  EXPECT_EQ(server.Wait().status, 0);
  EXPECT_EQ(scheduler_.Wait().status, 0);
}

TEST_F(StrangerTest, AnotherJobsProcessIsRefused) {
  for (const Strings& command : {kServer, kWorker}) {
    EXPECT_THAT(Refused(command, {"HEDDLE_JOB_ID=job-2"}),
                AllOf(HasSubstr("127.0.0.1:" + port_), HasSubstr("'job-1'"),
                      HasSubstr("job_id job-2 (HEDDLE_JOB_ID)")));
  }
}

TEST_F(StrangerTest, AWrongTokenIsRefusedWithoutShowingIt) {
  for (const Strings& command : {kServer, kWorker}) {
    for (const char* const token : {"HEDDLE_TOKEN=hush", "HEDDLE_TOKEN="}) {
      EXPECT_THAT(Refused(command, {token}),
                  AllOf(HasSubstr("127.0.0.1:" + port_), HasSubstr("token"), Not(HasSubstr("hush")),
                        Not(HasSubstr("secret"))));
    }
  }
}

// What a worker says when the program at the scheduler's port answers with these bytes.
std::string SaysOfAnswer(const std::string& answer) {
  const Port port;
  port.Listen();
  RunningProgram worker(kWorker, Settings(port.number()));
  const int connection = port.Accept();
  EXPECT_EQ(write(connection, answer.data(), answer.size()), static_cast<ssize_t>(answer.size()));
  const ProgramResult result = worker.Wait();
  close(connection);
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output,
              AllOf(HasSubstr("127.0.0.1:" + port.number()), HasSubstr("DMLC_PS_ROOT_PORT")));
  return result.output;
}

TEST(Startup, AnotherProgramAtThePortIsKnownAsSuch) {
  EXPECT_THAT(SaysOfAnswer("HTTP/1.1 400 Bad Request\r\n\r\n"), HasSubstr("heddle"));
}

TEST(Startup, AnotherVersionIsNamed) {
  const auto preamble = kvstore::dist::EncodePreamble();
  std::string other(reinterpret_cast<const char*>(preamble.data()), preamble.size());
  constexpr std::size_t kVersionAt = 4;  // docs/wire.md
  other[kVersionAt] = static_cast<char>(other[kVersionAt] + 1);
  EXPECT_THAT(SaysOfAnswer(other),
              HasSubstr("version " + std::to_string(kvstore::dist::kWireVersion + 1)));
}

}  // namespace
}  // namespace heddle::tools
