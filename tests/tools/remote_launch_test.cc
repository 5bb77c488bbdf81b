// What every launcher promises that starts processes on other machines (docs/launching.md), with
// programs that it uses running for real. A launcher whose programs are not installed, or do not
// work by themselves, is skipped.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "tests/tools/child_process.h"
#include "tests/tools/marked_processes.h"
#include "tests/tools/site.h"
#include "tools/heddle/launcher.h"
#include "tools/testing/temp_folder.h"

namespace heddle::tools {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

using Strings = std::vector<std::string>;

constexpr const char* kProgram = JOB_PROGRAM;

// Servers and scheduler that are not there for the program's sake.
const Strings kNoServers = {"--scheduler-command", "true", "--server-command", "true"};

Strings With(Strings options, const Strings& more) {
  options.insert(options.end(), more.begin(), more.end());
  return options;
}

class RemoteLaunchTest : public ::testing::TestWithParam<SiteEntry> {
 protected:
  void SetUp() override {
    const std::string missing = MissingProgram(GetParam().programs);
    if (!missing.empty()) {
      GTEST_SKIP() << missing << " is not installed: tools/setup.sh " << GetParam().group;
    }
    site_ = TheSite(GetParam());
    if (site_ == nullptr) GTEST_SKIP() << "without heddle: " << reasons_[GetParam().launcher];
  }

  // Tests share it: daemons take their time to start. Null if a machine does not let them work, for
  // a reason that is in reasons_.
  static Site* TheSite(const SiteEntry& entry) {
    const auto [place, is_new] = sites_.try_emplace(entry.launcher);
    std::unique_ptr<Site>& site = place->second;
    if (!is_new) return site.get();
    site = entry.make();
    const ProgramResult probe = RunProgram(site->Around(site->Probe()), site->Environment());
    if (probe.status == 0) return site.get();
    reasons_[entry.launcher] = probe.output;
    site = nullptr;
    return nullptr;
  }
  static void TearDownTestSuite() { sites_.clear(); }

  Strings Launch(const Strings& options, const Strings& program) const {
    Strings command = {kHeddle, "launch", "--env", "MARK=" + mark_};
    for (const Strings& more : {site_->LaunchOptions(), options, Strings{"--"}, program}) {
      command.insert(command.end(), more.begin(), more.end());
    }
    return site_->Around(command);
  }
  ProgramResult RunLaunch(const Strings& options, const Strings& program) const {
    return RunProgram(Launch(options, program), site_->Environment());
  }
  static Strings Shell(const std::string& script) { return {"/bin/sh", "-c", script}; }

  // Of this test's jobs, once they have had the time to go.
  Strings LeftInTheEnd() const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    Strings left;
    do {
      left.clear();
      for (const MarkedProcess& process : MarkedProcesses(mark_)) {
        left.push_back(std::to_string(process.pid) + " " + process.command);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    } while (!left.empty() && std::chrono::steady_clock::now() < deadline);
    return left;
  }

  const std::string mark_ = "mark_" + std::to_string(getpid()) + "_" + std::to_string(std::rand());
  Site* site_ = nullptr;

