// Goal: whatever happens to a process of a job, at whatever moment, no other one waits in silence:
// calls of the others fail within three heartbeats and a second, naming role, rank and address; the
// job is gone in ten seconds. And what is shorter than the heartbeats disturbs nothing.
//
// Method: jobs of real processes of which one is killed, or stopped, at a moment that a seed picks.
// Times are the promised ones with the default heartbeat of a second, and kMargin for a machine
// that runs many tests at once; without the faults' effects, waits last for ever.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kvstore/support.h"
#include "tests/tools/child_process.h"
#include "tests/tools/job_processes.h"
#include "tests/tools/marked_processes.h"
#include "tools/testing/temp_folder.h"

namespace heddle::tools {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Process = JobProcesses::Process;

constexpr seconds kCallsFail{4};  // three heartbeats and a second
constexpr seconds kJobGone{10};
constexpr seconds kConnectDeadline{5};
constexpr seconds kMargin{6};

enum class Moment { kStart, kWork, kLeave };

class JobFaults : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* const rounds = std::getenv("HEDDLE_TEST_ROUNDS");
    if (rounds != nullptr) rounds_ = std::atoi(rounds);
  }

  int Below(int bound) { return static_cast<int>(random_() % static_cast<unsigned>(bound)); }
  void Sleep(int at_most_ms) {
    std::this_thread::sleep_for(std::chrono::microseconds(Below(at_most_ms * 1000)));
  }
  JobSpec RandomJob(int cycles) {
    JobSpec job;
    job.num_workers = Below(6) == 0 ? 16 : 1 + Below(5);
    job.num_servers = 1 + Below(4);
    job.program = {FAULT_PROGRAM, Below(3) == 0 ? "dist_async" : "dist_sync",
                   std::to_string(cycles)};
    job.environment = {"HEDDLE_NUM_WORKERS=2", "HEDDLE_SHARED_MEMORY=" + std::to_string(Below(2))};
    return job;
  }

  // `runs` jobs, each with one process to which `signal` comes at such a moment.
  void Fault(int signal, Moment moment, int runs);
  void OneFault(int signal, Moment moment);
  void ExpectEnds(JobProcesses& job, const Process& victim, Moment moment,
                  Clock::time_point started, Clock::time_point struck);
  void ExpectNames(const Process& survivor, const Process& victim, bool began);

  const std::uint64_t seed_ = kvstore_test::TestSeed();
  std::mt19937_64 random_{seed_};
  int rounds_ = 1;
};

// The last line of a worker whose call failed, and when that was.
struct FailedCall {
  Clock::time_point when;
  std::string error;
};
std::optional<FailedCall> FailedCallOf(const Process& worker) {
  static const std::regex line("failed at ([0-9]+): ([^\n]*)");
  std::smatch match;
  const std::string output = worker.Output();
  if (!std::regex_search(output, match, line)) return std::nullopt;
  return FailedCall{Clock::time_point(std::chrono::nanoseconds(std::stoll(match[1]))), match[2]};
}

