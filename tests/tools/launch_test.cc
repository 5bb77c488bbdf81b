// `heddle launch` with real processes. What is to be left over is looked for in all of /proc, by a
// mark that the processes of a job carry in their environment and the launcher's in their command
// lines.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/tools/child_process.h"
#include "tests/tools/job_lines.h"
#include "tests/tools/marked_processes.h"
#include "tools/testing/temp_folder.h"

namespace heddle::tools {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr const char* kHeddle = HEDDLE_COMMAND;
const std::string kProgram = JOB_PROGRAM;
constexpr const char* kWorker = WORKER_PROGRAM;

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

using Strings = std::vector<std::string>;

class LaunchTest : public ::testing::Test {
 protected:
  LaunchTest() : mark_("mark_" + std::to_string(getpid()) + "_" + std::to_string(std::rand())) {}

  // heddle launch, with servers and a scheduler that end at once unless `options` say otherwise.
  Strings Launch(const Strings& options, const Strings& program) const {
    Strings command = {kHeddle, "launch", "--env", "MARK=" + mark_};
    const auto has = [&](const char* option) {
      return std::find(options.begin(), options.end(), option) != options.end();
    };
    if (!has("--all-roles")) {
      if (!has("--scheduler-command")) Append(command, {"--scheduler-command", "true"});
      if (!has("--server-command")) Append(command, {"--server-command", "true"});
    }
    Append(command, options);
    command.emplace_back("--");
    Append(command, program);
    return command;
  }
  ProgramResult RunLaunch(const Strings& options, const Strings& program) const {
    return RunProgram(Launch(options, program));
  }
  static Strings Shell(const std::string& script) { return {"/bin/sh", "-c", script}; }

  // Processes of this test's jobs, those of the launcher included, as "pid command".
  Strings Left() const {
    Strings left;
    for (const MarkedProcess& process : MarkedProcesses(mark_)) {
      left.push_back(std::to_string(process.pid) + " " + process.command);
    }
    return left;
  }
  // The same, once they have had the time to go.
  Strings LeftInTheEnd() const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!Left().empty() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return Left();
  }

  // The child of the launcher that keeps the job.
  static pid_t KeeperOf(const RunningProgram& launcher) {
    const std::string pid = std::to_string(launcher.pid());
    return std::atoi(ReadFile("/proc/" + pid + "/task/" + pid + "/children").c_str());
  }

 private:
  static void Append(Strings& to, const Strings& what) {
    to.insert(to.end(), what.begin(), what.end());
  }

  const std::string mark_;
};

std::map<std::string, std::map<std::string, std::string>> VariablesByRole(
    const std::string& output) {
  std::map<std::string, std::map<std::string, std::string>> roles;
  for (const std::string& line : Lines(output)) {
    const std::size_t end = line.find("] "), equals = line.find('=');
    if (end == std::string::npos || equals == std::string::npos) continue;
    roles[line.substr(1, end - 1)][line.substr(end + 2, equals - end - 2)] =
        line.substr(equals + 1);
  }
  return roles;
}

TEST_F(LaunchTest, GivesEachProcessItsPlaceInHeddlesAndInTheOldVariables) {
  const ProgramResult result = RunLaunch({"-n", "3", "-s", "2", "--all-roles"}, {kProgram, "env"});
  ASSERT_EQ(result.status, 0) << result.output;
  auto roles = VariablesByRole(result.output);
  std::set<std::string> names;
  for (auto& [name, variables] : roles) {
    names.insert(name);
    const std::string role = name.substr(0, name.find(' '));
    EXPECT_EQ(variables["HEDDLE_ROLE"], role);
    EXPECT_EQ(variables["DMLC_ROLE"], role);
    EXPECT_EQ(variables["HEDDLE_ROOT_HOST"], "127.0.0.1");
    EXPECT_EQ(variables["DMLC_PS_ROOT_URI"], "127.0.0.1");
    EXPECT_NE(variables["HEDDLE_ROOT_PORT"], "");
    EXPECT_EQ(variables["DMLC_PS_ROOT_PORT"], variables["HEDDLE_ROOT_PORT"]);
    EXPECT_EQ(variables["HEDDLE_JOB_WORKERS"], "3");
    EXPECT_EQ(variables["DMLC_NUM_WORKER"], "3");
    EXPECT_EQ(variables["HEDDLE_JOB_SERVERS"], "2");
    EXPECT_EQ(variables["DMLC_NUM_SERVER"], "2");
    EXPECT_EQ(variables["HEDDLE_TOKEN"].size(), 64u);
    for (const char* const same : {"HEDDLE_ROOT_PORT", "HEDDLE_TOKEN", "HEDDLE_JOB_ID"}) {
      EXPECT_EQ(variables[same], roles["worker 0"][same]) << name;
    }
    EXPECT_EQ(variables.count("HEDDLE_LISTEN_FD"), role == "scheduler" ? 1u : 0u);
    EXPECT_EQ(variables.count("HEDDLE_FAILURE_FD"), role == "scheduler" ? 1u : 0u);
    EXPECT_EQ(variables.count("HEDDLE_RANK"), role == "scheduler" ? 0u : 1u);
    EXPECT_EQ(variables.count("HEDDLE_LOCAL_RANK"), role == "worker" ? 1u : 0u);
    if (role != "scheduler") {
      EXPECT_EQ(role + " " + variables["HEDDLE_RANK"], name);
    }
    if (role == "worker") {
      EXPECT_EQ(variables["HEDDLE_LOCAL_RANK"], variables["HEDDLE_RANK"]);
      EXPECT_EQ(variables["HEDDLE_LOCAL_SIZE"], "3");
    }
  }
  EXPECT_EQ(names, (std::set<std::string>{"scheduler", "server 0", "server 1", "worker 0",
                                          "worker 1", "worker 2"}));
}