 private:
  static inline std::map<std::string, std::unique_ptr<Site>> sites_;
  static inline std::map<std::string, std::string> reasons_;
};

std::map<std::string, Strings> LinesByProcess(const std::string& output) {
  std::map<std::string, Strings> lines;
  std::istringstream stream(output);
  for (std::string line; std::getline(stream, line);) {
    const std::size_t end = line.find("] ");
    if (end != std::string::npos) lines[line.substr(1, end - 1)].push_back(line.substr(end + 2));
  }
  return lines;
}

TEST_P(RemoteLaunchTest, AJobTrains) {
  const ProgramResult result = RunLaunch({"-n", "3", "-s", "2"}, {kWorker, "train", "3"});
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(LeftInTheEnd(), IsEmpty());
}

TEST_P(RemoteLaunchTest, EachProcessKnowsItsPlace) {
  const ProgramResult result =
      RunLaunch(With({"-n", "3"}, kNoServers),
                Shell("echo $HEDDLE_RANK of $HEDDLE_JOB_WORKERS, here $HEDDLE_LOCAL_RANK of "
                      "$HEDDLE_LOCAL_SIZE, $DMLC_ROLE"));
  ASSERT_EQ(result.status, 0) << result.output;
  auto lines = LinesByProcess(result.output);
  const bool two = site_->num_hosts() == 2;  // then workers 0 and 1 on the first
  EXPECT_EQ(lines["worker 0"],
            Strings{two ? "0 of 3, here 0 of 2, worker" : "0 of 3, here 0 of 3, worker"});
  EXPECT_EQ(lines["worker 1"],
            Strings{two ? "1 of 3, here 1 of 2, worker" : "1 of 3, here 1 of 3, worker"});
  EXPECT_EQ(lines["worker 2"],
            Strings{two ? "2 of 3, here 0 of 1, worker" : "2 of 3, here 2 of 3, worker"});
}

TEST_P(RemoteLaunchTest, VariablesArgumentsAndFolderArePassedOn) {
  const TempFolder folder;
  setenv("HEDDLE_WARNING_MS", "77777", 1);
  setenv("HANDED_ON", "this ' one \" $HOME", 1);
  const ProgramResult result = RunLaunch(
      With({"-n", "1", "--env", "HANDED_ON", "--env", "GIVEN=a=b c", "--folder", folder / ""},
           kNoServers),
      Shell("echo \"$HEDDLE_WARNING_MS|$HANDED_ON|$GIVEN\"; pwd; echo 'two  spaces'"));
  unsetenv("HEDDLE_WARNING_MS");
  unsetenv("HANDED_ON");
  EXPECT_EQ(result.status, 0) << result.output;
  std::string path = folder / "";
  path.pop_back();
  EXPECT_EQ(LinesByProcess(result.output)["worker 0"],
            (Strings{"77777|this ' one \" $HOME|a=b c", path, "two  spaces"}));
}

// Of nothing that runs while the job does: not of ours, nor of what carries it to its hosts.
TEST_P(RemoteLaunchTest, TheTokenIsInNoCommandLine) {
  const TempFolder folder;
  const std::string end = folder / "end";
  RunningProgram launcher(
      Launch(With({"-n", "2", "-s", "2"}, kNoServers),
             Shell("echo token=$HEDDLE_TOKEN; while ! [ -e " + end + " ]; do sleep 0.02; done")),
      site_->Environment());
  const std::string line = launcher.ReadUntil("token=");
  std::string token = line.substr(line.rfind("token=") + 6);
  token.pop_back();
  ASSERT_EQ(token.size(), 64u) << line;
  int looked_at = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string command = ReadFile(entry.path().string() + "/cmdline");
    EXPECT_THAT(command, Not(HasSubstr(token)));
    if (command.find(kHeddle) != std::string::npos) ++looked_at;
  }
  EXPECT_GE(looked_at, 3) << "launcher and keepers at least";
  std::ofstream(end) << "now";
  EXPECT_EQ(launcher.Wait().status, 0);
}

TEST_P(RemoteLaunchTest, TheFirstFailuresStatusIsTheLaunchersAndNothingIsLeft) {
  // Worker 0 would live for ever, with descendants that are hard to find.
  const TempFolder folder;
  RunProgram({"mkfifo", folder / "ready"});
  const ProgramResult result =
      RunLaunch(With({"-n", "2", "--grace", "0.1"}, kNoServers),
                Shell("if [ $HEDDLE_RANK = 0 ]; then " + std::string(kProgram) + " tree > " +
                      folder / "ready" + "; fi; read line < " + folder / "ready" + "; exit 7"));
  EXPECT_EQ(result.status, 7) << result.output;
  EXPECT_THAT(result.output, AllOf(HasSubstr("[launch] worker 1 (process "),
                                   HasSubstr("exited with status 7; stopping the job")));
  EXPECT_THAT(LeftInTheEnd(), IsEmpty());
}

