// `heddle run`: jobs started by what numbers processes and knows nothing of heddle, real mpirun and
// srun among them, with the token in a file.
#include <algorithm>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <ifaddrs.h>
#include <net/if.h>

#include "tests/tools/child_process.h"
#include "tests/tools/free_port.h"
#include "tests/tools/site.h"
#include "tools/testing/temp_folder.h"

namespace heddle::tools {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

using Strings = std::vector<std::string>;

Strings Plus(Strings a, const Strings& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// An address of this machine that is not loopback, as between the machines of a cluster.
std::optional<std::string> OtherAddress() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return std::nullopt;
  std::optional<std::string> found;
  for (const ifaddrs* entry = list; entry != nullptr && !found; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != AF_INET ||
        (entry->ifa_flags & IFF_LOOPBACK) != 0 || (entry->ifa_flags & IFF_UP) == 0) {
      continue;
    }
    char text[INET_ADDRSTRLEN];
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(entry->ifa_addr)->sin_addr, text,
              sizeof(text));
    found = text;
  }
  freeifaddrs(list);
  return found;
}

class RunTest : public ::testing::Test {
 protected:
  RunTest() { std::ofstream(token_file_) << "the secret of the job\n"; }

  // Of 2 workers and 1 server: 4 processes.
  static Strings Run(const Strings& program) {
    return Plus({kHeddle, "run", "-n", "2", "-s", "1", "--"}, program);
  }
  Strings Environment() const {
    return {"HEDDLE_TOKEN_FILE=" + token_file_, "HEDDLE_ROOT_PORT=" + port_,
            "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"};
  }
  static Strings Mpirun(int processes, const Strings& command) {
    return Plus({"mpirun", "--quiet", "--oversubscribe", "--bind-to", "none", "-np",
                 std::to_string(processes)},
                command);
  }

  const TempFolder folder_;
  const std::string token_file_ = folder_ / "token";
  const std::string port_ = FreePort();
};

// A machine may have mpirun and not let it work.
#define SKIP_WITHOUT_MPIRUN()                                                     \
  SKIP_WITHOUT("checks", "mpirun");                                               \
  if (const ProgramResult alone = RunProgram(Mpirun(1, {"true"}), Environment()); \
      alone.status != 0)                                                          \
  GTEST_SKIP() << "without heddle: " << alone.output

#define SKIP_WITHOUT(group, ...)                                                   \
  if (const std::string missing = MissingProgram({__VA_ARGS__}); !missing.empty()) \
  GTEST_SKIP() << missing << " is not installed: tools/setup.sh " << group

TEST_F(RunTest, UnderMpirunAJobTrainsWithTheTokenOfAFile) {
  SKIP_WITHOUT_MPIRUN();
  const ProgramResult result = RunProgram(Mpirun(4, Run({kWorker, "train", "3"})), Environment());
  EXPECT_EQ(result.status, 0) << result.output;
}

TEST_F(RunTest, UnderMpirunTheRankIsThatAmongTheWorkers) {
  SKIP_WITHOUT_MPIRUN();
  const ProgramResult result = RunProgram(
      Mpirun(4, {"/bin/sh", "-c",
                 // The other roles would wait for workers that only say who they are.
                 "[ $OMPI_COMM_WORLD_RANK -lt 2 ] || exec " + std::string(kHeddle) +
                     " run -n 2 -s 1 -- sh -c 'echo $HEDDLE_ROLE $HEDDLE_RANK $HEDDLE_LOCAL_RANK "
                     "$HEDDLE_LOCAL_SIZE $DMLC_NUM_SERVER $HEDDLE_ROOT_HOST'"}),
      Environment());
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, AllOf(HasSubstr("worker 0 0 2 1 127.0.0.1\n"),
                                   HasSubstr("worker 1 1 2 1 127.0.0.1\n")));
}

TEST_F(RunTest, AsManyProcessesAsTheJobHasOrBothCountsAreNamed) {
  const ProgramResult result = RunProgram(
      Run({"true"}), Plus(Environment(), {"OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=3"}));
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output,
              AllOf(HasSubstr("OMPI_COMM_WORLD_RANK 1 is one of 3"), HasSubstr("expected 4")));
}