TEST_F(LaunchTest, AJobInsideAJobKnowsNothingOfTheOuterOne) {
  setenv("HEDDLE_RANK", "7", 1);
  setenv("HEDDLE_LISTEN_FD", "0", 1);
  setenv("HEDDLE_FAILURE_FD", "0", 1);
  setenv("HEDDLE_TOKEN_FILE", "/nowhere", 1);
  setenv("DMLC_PS_ROOT_PORT", "1", 1);
  const ProgramResult result = RunLaunch({"-n", "1", "--all-roles"}, {kProgram, "env"});
  for (const char* const name : {"HEDDLE_RANK", "HEDDLE_LISTEN_FD", "HEDDLE_FAILURE_FD",
                                 "HEDDLE_TOKEN_FILE", "DMLC_PS_ROOT_PORT"}) {
    unsetenv(name);
  }
  auto roles = VariablesByRole(result.output);
  ASSERT_EQ(roles.size(), 3u) << result.output;
  EXPECT_EQ(roles["worker 0"]["HEDDLE_RANK"], "0");
  EXPECT_EQ(roles["scheduler"].count("HEDDLE_RANK"), 0u);
  EXPECT_NE(roles["scheduler"]["HEDDLE_LISTEN_FD"], "0");
  EXPECT_EQ(roles["worker 0"].count("HEDDLE_LISTEN_FD"), 0u);
  EXPECT_EQ(roles["worker 0"].count("HEDDLE_FAILURE_FD"), 0u);
  EXPECT_EQ(roles["worker 0"].count("HEDDLE_TOKEN_FILE"), 0u);
  EXPECT_NE(roles["worker 0"]["DMLC_PS_ROOT_PORT"], "1");
}

// They used to reach the processes, where those of NCCL win over the job.
TEST_F(LaunchTest, VariablesOfOneProcessOrMachineAreOnlyThoseThatAreGiven) {
  const Strings names = {"DMLC_NODE_HOST",        "HEDDLE_BIND_ADDRESS", "HEDDLE_NCCL_ID",
                         "HEDDLE_NCCL_PROCESSES", "HEDDLE_NCCL_RANK",    "HEDDLE_NODE_HOST"};
  Strings inherited = {"HEDDLE_NCCL_DEADLINE_MS=7"}, given = {"-n", "1", "--all-roles"};
  for (const std::string& name : names) {
    inherited.push_back(name + "=inherited");
    given.insert(given.end(), {"--env", name == "HEDDLE_NODE_HOST" ? name : name + "=given"});
  }
  auto roles = VariablesByRole(
      RunProgram(Launch({"-n", "1", "--all-roles"}, {kProgram, "env"}), inherited).output);
  auto with = VariablesByRole(RunProgram(Launch(given, {kProgram, "env"}), inherited).output);
  for (const char* const role : {"scheduler", "server 0", "worker 0"}) {
    SCOPED_TRACE(role);
    EXPECT_EQ(roles[role]["HEDDLE_NCCL_DEADLINE_MS"], "7");
    for (const std::string& name : names) {
      EXPECT_EQ(roles[role].count(name), 0u) << name;
      EXPECT_EQ(with[role][name], name == "HEDDLE_NODE_HOST" ? "inherited" : "given") << name;
    }
  }
}

TEST_F(LaunchTest, TwoJobsAtOnceDoNotMeet) {
  const Strings command = Launch({"-n", "1"}, Shell(kProgram + " env; echo waiting; sleep 1000"));
  RunningProgram one(command), two(command);
  auto first = VariablesByRole(one.ReadUntil("waiting"))["worker 0"];
  auto second = VariablesByRole(two.ReadUntil("waiting"))["worker 0"];
  for (const char* const name : {"HEDDLE_ROOT_PORT", "HEDDLE_TOKEN", "HEDDLE_JOB_ID"}) {
    EXPECT_NE(first[name], "");
    EXPECT_NE(first[name], second[name]) << name;
  }
}

TEST_F(LaunchTest, TheTokenIsInNoCommandLine) {
  RunningProgram launcher(Launch({"-n", "1"}, Shell("echo token=$HEDDLE_TOKEN; sleep 1000")));
  const std::string line = launcher.ReadLine();
  const std::string token = line.substr(line.find('=') + 1);
  ASSERT_EQ(token.size(), 64u) << line;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    EXPECT_THAT(ReadFile(entry.path().string() + "/cmdline"), Not(HasSubstr(token)));
  }
}

TEST_F(LaunchTest, WorkersMayConnectBeforeTheSchedulerAccepts) {
  // The scheduler takes the socket over only when every worker runs.
  const TempFolder folder;
  const std::string started = folder / "started";
  const ProgramResult result =
      RunLaunch({"-n", "4", "-s", "1", "--scheduler-command",
                 "while [ \"$(cat " + started + "* | wc -l)\" != 4 ]; do sleep 0.01; done; exec " +
                     kProgram + " accept"},
                Shell("echo x > " + started + "$HEDDLE_RANK; exec " + kProgram + " connect"));
  EXPECT_EQ(result.status, 0) << result.output;
}