TEST_P(RemoteLaunchTest, AKilledWorkerIsNamedWithItsSignal) {
  const ProgramResult result =
      RunLaunch({"-n", "2", "-s", "1"}, Shell("if [ $HEDDLE_RANK = 1 ]; then kill -KILL $$; fi; "
                                              "sleep 1000"));
  EXPECT_EQ(result.status, 128 + SIGKILL);
  EXPECT_THAT(result.output, AllOf(HasSubstr("worker 1"), HasSubstr("signal 9 (Killed)")));
  EXPECT_THAT(LeftInTheEnd(), IsEmpty());
}

TEST_P(RemoteLaunchTest, ProgramsThatCannotBeRunAreNamed) {
  const ProgramResult result = RunLaunch(With({"-n", "2"}, kNoServers), {"no-such-program"});
  EXPECT_EQ(result.status, 127) << result.output;
  EXPECT_THAT(result.output, AllOf(HasSubstr("'no-such-program'"), HasSubstr("No such file")));
}

TEST_P(RemoteLaunchTest, AFolderThatIsNotThereIsNamed) {
  const ProgramResult result =
      RunLaunch(With({"-n", "1", "--folder", "/no/such/folder"}, kNoServers), {"true"});
  EXPECT_EQ(result.status, 1) << result.output;
  EXPECT_THAT(result.output, AllOf(HasSubstr("'/no/such/folder'"), HasSubstr("--folder")));
}

class RemoteLaunchSignalTest : public RemoteLaunchTest {
 protected:
  // A job whose workers have stubborn trees below them is ended by a signal to its launcher.
  void EndBy(int signal) {
    RunningProgram launcher(
        Launch(With({"-n", "2", "--grace", "0.1"}, kNoServers), {kProgram, "tree"}),
        site_->Environment());
    launcher.ReadUntil("ready");
    launcher.ReadUntil("ready");
    EXPECT_GE(MarkedProcesses(mark_).size(), 10u) << "the test would see nothing";
    launcher.Signal(signal);
    const ProgramResult result = launcher.Wait();
    EXPECT_EQ(result.status, signal == SIGKILL ? -SIGKILL : 128 + signal) << result.output;
    EXPECT_THAT(LeftInTheEnd(), IsEmpty());
  }
};

TEST_P(RemoteLaunchSignalTest, ToldToEndItLeavesNothing) {
  if (GetParam().launcher == "sge") GTEST_SKIP() << "qrsh keeps the signal to itself";
  EndBy(SIGTERM);
}
TEST_P(RemoteLaunchSignalTest, ASecondSignalDoesNotWaitForTheGraceToPass) {
  if (site_->Around({}) != Strings{})
    GTEST_SKIP() << "what is around the launcher has rules of its own";
  RunningProgram launcher(
      Launch(With({"-n", "2", "--grace", "3600"}, kNoServers), {kProgram, "tree"}),
      site_->Environment());
  launcher.ReadUntil("ready");
  launcher.ReadUntil("ready");
  launcher.Signal(SIGTERM);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // or the two may become one
  launcher.Signal(SIGINT);
  EXPECT_EQ(launcher.Wait().status, 128 + SIGTERM);
  EXPECT_THAT(LeftInTheEnd(), IsEmpty());
}
TEST_P(RemoteLaunchSignalTest, UserSignal1AsksRolesForTheirStateAndEndsNothing) {
  if (site_->Around({}) != Strings{})
    GTEST_SKIP() << "what is around the launcher has rules of its own";
  RunningProgram launcher(Launch({"-n", "2", "-s", "1"}, {kWorker, "forever"}),
                          site_->Environment());
  launcher.ReadUntil("started");
  launcher.ReadUntil("started");
  launcher.Signal(SIGUSR1);
  Strings beginnings = {"[scheduler] scheduler at "};
  if (GetParam().launcher != "mpi") {  // mpirun passes the signal on to end the processes
    for (const char* const name : {"server 0", "worker 0", "worker 1"}) {
      beginnings.push_back("[" + std::string(name) + "] " + name + ", scheduler at ");
    }
  }
  EXPECT_THAT(launcher.ReadUntilAll(beginnings), IsEmpty());
  launcher.Signal(SIGTERM);
  EXPECT_EQ(launcher.Wait().status, 128 + SIGTERM);
  EXPECT_THAT(LeftInTheEnd(), IsEmpty());
}
TEST_P(RemoteLaunchSignalTest, KilledItLeavesNothing) {
  if (site_->Around({}) != Strings{}) GTEST_SKIP() << "killed would be what is around the launcher";
  EndBy(SIGKILL);
}

