// At its deadline a push gives the program's memory back, and the job goes on.
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/tools/child_process.h"
#include "tests/tools/free_port.h"

namespace heddle::tools {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Deadline, NobodyReadsAnArrayWhosePushHasTimedOut) {
  // The server stands still for as long as the deadline, which must not make it dead.
  const std::vector<std::string> settings = {
      "DMLC_PS_ROOT_URI=127.0.0.1", "DMLC_PS_ROOT_PORT=" + FreePort(), "DMLC_NUM_WORKER=1",
      "DMLC_NUM_SERVER=1",          "HEDDLE_OP_DEADLINE_MS=6000",      "HEDDLE_HEARTBEAT_MS=20000"};
  RunningProgram scheduler({HEDDLE_COMMAND, "scheduler"}, settings);
  RunningProgram server({HEDDLE_COMMAND, "server"}, settings);
  const ProgramResult worker =
      RunProgram({DEADLINE_PROGRAM, std::to_string(server.pid())}, settings);
  EXPECT_EQ(worker.status, 0) << worker.output;
  EXPECT_THAT(worker.output, AllOf(HasSubstr("push key 'big': no answer from server 0"),
                                   HasSubstr("small has 7\n"), HasSubstr("round: "),
                                   HasSubstr("big has 3\n"), Not(HasSubstr("Bad address"))));
  EXPECT_EQ(server.Wait().status, 0);
  EXPECT_EQ(scheduler.Wait().status, 0);
}

}  // namespace
}  // namespace heddle::tools