TEST_F(LaunchTest, AGivenPortIsTakenAndABusyOneIsAnErrorThatNamesIt) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof(address);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), bytes), 0);
  ASSERT_EQ(listen(listener, 1), 0);
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &bytes), 0);
  const std::string port = std::to_string(ntohs(address.sin_port));
  const Strings options = {"-n", "1", "--root-port", port};
  const ProgramResult busy = RunLaunch(options, Shell("echo port $HEDDLE_ROOT_PORT"));
  EXPECT_EQ(busy.status, 1);
  EXPECT_THAT(busy.output, AllOf(HasSubstr("(--root-port)"), HasSubstr("127.0.0.1:" + port),
                                 HasSubstr("Address already in use"), Not(HasSubstr("worker"))));
  close(listener);
  const ProgramResult free = RunLaunch(options, Shell("echo port $HEDDLE_ROOT_PORT"));
  EXPECT_EQ(free.status, 0);
  EXPECT_EQ(free.output, "[worker 0] port " + port + "\n");
}

// Output: the lines of each process and stream, in order and whole, whatever the pieces were.
TEST_F(LaunchTest, ShowsWholeLinesWithRoleAndRankInFrontAlsoAPartialLastOne) {
  const unsigned seed = std::random_device()() % 100'000;
  SCOPED_TRACE("seed " + std::to_string(seed));
  constexpr int kWorkers = 4, kCount = 400;
  const ProgramResult result =
      RunLaunch({"-n", std::to_string(kWorkers)},
                {kProgram, "lines", std::to_string(seed), std::to_string(kCount)});
  ASSERT_EQ(result.status, 0);
  ASSERT_TRUE(result.output.ends_with("\n"));
  std::map<std::string, Strings> shown;  // by the first 14 characters, "[worker 1] out"
  for (const std::string& line : Lines(result.output)) {
    shown[line.substr(0, 14)].push_back(line.substr(std::min<std::size_t>(line.size(), 11)));
  }
  EXPECT_EQ(shown.size(), 2u * kWorkers);
  for (int rank = 0; rank < kWorkers; ++rank) {
    const std::string prefix = "[worker " + std::to_string(rank) + "] ";
    EXPECT_EQ(shown[prefix + "out"], JobLines(seed + rank, false, kCount));
    EXPECT_EQ(shown[prefix + "err"], JobLines(seed + rank, true, kCount));
  }
}

TEST_F(LaunchTest, KeepsStdoutAndStderrApart) {
  const TempFolder folder;
  Strings command = {"/bin/sh", "-c", "\"$@\" 2> " + folder / "err", "sh"};
  const Strings launch = Launch({"-n", "1"}, Shell("echo to out; echo to err >&2; exit 4"));
  command.insert(command.end(), launch.begin(), launch.end());
  const ProgramResult result = RunProgram(command);
  EXPECT_EQ(result.status, 4);
  EXPECT_EQ(result.output, "[worker 0] to out\n");
  const std::string err = ReadFile(folder / "err");
  EXPECT_THAT(err, AllOf(HasSubstr("[worker 0] to err\n"), HasSubstr("[launch] worker 0"),
                         HasSubstr("status 4")));
}

TEST_F(LaunchTest, AReaderThatGoesAwayDoesNotDisturbTheJob) {
  const TempFolder folder;
  Strings command = {"/bin/sh", "-c", "{ \"$@\"; echo $? > " + folder / "status; } | head -n 1",
                     "sh"};
  const Strings launch =
      Launch({"-n", "2"}, Shell("yes | head -n 100000; echo done > " + folder / "$HEDDLE_RANK"));
  command.insert(command.end(), launch.begin(), launch.end());
  EXPECT_THAT(RunProgram(command).output, HasSubstr("y\n"));
  EXPECT_EQ(ReadFile(folder / "status"), "0\n");
  EXPECT_EQ(ReadFile(folder / "0") + ReadFile(folder / "1"), "done\ndone\n");
}

TEST_F(LaunchTest, OutputThatIsLostIsNamedAtTheEnd) {
  for (const int status : {0, 3}) {
    Strings command = {"/bin/sh", "-c", "exec \"$@\" > /dev/full", "sh"};
    const Strings launch = Launch({"-n", "1", "-s", "1"},
                                  {"/bin/sh", "-c", "echo result; exit " + std::to_string(status)});
    command.insert(command.end(), launch.begin(), launch.end());
    const ProgramResult result = RunProgram(command);
    EXPECT_EQ(result.status, status == 0 ? 1 : status);
    EXPECT_THAT(result.output,
                HasSubstr("[launch] stdout cannot be written: No space left on device"));
  }
}

// The launcher used to read that before anything else, for ever.
TEST_F(LaunchTest, AJobEndsAlsoWhenWhatAWorkerLeavesBehindWritesOn) {
  Strings command = {"/bin/sh", "-c", "exec timeout -s KILL 30 \"$@\" > /dev/null 2>&1", "sh"};
  const Strings launch = Launch({"-n", "1", "--grace", "0.1"}, Shell("yes >&2 & exit 3"));
  command.insert(command.end(), launch.begin(), launch.end());
  EXPECT_EQ(RunProgram(command).status, 3);
  EXPECT_THAT(Left(), IsEmpty());
  for (const std::string& process : Left()) kill(std::atoi(process.c_str()), SIGKILL);
}

TEST_F(LaunchTest, StdinIsEmpty) {
  EXPECT_EQ(RunLaunch({"-n", "1"}, Shell("wc -c")).output, "[worker 0] 0\n");
}

// A worker that fails in some way while the other one, and what it has started, wants to live.
struct Failure {
  std::string name;
  std::string script;
  int status;
};