TEST_F(RunTest, OptionsComeBeforeTheEnvironment) {
  const ProgramResult result = RunProgram(
      {kHeddle, "run", "-n", "2", "-s", "1", "--root-host", "127.0.0.1", "--root-port", "4321",
       "--", "sh", "-c", "echo at $HEDDLE_ROOT_HOST:$HEDDLE_ROOT_PORT"},
      Plus(Environment(),
           {"HEDDLE_ROOT_HOST=10.0.0.1", "OMPI_COMM_WORLD_RANK=3", "OMPI_COMM_WORLD_SIZE=4"}));
  EXPECT_THAT(result.output, HasSubstr("at 127.0.0.1:4321"));
}

// CLI11 takes words in brackets apart, and drops what is empty in them.
TEST_F(RunTest, WordsInBracketsReachTheProgramAsTheyAre) {
  const Strings environment =
      Plus(Environment(),
           {"HEDDLE_ROOT_HOST=127.0.0.1", "OMPI_COMM_WORLD_RANK=3", "OMPI_COMM_WORLD_SIZE=4"});
  EXPECT_EQ(RunProgram(Run({"echo", "[1,2]", "[]", "x"}), environment).output, "[1,2] [] x\n");
  EXPECT_EQ(
      RunProgram({kHeddle, "run", "-n", "2", "-s", "1", "echo", "-s", "--", "[1,2]"}, environment)
          .output,
      "-s -- [1,2]\n");
}

// What Slurm says of mpirun's daemons says nothing of the processes that they start.
TEST_F(RunTest, SlurmIsAskedWhereItsOwnTasksAre) {
  const Strings program = {"--", "sh", "-c", "echo ${HEDDLE_LOCAL_RANK-none} $HEDDLE_ROOT_HOST"};
  const Strings run = {kHeddle, "run", "-n", "4", "-s", "2"};
  const Strings step = {"SLURM_STEP_NUM_NODES=1", "SLURM_STEP_NODELIST=node9"};
  const Strings mpi = {"OMPI_COMM_WORLD_RANK=6", "OMPI_COMM_WORLD_SIZE=7",
                       "OMPI_COMM_WORLD_LOCAL_SIZE=3"};
  const Strings daemon = {"SLURM_PROCID=0", "SLURM_STEP_NUM_TASKS=1"};
  for (const Strings& environment : {Plus(step, mpi), Plus(Plus(step, mpi), daemon)}) {
    const ProgramResult given =
        RunProgram(Plus(Plus(run, {"--root-host", "127.0.0.1"}), program), environment);
    EXPECT_EQ(given.output, "none 127.0.0.1\n");
    const ProgramResult missing = RunProgram(Plus(run, program), environment);
    EXPECT_EQ(missing.status, 1);
    EXPECT_THAT(missing.output, HasSubstr("root_host is missing"));
  }
  const Strings task = {"SLURM_PROCID=6", "SLURM_STEP_NUM_TASKS=7"};
  EXPECT_EQ(RunProgram(Plus(run, program), Plus(step, task)).output, "3 127.0.0.1\n");
  // As with srun --mpi=pmi2.
  EXPECT_EQ(
      RunProgram(Plus(run, program), Plus(Plus(step, task), {"PMI_RANK=6", "PMI_SIZE=7"})).output,
      "3 127.0.0.1\n");
}

TEST_F(RunTest, ARootPortThatIsNoneIsNamedWithItsVariable) {
  for (const std::string variable : {"HEDDLE_ROOT_PORT", "DMLC_PS_ROOT_PORT"}) {
    for (const std::string port : {"90 91", "http", "0", "65536"}) {
      const ProgramResult result =
          RunProgram(Run({"true"}),
                     {"HEDDLE_ROOT_HOST=127.0.0.1", "HEDDLE_ROOT_PORT=", "DMLC_PS_ROOT_PORT=4321",
                      variable + "=" + port, "OMPI_COMM_WORLD_RANK=3", "OMPI_COMM_WORLD_SIZE=4"});
      EXPECT_EQ(result.status, 1);
      EXPECT_THAT(result.output,
                  HasSubstr("root_port: expected a whole number from 1 to 65535, given '" + port +
                            "' (" + variable + ")"));
    }
  }
}

