// `heddle doctor --in-job` names workers whose wall clocks differ. Method: one worker's clock is an
// hour ahead, by a library that is loaded into it (clock_ahead.cc).
#include <string>
#include <utility>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/tools/child_process.h"

namespace heddle::tools {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

ProgramResult DoctorWithClockAheadOf(const std::string& rank) {
  const std::string program = fmt::format(
      "if test \"$HEDDLE_RANK\" = {}; then export LD_PRELOAD={}; fi; exec {} doctor --in-job", rank,
      CLOCK_AHEAD, HEDDLE_COMMAND);
  return RunProgram(
      {HEDDLE_COMMAND, "launch", "-n", "2", "-s", "1", "--", "/bin/sh", "-c", program});
}

TEST(DoctorClocks, AWorkerWhoseClockIsAheadIsNamed) {
  for (const auto& [ahead, behind] : {std::pair{"1", "0"}, std::pair{"0", "1"}}) {
    const ProgramResult result = DoctorWithClockAheadOf(ahead);
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output, ContainsRegex(fmt::format(
                                   "PROBLEM: (359|360)[0-9]\\.[0-9]+ s between worker {} and "
                                   "worker {}: .*set the clocks by NTP",
                                   behind, ahead)));
  }
}

TEST(DoctorClocks, ThoseOfOneMachineAgree) {
  const ProgramResult result = DoctorWithClockAheadOf("none");
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, ContainsRegex("clocks +0\\.[0-9]+ s between worker"));
  EXPECT_THAT(result.output, Not(HasSubstr("PROBLEM")));
}

}  // namespace
}  // namespace heddle::tools