class LaunchFailureTest : public LaunchTest, public ::testing::WithParamInterface<Failure> {};

TEST_P(LaunchFailureTest, EndsTheJobWithItsStatusAndLeavesNothing) {
  const TempFolder folder;
  const std::string fifo = folder / "others";
  const Strings program = Shell("if [ $HEDDLE_RANK = 0 ]; then exec " + kProgram + " tree; fi; " +
                                "read line < " + fifo + "; " + GetParam().script);
  RunProgram({"mkfifo", fifo});
  RunningProgram launcher(Launch({"-n", "2", "--grace", "0.1"}, program));
  ASSERT_EQ(launcher.ReadLine(), "[worker 0] ready");
  EXPECT_FALSE(Left().empty()) << "the test would see nothing";
  std::ofstream(fifo) << "go\n";
  const ProgramResult result = launcher.Wait();
  EXPECT_EQ(result.status, GetParam().status);
  EXPECT_THAT(result.output, HasSubstr("worker 1"));
  EXPECT_THAT(Left(), IsEmpty()) << "when the launcher has ended";
}

INSTANTIATE_TEST_SUITE_P(Ways, LaunchFailureTest,
                         ::testing::Values(Failure{"Exit3", "exit 3", 3},
                                           Failure{"Exit255", "exit 255", 255},
                                           Failure{"Abort", "kill -ABRT $$", 128 + SIGABRT},
                                           Failure{"Segv", "kill -SEGV $$", 128 + SIGSEGV},
                                           Failure{"Kill", "kill -KILL $$", 128 + SIGKILL}),
                         [](const auto& info) { return info.param.name; });

// The launcher itself is told to end, or is killed, while every role has a stubborn tree below it.
class LaunchSignalTest : public LaunchTest, public ::testing::WithParamInterface<int> {
 protected:
  void StartTrees(RunningProgram& launcher) {
    for (int i = 0; i < 5; ++i) ASSERT_THAT(launcher.ReadLine(), HasSubstr("ready"));
    ASSERT_GT(Left().size(), 20u);
  }
  Strings Trees(const std::string& grace) const {
    return Launch({"-n", "2", "-s", "2", "--all-roles", "--grace", grace}, {kProgram, "tree"});
  }
};

TEST_P(LaunchSignalTest, LeavesNothing) {
  RunningProgram launcher(Trees("0.1"));
  StartTrees(launcher);
  launcher.Signal(GetParam());
  const ProgramResult result = launcher.Wait();
  EXPECT_EQ(result.status, GetParam() == SIGKILL ? -SIGKILL : 128 + GetParam());
  // One that could still act ends last.
  EXPECT_THAT(GetParam() == SIGKILL ? LeftInTheEnd() : Left(), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(Signals, LaunchSignalTest,
                         ::testing::Values(SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGKILL),
                         [](const auto& info) { return std::string(sigabbrev_np(info.param)); });

TEST_F(LaunchSignalTest, ASecondSignalDoesNotWaitForTheGraceToPass) {
  RunningProgram launcher(Trees("3600"));
  StartTrees(launcher);
  launcher.Signal(SIGINT);
  launcher.Signal(SIGTERM);
  EXPECT_THAT(launcher.Wait().status, ::testing::AnyOf(128 + SIGINT, 128 + SIGTERM));
  EXPECT_THAT(Left(), IsEmpty());
}

TEST_F(LaunchSignalTest, UnderNohupAJobOutlivesItsTerminal) {
  const TempFolder folder;
  RunProgram({"mkfifo", folder / "go"});
  Strings command = {"/bin/sh", "-c", "trap '' HUP CHLD; exec \"$@\"", "sh"};
  const Strings launch = Launch({"-n", "1"}, Shell("echo ready; cat " + folder / "go"));
  command.insert(command.end(), launch.begin(), launch.end());
  RunningProgram launcher(command);
  ASSERT_THAT(launcher.ReadLine(), HasSubstr("ready"));
  launcher.Signal(SIGHUP);
  std::ofstream(folder / "go") << "went on\n";
  const ProgramResult result = launcher.Wait();
  EXPECT_EQ(result.status, 0);
  EXPECT_EQ(result.output, "[worker 0] went on\n");
}

TEST_F(LaunchSignalTest, TheKeepersDeathLeavesNothingEither) {
  RunningProgram launcher(Trees("3600"));
  StartTrees(launcher);
  const pid_t keeper = KeeperOf(launcher);
  ASSERT_GT(keeper, 0);
  kill(keeper, SIGKILL);
  const ProgramResult result = launcher.Wait();
  EXPECT_EQ(result.status, 128 + SIGKILL);
  EXPECT_THAT(result.output, HasSubstr("[launch]"));
  EXPECT_THAT(Left(), IsEmpty());
}

TEST_F(LaunchSignalTest, RolesDieWithLauncherAndKeeper) {
  RunningProgram launcher(Launch({"-n", "2", "-s", "2", "--all-roles"},
                                 Shell("trap '' INT TERM HUP; echo ready; exec sleep 1000")));
  for (int i = 0; i < 5; ++i) ASSERT_THAT(launcher.ReadLine(), HasSubstr("ready"));
  const pid_t keeper = KeeperOf(launcher);
  ASSERT_GT(keeper, 0);
  kill(launcher.pid(), SIGSTOP);  // so that it cannot clean up
  kill(keeper, SIGKILL);
  launcher.Kill();
  EXPECT_THAT(LeftInTheEnd(), IsEmpty());
}

// Also while the processes are being started.
TEST_F(LaunchSignalTest, KilledAtAnyMomentItLeavesNothing) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int i = 0; i < 40; ++i) {
    RunningProgram launcher(Trees("0.01"));
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
    if (random() % 2 == 0) {
      launcher.Kill();
    } else if (const pid_t keeper = KeeperOf(launcher); keeper > 0) {
      kill(keeper, SIGKILL);
      launcher.Wait();
    } else {
      launcher.Signal(SIGTERM);
      launcher.Wait();
    }
    ASSERT_THAT(LeftInTheEnd(), IsEmpty());
  }
}