TEST_F(RunTest, UnderSrunAJobTrainsWithTheTokenOfAFile) {
  SKIP_WITHOUT("batch", "slurmctld", "slurmd", "munged", "salloc", "srun");
  const auto site = std::find_if(Sites().begin(), Sites().end(),
                                 [](const SiteEntry& entry) { return entry.launcher == "slurm"; });
  const std::unique_ptr<Site> slurm = site->make();
  const ProgramResult result = RunProgram(
      slurm->Around(Plus({"srun", "--overcommit", "--ntasks=4"}, Run({kWorker, "train", "3"}))),
      Plus(Environment(), slurm->Environment()));
  EXPECT_EQ(result.status, 0) << result.output;
}

// As the pods of an Indexed Job: an index, and nothing on how many there are.
class IndexedJobTest : public RunTest {
 protected:
  // The processes of a job, the workers last; processes[i] runs with `token_file(i)`.
  template <class TokenFile>
  std::vector<std::unique_ptr<RunningProgram>> Start(const std::string& root_host,
                                                     const TokenFile& token_file) const {
    std::vector<std::unique_ptr<RunningProgram>> processes;
    for (int i = 0; i < 4; ++i) {
      processes.push_back(std::make_unique<RunningProgram>(
          Plus({kHeddle, "run", "-n", "2", "-s", "1", "--root-host", root_host, "--"},
               {kWorker, "train", "3"}),
          Strings{"JOB_COMPLETION_INDEX=" + std::to_string(i), "HEDDLE_ROOT_PORT=" + port_,
                  "HEDDLE_CONNECT_DEADLINE_MS=20000", "HEDDLE_TOKEN_FILE=" + token_file(i)}));
    }
    return processes;
  }
};

TEST_F(IndexedJobTest, AJobTrainsBeyondLoopbackWithTheTokenOfAFile) {
  const std::optional<std::string> address = OtherAddress();
  if (!address) GTEST_SKIP() << "this machine has no address but loopback";
  for (const auto& process : Start(*address, [this](int) { return token_file_; })) {
    const ProgramResult result = process->Wait();
    EXPECT_EQ(result.status, 0) << result.output;
  }
}

TEST_F(IndexedJobTest, BeyondLoopbackWithoutATokenNothingStarts) {
  const std::optional<std::string> address = OtherAddress();
  if (!address) GTEST_SKIP() << "this machine has no address but loopback";
  const auto processes = Start(*address, [](int) { return std::string(); });
  const ProgramResult scheduler = processes[0]->Wait();
  EXPECT_EQ(scheduler.status, 1);
  EXPECT_THAT(scheduler.output, AllOf(HasSubstr("HEDDLE_TOKEN"), HasSubstr("HEDDLE_TOKEN_FILE")));
}

TEST_F(IndexedJobTest, AProcessWithAnotherFilesTokenIsRefusedAndShowsNeither) {
  const std::string other = folder_ / "other";
  std::ofstream(other) << "some other secret";
  const auto processes = Start("127.0.0.1", [&](int i) { return i == 3 ? other : token_file_; });
  const ProgramResult stranger = processes[3]->Wait();
  EXPECT_NE(stranger.status, 0);
  EXPECT_THAT(stranger.output,
              AllOf(HasSubstr("token"), HasSubstr(other), Not(HasSubstr("secret"))));
}

TEST_F(IndexedJobTest, WithoutAnIndexOrAHostItSaysWhatIsMissing) {
  const ProgramResult none = RunProgram(Run({"true"}), Environment());
  EXPECT_EQ(none.status, 1);
  EXPECT_THAT(none.output, AllOf(HasSubstr("JOB_COMPLETION_INDEX"), HasSubstr("SLURM_PROCID"),
                                 HasSubstr("from 0 to 3")));
  const ProgramResult bad =
      RunProgram(Run({"true"}), Plus(Environment(), {"JOB_COMPLETION_INDEX=4"}));
  EXPECT_THAT(bad.output, AllOf(HasSubstr("from 0 to 3"), HasSubstr("'4'")));
  const ProgramResult no_host =
      RunProgram(Run({"true"}), Plus(Environment(), {"JOB_COMPLETION_INDEX=0"}));
  EXPECT_EQ(no_host.status, 1);
  EXPECT_THAT(no_host.output, AllOf(HasSubstr("root_host"), HasSubstr("--root-host")));
}

}  // namespace
}  // namespace heddle::tools