double SecondsOf(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

void JobFaults::Fault(int signal, Moment moment, int runs) {
  for (int run = 0; run < runs * rounds_ && !HasFailure(); ++run) {
    SCOPED_TRACE("run " + std::to_string(run));
    OneFault(signal, moment);
  }
}

void JobFaults::OneFault(int signal, Moment moment) {
  const auto started = Clock::now();
  JobSpec spec = RandomJob(moment == Moment::kLeave ? 2 : 0);
  if (moment == Moment::kStart) {
    const auto deadline = std::to_string(milliseconds(kConnectDeadline).count());
    spec.environment.push_back("HEDDLE_CONNECT_DEADLINE_MS=" + deadline);
  }
  JobProcesses job(spec, random_);
  auto& all = job.processes();
  Process& victim = all[static_cast<std::size_t>(Below(static_cast<int>(all.size())))];
  if (moment == Moment::kStart) {
    Sleep(200);
  } else {
    const Process& herald = victim.name.starts_with("worker") ? victim : job.Find("worker 0");
    ASSERT_TRUE(job.WaitForOutput(herald, moment == Moment::kWork ? "joined\n" : "leaving\n",
                                  started + kForever))
        << job.Describe();
    Sleep(moment == Moment::kWork ? 300 : 10);
  }
  job.Look();
  if (victim.status) return;  // it has left already
  const auto struck = Clock::now();
  victim.program->Signal(signal);
  ExpectEnds(job, victim, moment, started, struck);
  const std::string state = victim.StatusLine("State");
  if (signal == SIGSTOP) {
    // It finds out by itself that it is late.
    victim.program->Signal(SIGCONT);
    EXPECT_TRUE(job.WaitForEnd(Clock::now() + kJobGone + kMargin)) << "the victim lives on";
  }
  if (HasFailure()) {
    ADD_FAILURE() << "signal " << signal << " to " << victim.name << " after "
                  << SecondsOf(struck - started) << " s, state then:" << state << "\n"
                  << job.Describe();
  }
}

void JobFaults::ExpectEnds(JobProcesses& job, const Process& victim, Moment moment,
                           Clock::time_point started, Clock::time_point struck) {
  EXPECT_TRUE(job.WaitForEnd(struck + kJobGone + kMargin, &victim)) << "somebody lives on";
  const bool began = job.Find("scheduler").Output().find("the job begins") != std::string::npos;
  const auto fail_by =
      (began ? struck + kCallsFail
             : std::max(struck + kCallsFail, started + kConnectDeadline + seconds(1))) +
      kMargin;
  Clock::duration slowest{0};
  for (const Process& survivor : job.processes()) {
    if (&survivor == &victim || !survivor.status) continue;
    if (moment == Moment::kLeave && *survivor.status == 0) continue;  // the job had ended
    EXPECT_EQ(*survivor.status, 1) << survivor.name;
    ExpectNames(survivor, victim, began);
    const auto failed = FailedCallOf(survivor);
    if (!failed) continue;
    EXPECT_LT(failed->when, fail_by) << survivor.name;
    slowest = std::max(slowest, failed->when - struck);
  }
  std::printf("%s of %zu: calls failed after %.3f s, all were gone after %.3f s\n",
              victim.name.c_str(), job.processes().size(), SecondsOf(slowest),
              SecondsOf(Clock::now() - struck));
}

void JobFaults::ExpectNames(const Process& survivor, const Process& victim, bool began) {
  const std::string output = survivor.Output();
  if (survivor.name.starts_with("worker")) {
    EXPECT_TRUE(FailedCallOf(survivor)) << survivor.name << " says nothing";
  }
  // Who has not come is only known by its number; who does not listen, by its address.
  const std::string named = victim.name + R"( (at |\()127\.0\.0\.1:[0-9]+)";
  const std::string missing = began ? "" : "|missing: |connect to the scheduler at 127";
  EXPECT_TRUE(std::regex_search(output, std::regex(named + missing)))
      << survivor.name << " does not name " << victim.name;
}

TEST_F(JobFaults, AProcessKilledAtTheStartIsNamed) { Fault(SIGKILL, Moment::kStart, 2); }
TEST_F(JobFaults, AProcessKilledAtWorkIsNamed) { Fault(SIGKILL, Moment::kWork, 6); }
TEST_F(JobFaults, AProcessKilledWhileOthersLeaveIsNamed) { Fault(SIGKILL, Moment::kLeave, 3); }
TEST_F(JobFaults, AProcessStoppedAtTheStartIsNamed) { Fault(SIGSTOP, Moment::kStart, 1); }
TEST_F(JobFaults, AProcessStoppedAtWorkIsNamed) { Fault(SIGSTOP, Moment::kWork, 3); }
TEST_F(JobFaults, AProcessStoppedWhileOthersLeaveIsNamed) { Fault(SIGSTOP, Moment::kLeave, 1); }

// The memory that processes share has a name for their own eyes only, and goes with them.
TEST_F(JobFaults, OfSharedMemoryNothingIsLeft) {
  JobSpec spec = RandomJob(/*cycles=*/0);
  spec.environment = {"HEDDLE_NUM_WORKERS=2", "HEDDLE_SHARED_MEMORY=1"};
  JobProcesses job(spec, random_);
  ASSERT_TRUE(job.WaitForOutput(job.Find("worker 0"), "joined\n", Clock::now() + kForever))
      << job.Describe();
  for (const Process& process : job.processes()) {
    const std::string maps = "/proc/" + std::to_string(process.program->pid()) + "/maps";
    std::ifstream file(maps);
    const std::string text(std::istreambuf_iterator<char>(file), {});
    EXPECT_THAT(text, HasSubstr("memfd:heddle")) << process.name;
  }
  for (const Process& process : job.processes()) process.program->Signal(SIGKILL);
  EXPECT_TRUE(job.WaitForEnd(Clock::now() + kForever));
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    EXPECT_THAT(entry.path().string(), Not(HasSubstr("heddle")));
  }
}