// Also those that a script waits for; who has no handler lives on.
TEST_F(LaunchSignalTest, UserSignal1AsksAllRolesForTheirState) {
  RunningProgram launcher(
      Launch({"-n", "2", "-s", "1", "--scheduler-command", std::string(kHeddle) + " scheduler",
              "--server-command", std::string(kHeddle) + " server; exit $?"},
             Shell("if [ $HEDDLE_RANK = 0 ]; then " + std::string(kWorker) + " forever; exit $?; " +
                   "else exec " + kWorker + " forever; fi")));
  launcher.ReadUntil("started");
  launcher.ReadUntil("started");
  launcher.Signal(SIGUSR1);
  EXPECT_THAT(launcher.ReadUntilAll(
                  {"[scheduler] scheduler at ", "[server 0] server 0, scheduler at ",
                   "[worker 0] worker 0, scheduler at ", "[worker 1] worker 1, scheduler at "}),
              IsEmpty());
  launcher.Signal(SIGTERM);
  EXPECT_EQ(launcher.Wait().status, 128 + SIGTERM);
}

TEST_F(LaunchSignalTest, UserSignal1DoesNotEndAJobThatIsAboutToStart) {
  const TempFolder folder;
  const std::string hosts = folder / "hosts";
  RunProgram({"mkfifo", hosts});
  RunningProgram launcher(
      Launch({"-n", "1", "--launcher", "ssh", "--hosts-file", hosts}, {"true"}));
  std::ofstream file(hosts);  // the launcher reads it now
  launcher.Signal(SIGUSR1);
  file << "node slots=none\n";
  file.close();
  const ProgramResult result = launcher.Wait();
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("slots"));
}

TEST_F(LaunchSignalTest, UserSignal1ChangesNothingAtTheEndOfAJob) {
  for (int i = 0; i < 20; ++i) {
    RunningProgram launcher(Launch({"-n", "1"}, {"echo", "ready"}));
    ASSERT_THAT(launcher.ReadLine(), HasSubstr("ready"));
    std::optional<int> status;
    while (!(status = launcher.Ended())) launcher.Signal(SIGUSR1);
    ASSERT_EQ(*status, 0);
  }
}

// Worker 1 fails once worker 0 is ready for what follows.
class LaunchStopTest : public LaunchTest {
 protected:
  ProgramResult RunStop(const std::string& worker_0) const {
    const TempFolder folder;
    const std::string fifo = folder / "ready";
    RunProgram({"mkfifo", fifo});
    return RunLaunch({"-n", "2", "--grace", "60"},
                     Shell("ready() { echo > " + fifo + "; }; if [ $HEDDLE_RANK = 0 ]; then " +
                           worker_0 + "; fi; read line < " + fifo + "; exit 3"));
  }
};

TEST_F(LaunchStopTest, TheFirstFailuresStatusCounts) {
  const ProgramResult result =
      RunStop("trap 'echo stopped; exit 5' TERM; ready; while :; do sleep 0.01; done");
  EXPECT_EQ(result.status, 3);
  EXPECT_THAT(result.output, HasSubstr("[worker 0] stopped\n"));
}

TEST_F(LaunchStopTest, AProcessThatIsAskedToEndHasItsTime) {
  EXPECT_THAT(
      RunStop("trap 'sleep 0.3; echo saved; exit' TERM; ready; while :; do sleep 0.01; done")
          .output,
      HasSubstr("[worker 0] saved\n"));
}

TEST_F(LaunchStopTest, AndSoHasWhatOutlivesTheFirstProcessOfItsRole) {
  EXPECT_THAT(RunStop("(trap 'sleep 0.3; echo saved; exit' TERM; ready; "
                      "while :; do sleep 0.01; done) & wait")
                  .output,
              HasSubstr("[worker 0] saved\n"));
}

TEST_F(LaunchTest, AServerOrSchedulerThatFailsFailsTheJob) {
  for (const char* const option : {"--server-command", "--scheduler-command"}) {
    const ProgramResult result =
        RunLaunch({"-n", "2", "-s", "1", option, "exit 6"}, Shell("exec sleep 1000"));
    EXPECT_EQ(result.status, 6) << result.output;
    EXPECT_THAT(Left(), IsEmpty());
  }
}

// Scheduler and servers end with 1 when the job has failed, and the launcher may see that before
// the end of who was the cause.
class LaunchCauseTest : public LaunchTest {
 protected:
  // Of a process that ends with 1, and of one that goes on with `then` when the launcher has seen
  // that end.
  std::string Follows() const {
    return "echo $$ > " + folder_ / "new" + "; mv " + folder_ / "new " + file_ + "; exit 1";
  }
  std::string AfterThat(const std::string& then) const {
    return "while ! [ -e " + file_ + " ]; do sleep 0.01; done; while [ -e /proc/$(cat " + file_ +
           ") ]; do sleep 0.01; done; " + then;
  }

