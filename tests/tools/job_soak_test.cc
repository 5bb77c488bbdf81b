// Goal: a job that runs and runs takes no more memory than at its start. Method: all kinds of
// pushes and pulls (soak_program.cc) for HEDDLE_SOAK_SECONDS; the resident memory of each role is
// read every second and must stay, after the first minute, within 1 %.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kvstore/support.h"
#include "tests/tools/job_processes.h"

namespace heddle::tools {
namespace {

using std::chrono::seconds;
using Process = JobProcesses::Process;

TEST(JobSoak, MemoryStaysWhereItWas) {
  std::mt19937_64 random(kvstore_test::TestSeed());
  const char* const given = std::getenv("HEDDLE_SOAK_SECONDS");
  const int length = given == nullptr ? 20 : std::atoi(given);
  // In the short form the first minute is some seconds and rounds, in which the last arenas and
  // pools may not have come; 1 % of a few ten MiB is less than one of them.
  const bool is_short = length < 120;
  const seconds warm_up(is_short ? length / 2 : 60);
  const double tolerance = is_short ? 0.1 : 0.01;
  JobProcesses job({.num_workers = 2,
                    .num_servers = 2,
                    .program = {SOAK_PROGRAM, std::to_string(length), is_short ? "60" : "8000"},
                    .environment = {"HEDDLE_BIGARRAY_BOUND=200000", "HEDDLE_NUM_WORKERS=2"}},
                   random);
  std::map<std::string, std::vector<long>> readings;  // by role, of the time after the warm-up
  const auto over = [&] {
    const auto& all = job.processes();
    return std::any_of(all.begin(), all.end(),
                       [](const Process& p) { return p.status.has_value(); });
  };
  auto next = Clock::now() + warm_up;
  EXPECT_FALSE(job.WaitUntil(next, over));
  EXPECT_TRUE(job.WaitForOutput(job.Find("worker 0"),
                                is_short ? "\n20 rounds\n" : "\n6000 rounds\n",
                                next + seconds(is_short ? 500 : 1500)));
  next = std::max(next, Clock::now());
  while (!job.WaitUntil(next += seconds(1), over)) {
    for (const Process& process : job.processes()) {
      readings[process.name].push_back(process.ResidentKiB());
    }
  }
  EXPECT_TRUE(job.WaitForEnd(Clock::now() + seconds(120)));
  for (const Process& process : job.processes()) {
    EXPECT_EQ(process.status, 0) << process.name;
  }
  if (HasFailure()) ADD_FAILURE() << job.Describe();
  const std::string output = job.Find("worker 0").Output();
  std::printf("%s", output.substr(output.rfind('\n', output.size() - 2) + 1).c_str());
  for (const auto& [role, values] : readings) {
    ASSERT_FALSE(values.empty());
    const auto [least, most] = std::minmax_element(values.begin(), values.end());
    std::printf(
        "%s: %ld KiB after %d s, then %ld to %ld, at the end %ld (%+.2f %%)\n", role.c_str(),
        values.front(), static_cast<int>(warm_up.count()), *least, *most, values.back(),
        100.0 * static_cast<double>(*most - values.front()) / static_cast<double>(values.front()));
    EXPECT_LE(static_cast<double>(*most), static_cast<double>(values.front()) * (1 + tolerance))
        << role;
  }
}

}  // namespace
}  // namespace heddle::tools