std::string NameOfSite(const ::testing::TestParamInfo<SiteEntry>& info) {
  return info.param.launcher;
}
INSTANTIATE_TEST_SUITE_P(Launchers, RemoteLaunchTest, ::testing::ValuesIn(Sites()), NameOfSite);
INSTANTIATE_TEST_SUITE_P(Launchers, RemoteLaunchSignalTest, ::testing::ValuesIn(Sites()),
                         NameOfSite);

// What is ssh's own.

TEST(SshLaunch, AHostThatCannotBeReachedIsNamedWithSshsReason) {
  if (!MissingProgram({"ssh"}).empty()) GTEST_SKIP() << "ssh is not installed";
  const std::string port = FreePort();
  const ProgramResult result =
      RunProgram({kHeddle, "launch", "-n", "1", "--launcher", "ssh", "--hosts", "127.0.0.1",
                  "--launcher-arg=-p", "--launcher-arg=" + port, "--", "true"});
  EXPECT_EQ(result.status, 255);
  EXPECT_THAT(result.output,
              AllOf(HasSubstr("s on 127.0.0.1] ssh: connect to host 127.0.0.1 port " + port),
                    HasSubstr("Connection refused")));
}

TEST(SshLaunch, WithoutHostsItSaysHowToNameThem) {
  const ProgramResult result =
      RunProgram({kHeddle, "launch", "-n", "1", "--launcher", "ssh", "--", "true"});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, AllOf(HasSubstr("--hosts"), HasSubstr("--hosts-file")));
}

// A program in place of ssh, so that nothing else hands descriptors on.
TEST(SshLaunch, ProcessesInheritNoPipeOfTheirKeeper) {
  const TempFolder folder;
  const std::string path = std::getenv("PATH"), stand_in = folder / "ssh";
  std::ofstream(stand_in) << "#!/bin/sh\nfor last; do :; done; exec /bin/sh -c \"$last\"\n";
  std::filesystem::permissions(stand_in, std::filesystem::perms::owner_all);
  const Strings list = {"/bin/sh", "-c", "echo $(ls /proc/self/fd)"};
  const ProgramResult here = RunProgram(list);
  const ProgramResult result = RunProgram(
      With(With({kHeddle, "launch", "-n", "1", "--launcher", "ssh", "--hosts", "127.0.0.1"},
                kNoServers),
           With({"--"}, list)),
      {"PATH=" + folder.path() + ":" + path});
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("[worker 0] " + here.output));
}

// Those of this machine used to reach what carries the job there, and those of NCCL its processes.
TEST(SshLaunch, OfVariablesOfOnePlaceAHostsOwnCountUnderThoseThatAreGiven) {
  const TempFolder folder;
  const std::string path = std::getenv("PATH"), stand_in = folder / "ssh";
  std::ofstream(stand_in) << "#!/bin/sh\n"
                             "for last; do :; done\n"
                             "echo \"has ${HEDDLE_NODE_HOST-none} ${HEDDLE_NCCL_ID-none}\" >&2\n"
                             "export HEDDLE_NODE_HOST=hosts HEDDLE_BIND_ADDRESS=hosts\n"
                             "export HEDDLE_NCCL_ID=hosts\n"
                             "exec /bin/sh -c \"$last\"\n";
  std::filesystem::permissions(stand_in, std::filesystem::perms::owner_all);
  const ProgramResult result =
      RunProgram(With(With({kHeddle, "launch", "-n", "1", "--launcher", "ssh", "--hosts",
                            "127.0.0.1", "--env", "HEDDLE_BIND_ADDRESS=given"},
                           kNoServers),
                      {"--", "/bin/sh", "-c",
                       "echo $HEDDLE_NODE_HOST ${DMLC_NODE_HOST-none} $HEDDLE_BIND_ADDRESS "
                       "${HEDDLE_NCCL_ID-none} ${HEDDLE_NCCL_RANK-none}"}),
                 {"PATH=" + folder.path() + ":" + path, "HEDDLE_NODE_HOST=here",
                  "DMLC_NODE_HOST=here", "HEDDLE_NCCL_ID=here", "HEDDLE_NCCL_RANK=here"});
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_EQ(LinesByProcess(result.output)["worker 0"], Strings{"hosts none given none none"});
  EXPECT_THAT(result.output, HasSubstr("] has none none\n"));
}