  ProgramResult Run(const Strings& options, const std::string& worker) const {
    std::filesystem::remove(file_);
    return RunLaunch(options, Shell(worker));
  }

 private:
  const TempFolder folder_;
  const std::string file_ = folder_ / "follower";
};

TEST_F(LaunchCauseTest, AServersOrSchedulersEndGivesWayToTheWorkersThatWasTheCause) {
  for (const std::string role : {"scheduler", "server"}) {
    for (const auto& [end, status] : {std::pair("exit 5", 5), std::pair("kill -KILL $$", 137)}) {
      const ProgramResult result =
          Run({"-n", "2", "-s", "1", "--" + role + "-command", Follows()},
              "if [ $HEDDLE_RANK = 0 ]; then exec sleep 1000; fi; " + AfterThat(end));
      EXPECT_EQ(result.status, status) << result.output;
      EXPECT_THAT(result.output,
                  AllOf(HasSubstr("[launch] worker 1"), Not(HasSubstr("[launch] " + role))));
      EXPECT_THAT(Left(), IsEmpty());
    }
  }
}

TEST_F(LaunchCauseTest, TheSchedulersEndGivesWayToTheServersThatWasTheCause) {
  const ProgramResult result = Run({"-n", "1", "-s", "1", "--scheduler-command", Follows(),
                                    "--server-command", AfterThat("kill -KILL $$")},
                                   "exec sleep 1000");
  EXPECT_EQ(result.status, 137) << result.output;
  EXPECT_THAT(result.output, HasSubstr("[launch] server 0"));
}

TEST_F(LaunchCauseTest, WhereNobodyElseFailsTheSchedulersEndCounts) {
  for (const std::string& worker : {std::string("exec sleep 1000"), AfterThat("exit 0")}) {
    const ProgramResult result =
        Run({"-n", "2", "-s", "1", "--scheduler-command", Follows()}, worker);
    EXPECT_EQ(result.status, 1) << result.output;
    EXPECT_THAT(result.output, HasSubstr("[launch] scheduler"));
    EXPECT_THAT(Left(), IsEmpty());
  }
}

// Jobs of heddle's own roles, in which workers abort when another process fails, and are seen to
// end before it.
class LaunchedJobCauseTest : public LaunchTest {
 protected:
  static constexpr const char* kAborted = "134";
  // A sanitizer looks for leaks at the end of a process, on a busy machine for longer than the
  // launcher waits for the end of the cause.
  static constexpr const char* kNoLeakCheck = "--env=LSAN_OPTIONS=detect_leaks=0";

  ProgramResult RunJob(const std::string& worker) const {
    return RunProgram(JobCommand(std::string(kHeddle) + " scheduler", worker));
  }
  Strings JobCommand(const std::string& scheduler, const std::string& worker) const {
    return Launch({"-n", "3", "-s", "2", "--grace", "60", kNoLeakCheck, "--scheduler-command",
                   scheduler, "--server-command", std::string(kHeddle) + " server"},
                  Shell(worker));
  }
  // Ends because another process fails.
  std::string Follows() const {
    return "echo $$ > " + folder_ / "new.$HEDDLE_RANK" + "; mv " + folder_ / "new.$HEDDLE_RANK " +
           folder_ / "$HEDDLE_RANK" + "; exec " + kWorker + " forever";
  }
  // Until the launcher has seen the ends of these workers.
  std::string WaitForEnds(const std::string& ranks) const {
    return "for rank in " + ranks + "; do while [ -e /proc/$(cat " + folder_ / "$rank" +
           ") ]; do sleep 0.01; done; done; ";
  }
  const TempFolder& folder() const { return folder_; }

 private:
  const TempFolder folder_;
};

TEST_F(LaunchedJobCauseTest, TheStatusIsTheCausesHoweverLateItsEndIsSeen) {
  const ProgramResult result =
      RunJob("if [ $HEDDLE_RANK = 2 ]; then " + std::string(kWorker) + " survive exit 3; s=$?; " +
             WaitForEnds("0 1") + "exit $s; fi; " + Follows());
  EXPECT_EQ(result.status, 3) << result.output;
  EXPECT_THAT(result.output,
              AllOf(HasSubstr("[launch] worker 2"), HasSubstr("status 3"),
                    Not(HasSubstr("[launch] worker 0")), Not(HasSubstr("[launch] worker 1"))));
  EXPECT_THAT(Left(), IsEmpty());
}

TEST_F(LaunchedJobCauseTest, TheStatusIsTheCausesEachTime) {
  constexpr int kRuns = 5;
  for (int run = 0; run < kRuns; ++run) {
    const ProgramResult result =
        RunJob("if [ $HEDDLE_RANK = 2 ]; then exec " + std::string(kWorker) +
               " survive exit 3; fi; exec " + kWorker + " forever");
    EXPECT_EQ(result.status, 3) << "run " << run << "\n" << result.output;
  }
}

// It goes on, as one that saves what it has; the servers that the launcher ends are no cause.
TEST_F(LaunchedJobCauseTest, WhoIsNotEndedByTheLaunchersSignalHearsOfTheCause) {
  const ProgramResult result =
      RunJob("trap '' TERM; exec " + std::string(kWorker) + " survive exit 3");
  EXPECT_EQ(result.status, 3) << result.output;
  for (const char* const survivor : {"worker 0: ", "worker 1: "}) {
    EXPECT_THAT(result.output,
                ContainsRegex(std::string(survivor) + ".*lost worker 2 .*exited with status 3"));
  }
  EXPECT_THAT(Left(), IsEmpty());
}