// Shorter than the heartbeats: nobody is taken for dead, and all sums are right.
TEST_F(JobFaults, APauseShorterThanTheHeartbeatsChangesNothing) {
  for (int run = 0; run < 2 * rounds_ && !HasFailure(); ++run) {
    JobSpec spec = RandomJob(/*cycles=*/40);
    JobProcesses job(spec, random_);
    auto& all = job.processes();
    for (int pause = 0; pause < 3; ++pause) {
      Process& paused = all[static_cast<std::size_t>(Below(static_cast<int>(all.size())))];
      Sleep(100);
      job.Look();
      if (paused.status) continue;
      paused.program->Signal(SIGSTOP);
      Sleep(1000);
      paused.program->Signal(SIGCONT);
    }
    const bool ended = job.WaitForEnd(Clock::now() + kForever);
    EXPECT_TRUE(ended);
    for (const Process& process : all) EXPECT_EQ(process.status, 0) << process.name;
    if (HasFailure()) ADD_FAILURE() << job.Describe();
  }
}

// Busy is not dead: the main thread sleeps while eight others take all the CPU.
TEST_F(JobFaults, ABusyWorkerIsNotTakenForDead) {
  const char* const given = std::getenv("HEDDLE_BUSY_SECONDS");
  const std::string seconds = given == nullptr ? "6" : given;  // twice the heartbeats' patience
  JobProcesses job({.num_workers = 2,
                    .num_servers = 1,
                    .program = {FAULT_PROGRAM, "dist_sync", "busy", seconds}},
                   random_);
  EXPECT_TRUE(job.WaitForEnd(Clock::now() + std::chrono::seconds(std::stoi(seconds)) + kForever));
  for (const Process& process : job.processes()) EXPECT_EQ(process.status, 0) << process.name;
  if (HasFailure()) ADD_FAILURE() << job.Describe();
}

// With a launcher, which ends what is left.
class LaunchedJobFaults : public JobFaults {
 protected:
  static pid_t Find(const std::string& mark, const std::string& role, int rank) {
    for (const MarkedProcess& process : MarkedProcesses(mark)) {
      const std::string entries = std::string(1, '\0') + process.environment;
      const auto has = [&](const std::string& entry) {
        return entries.find('\0' + entry + '\0') != std::string::npos;
      };
      const std::string program = role == "worker" ? FAULT_PROGRAM : HEDDLE_COMMAND;
      if (process.command.ends_with(program.substr(program.rfind('/'))) &&
          has("HEDDLE_ROLE=" + role) && (rank < 0 || has("HEDDLE_RANK=" + std::to_string(rank)))) {
        return process.pid;
      }
    }
    return -1;
  }
};

TEST_F(LaunchedJobFaults, TheFirstFailuresStatusIsTheLaunchersAndNothingIsLeft) {
  for (int run = 0; run < 3 * rounds_ && !HasFailure(); ++run) {
    const TempFolder folder;
    const std::string mark = "FAULTS_MARK=" + std::to_string(random_());
    const int workers = 1 + Below(5), servers = 1 + Below(3);
    RunningProgram launcher(
        {HEDDLE_COMMAND, "launch", "-n", std::to_string(workers), "-s", std::to_string(servers),
         "--env", mark, "--", FAULT_PROGRAM, "dist_sync", "0"},
        {}, folder / "output");
    const auto output = [&] { return ReadFile(folder / "output"); };
    const auto until = Clock::now() + kForever;
    while (output().find("joined") == std::string::npos && Clock::now() < until) {
      std::this_thread::sleep_for(milliseconds(5));
    }
    Sleep(200);
    const int place = Below(1 + servers + workers);
    const std::string role = place == 0 ? "scheduler" : place <= servers ? "server" : "worker";
    const int rank = place == 0 ? -1 : place <= servers ? place - 1 : place - 1 - servers;
    const pid_t victim = Find(mark, role, rank);
    ASSERT_GT(victim, 0) << role << " " << rank << "\n" << output();
    const int signal = run % 3 == 2 ? SIGSTOP : SIGKILL;
    SCOPED_TRACE(::testing::Message() << "signal " << signal << " to " << role << " " << rank);
    const auto struck = Clock::now();
    kill(victim, signal);
    std::optional<int> status;
    while (!status && Clock::now() < struck + kForever) {
      status = launcher.Ended();
      std::this_thread::sleep_for(milliseconds(5));
    }
    EXPECT_LT(Clock::now() - struck, kJobGone + kMargin);
    // A stopped one has not failed: those that wait for it have.
    EXPECT_EQ(status, signal == SIGKILL ? 128 + SIGKILL : 1) << output();
    std::vector<std::string> left;
    for (const MarkedProcess& process : MarkedProcesses(mark)) left.push_back(process.command);
    EXPECT_THAT(left, IsEmpty());
    std::printf("launched, %s %d, signal %d: gone after %.3f s\n", role.c_str(), rank, signal,
                SecondsOf(Clock::now() - struck));
  }
}

}  // namespace
}  // namespace heddle::tools