// What is mpirun's own: of two that start at once on a host, one may take the other's folder away.
TEST(MpiLaunch, TheWorkersStartOnceTheServersMpirunIsUp) {
  if (!MissingProgram({"mpirun"}).empty()) GTEST_SKIP() << "mpirun is not installed";
  const TempFolder folder;
  const std::string path = std::getenv("PATH"), log = folder / "log", wrapper = folder / "mpirun";
  std::ofstream(wrapper) << "#!/bin/sh\necho begins >> " << log << "\nsleep 1\necho runs >> " << log
                         << "\nPATH=" << QuotedForShell(path) << "\nexec mpirun \"$@\"\n";
  std::filesystem::permissions(wrapper, std::filesystem::perms::owner_all);
  const ProgramResult result = RunProgram(
      {kHeddle, "launch", "-n", "1", "-s", "1", "--launcher", "mpi", "--", kWorker, "train", "1"},
      {"PATH=" + folder.path() + ":" + path, "OMPI_ALLOW_RUN_AS_ROOT=1",
       "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", "OMPI_MCA_orte_tmpdir_base=" + folder.path()});
  EXPECT_EQ(result.status, 0) << result.output;
  std::stringstream text;
  text << std::ifstream(log).rdbuf();
  EXPECT_EQ(text.str(), "begins\nruns\nbegins\nruns\n");
}

// Where nobody hears that the servers have come, the workers start all the same.
TEST(MpiLaunch, TheWorkersStartAlsoWhereMpirunChangesTheLines) {
  if (!MissingProgram({"mpirun"}).empty()) GTEST_SKIP() << "mpirun is not installed";
  const TempFolder folder;
  const ProgramResult result =
      RunProgram({kHeddle, "launch", "-n", "1", "-s", "1", "--launcher", "mpi",
                  "--launcher-arg=--tag-output", "--", kWorker, "train", "1"},
                 {"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
                  "OMPI_MCA_orte_tmpdir_base=" + folder.path()});
  EXPECT_EQ(result.status, 0) << result.output;
}

// Linux has no longer variables, nor words of a command line.
TEST(MpiLaunch, AJobThatIsTooLongForAVariableIsRefusedWithTheBound) {
  const std::string half(static_cast<std::size_t>(16 * sysconf(_SC_PAGESIZE)), 'x');
  const ProgramResult result = RunProgram(
      {kHeddle, "launch", "-n", "1", "-s", "1", "--launcher", "mpi", "--", "echo", half, half});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output,
              AllOf(HasSubstr(std::to_string(2 * half.size()) + " bytes"),
                    HasSubstr("arguments of the program, --env"), Not(HasSubstr("[launch]"))));
}

TEST(BatchLaunch, OutsideOfTheBatchSystemItSaysHowToGetIn) {
  const std::map<std::string, std::string> ways = {{"slurm", "salloc"}, {"sge", "qsub"}};
  for (const auto& [launcher, how] : ways) {
    const ProgramResult result =
        RunProgram({kHeddle, "launch", "-n", "1", "--launcher", launcher, "--", "true"});
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output, HasSubstr(how));
  }
}

}  // namespace
}  // namespace heddle::tools