// Its end says nothing of what went wrong; theirs do.
TEST_F(LaunchedJobCauseTest, ACauseThatEndsWithStatus0GivesWayToTheOthers) {
  const ProgramResult result = RunJob("if [ $HEDDLE_RANK = 2 ]; then " + std::string(kWorker) +
                                      " survive exit 3; exit 0; fi; exec " + kWorker + " forever");
  EXPECT_EQ(std::to_string(result.status), kAborted) << result.output;
  EXPECT_THAT(Left(), IsEmpty());
}

TEST_F(LaunchedJobCauseTest, TheSchedulersEndCountsIfItIsTheFirstToDie) {
  const std::string pid = folder() / "scheduler";
  RunningProgram launcher(JobCommand(std::string(kHeddle) + " scheduler & echo $! > " + pid +
                                         "; wait $!; " + WaitForEnds("0 1 2") + "exit 7",
                                     Follows()));
  for (int worker = 0; worker < 3; ++worker) launcher.ReadUntil("started");
  kill(std::atoi(ReadFile(pid).c_str()), SIGKILL);
  const ProgramResult result = launcher.Wait();
  EXPECT_EQ(result.status, 7) << result.output;
  EXPECT_THAT(result.output, HasSubstr("[launch] scheduler"));
  EXPECT_THAT(Left(), IsEmpty());
}

TEST_F(LaunchTest, ServersMayEndByThemselvesWhenTheWorkersHave) {
  const TempFolder folder;
  const std::string server = "while ! [ -e " + folder / "end" +
                             " ]; do sleep 0.01; done; sleep 0.2; "
                             "echo closed; exit ";
  for (const char* const status : {"0", "7"}) {
    std::filesystem::remove(folder / "end");
    const ProgramResult result =
        RunLaunch({"-n", "1", "-s", "1", "--linger", "60", "--server-command", server + status},
                  Shell("echo > " + folder / "end"));
    EXPECT_EQ(result.status, std::atoi(status));
    EXPECT_THAT(result.output, HasSubstr("[server 0] closed\n"));
  }
}

TEST_F(LaunchTest, ServersThatDoNotEndAreStoppedAndTheJobHasSucceeded) {
  for (const char* const script :
       {"exec sleep 1000", "trap '' TERM; while :; do sleep 0.01; done"}) {
    const ProgramResult result = RunLaunch(
        {"-n", "1", "-s", "2", "--linger", "0", "--grace", "0.1", "--server-command", script},
        {"true"});
    EXPECT_EQ(result.status, 0) << result.output;
    EXPECT_THAT(result.output, HasSubstr("all workers have ended"));
    EXPECT_THAT(Left(), IsEmpty());
  }
}

TEST_F(LaunchTest, WhatAWorkerLeavesBehindIsGoneWhenTheJobIs) {
  const ProgramResult result =
      RunLaunch({"-n", "1"}, Shell("trap '' TERM; setsid sleep 1000 & sleep 1000 & echo end"));
  EXPECT_EQ(result.status, 0);
  EXPECT_EQ(result.output, "[worker 0] end\n");
  EXPECT_THAT(Left(), IsEmpty());
}

TEST_F(LaunchTest, ProgramsThatCannotBeRunAreNamed) {
  const ProgramResult missing = RunLaunch({"-n", "2"}, {"no-such-program"});
  EXPECT_EQ(missing.status, 127);
  EXPECT_THAT(missing.output, AllOf(HasSubstr("worker 0"), HasSubstr("'no-such-program'"),
                                    HasSubstr("No such file")));
  const ProgramResult folder = RunLaunch({"-n", "2"}, {"/tmp"});
  EXPECT_EQ(folder.status, 126);
  EXPECT_THAT(folder.output, AllOf(HasSubstr("'/tmp'"), HasSubstr("Permission denied")));
}

// Of a script without its interpreter the system says that the script is missing.
TEST_F(LaunchTest, WhatAProgramLacksToBeRunIsNamed) {
  const TempFolder folder;
  const auto with_mode = [&](const std::string& name, const std::string& text, int mode) {
    std::ofstream(folder / name) << text;
    chmod((folder / name).c_str(), static_cast<mode_t>(mode));
    return folder / name;
  };
  const ProgramResult plain = RunLaunch({"-n", "1"}, {with_mode("plain", "echo hi\n", 0644)});
  EXPECT_EQ(plain.status, 126);
  EXPECT_THAT(plain.output, HasSubstr("Permission denied: it is not executable"));
  const ProgramResult orphan =
      RunLaunch({"-n", "1"}, {with_mode("orphan", "#!/no/such/python\nprint(1)\n", 0755)});
  EXPECT_EQ(orphan.status, 127);
  EXPECT_THAT(orphan.output, HasSubstr("first line, '#!/no/such/python'"));
  Strings here = {"/bin/sh", "-c", "cd " + folder / "" + " && exec \"$@\"", "sh"};
  const Strings launch = Launch({"-n", "1"}, {"plain"});
  here.insert(here.end(), launch.begin(), launch.end());
  EXPECT_THAT(RunProgram(here).output, HasSubstr("in PATH; the one in this folder is './plain'"));
}

TEST_F(LaunchTest, ARootHostThatIsNotThisMachinesIsNamedWithItsOption) {
  // Of a network for documentation, which no machine has.
  const ProgramResult result = RunLaunch({"-n", "1", "--root-host", "192.0.2.1"}, {"true"});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output,
              AllOf(HasSubstr("root_host 192.0.2.1 (--root-host)"), HasSubstr("this machine")));
}

// Servers used to die of it, by a message that named another setting.
TEST_F(LaunchTest, TheAddressOfAllInterfacesIsNoRootHost) {
  for (const std::string host : {"0.0.0.0", "0", "::", "::ffff:0.0.0.0"}) {
    const ProgramResult result = RunLaunch({"-n", "1", "--root-host", host}, {"true"});
    EXPECT_EQ(result.status, 1) << host;
    EXPECT_THAT(result.output,
                AllOf(HasSubstr("root_host " + host + " (--root-host): expected one address of "),
                      Not(HasSubstr("[launch]"))));
  }
}

TEST_F(LaunchTest, ArgumentsOfTheProgramAreItsOwn) {
  EXPECT_EQ(RunLaunch({"-n", "1"}, {"echo", "-s", "5", "--env", "x", "--help"}).output,
            "[worker 0] -s 5 --env x --help\n");
  EXPECT_EQ(RunLaunch({"-n", "1", "--env", "A=b=c", "--env", "EMPTY="},
                      Shell("echo \"$A|${EMPTY-unset}\""))
                .output,
            "[worker 0] b=c|\n");
}

// CLI11 takes words in brackets apart, and drops what is empty in them.
TEST_F(LaunchTest, WordsInBracketsReachTheProgramAsTheyAre) {
  EXPECT_EQ(RunLaunch({"-n", "1"}, {"echo", "[1,2]", "[]", "x"}).output, "[worker 0] [1,2] [] x\n");
  EXPECT_EQ(RunLaunch({"-n", "1"}, {"echo", "a", "--", "[1,2]"}).output, "[worker 0] a -- [1,2]\n");
}

TEST_F(LaunchTest, WithoutTwoDashesTheProgramBeginsWithTheFirstWordThatIsNoOption) {
  EXPECT_EQ(RunProgram({kHeddle, "launch", "--scheduler-command", "true", "--server-command",
                        "true", "-n", "1", "echo", "-n1", "--", "[1,2]", "-s"})
                .output,
            "[worker 0] -n1 -- [1,2] -s\n");
}

TEST_F(LaunchTest, ProcessesRunInTheFolderThatIsGiven) {
  const TempFolder folder;
  const ProgramResult result =
      RunLaunch({"-n", "1", "--folder", folder.path(), "--server-command", "echo > server"},
                Shell("while ! [ -e server ]; do sleep 0.01; done; pwd"));
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output,
              HasSubstr("[worker 0] " + std::filesystem::canonical(folder.path()).string() + "\n"));
  const ProgramResult missing = RunLaunch({"-n", "1", "--folder", "/no/such/folder"}, {"true"});
  EXPECT_EQ(missing.status, 1);
  EXPECT_THAT(missing.output, AllOf(HasSubstr("'/no/such/folder'"), HasSubstr("--folder")));
}

TEST_F(LaunchTest, OptionsOfOtherLaunchersAreNamed) {
  for (const std::string option :
       {"--cpus", "--image", "--launcher-arg", "--memory", "--name", "--token-file"}) {
    const ProgramResult result = RunLaunch({"-n", "1", option + "=1"}, {"true"});
    EXPECT_EQ(result.status, 1) << option;
    EXPECT_THAT(result.output, HasSubstr("launcher local: expected no " + option));
  }
}

// The socket that the scheduler inherits used to get the number of a closed one, and to be
// replaced.
TEST_F(LaunchTest, ItMayBeStartedWithoutStdinStdoutAndStderr) {
  const Strings launch = Launch(
      {"-n", "1", "-s", "1", "--scheduler-command", "test -S /proc/self/fd/$HEDDLE_LISTEN_FD"},
      {"true"});
  for (const std::string closed : {"<&-", ">&-", "2>&-", "<&- >&- 2>&-"}) {
    Strings command = {"/bin/sh", "-c", "exec \"$@\" " + closed, "sh"};
    command.insert(command.end(), launch.begin(), launch.end());
    const ProgramResult result = RunProgram(command);
    EXPECT_EQ(result.status, 0) << closed << "\n" << result.output;
  }
}

TEST_F(LaunchTest, BadOptionsAreErrorsThatSayWhatWasExpected) {
  const ProgramResult launcher = RunLaunch({"-n", "1", "--launcher", "pigeon"}, {"true"});
  EXPECT_EQ(launcher.status, 1);
  EXPECT_THAT(launcher.output,
              AllOf(HasSubstr("'pigeon'"), HasSubstr("one of kubernetes, local, mpi")));
  const ProgramResult env = RunLaunch({"-n", "1", "--env", "A"}, {"true"});
  EXPECT_EQ(env.status, 1);
  EXPECT_THAT(env.output, AllOf(HasSubstr("NAME=VALUE"), HasSubstr("'A'")));
  const ProgramResult taken = RunLaunch({"-n", "1", "--env", "DMLC_ROLE=server"}, {"true"});
  EXPECT_EQ(taken.status, 1);
  EXPECT_THAT(taken.output, HasSubstr("DMLC_ROLE"));
  for (const Strings& bad : {Strings{"-n", "0"}, Strings{"-n", "x"}, Strings{"-n", "1", "-s", "-1"},
                             Strings{"-n", "1", "--root-port", "70000"}, Strings{}}) {
    EXPECT_NE(RunLaunch(bad, {"true"}).status, 0);
  }
  EXPECT_NE(RunLaunch({"-n", "1"}, {}).status, 0) << "no program";
}

}  // namespace
}  // namespace heddle::tools
