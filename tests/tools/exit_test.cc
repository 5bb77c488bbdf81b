// How the process of a worker ends, and what the others learn of it: only one that exits with
// status 0 has left in order.
#include <memory>
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

using Strings = std::vector<std::string>;

struct End {
  ProgramResult scheduler, server, survivor, last;
};

// A job of two workers, of which the last ends as it is told, without a launcher that would end the
// others.
End RunJob(const std::string& end, int status) {
  const std::string port = FreePort();
  const auto settings = [&](Strings more) {
    more.insert(more.end(), {"HEDDLE_ROOT_HOST=127.0.0.1", "HEDDLE_ROOT_PORT=" + port,
                             "HEDDLE_JOB_WORKERS=2", "HEDDLE_JOB_SERVERS=1"});
    return more;
  };
  const Strings worker = {WORKER_PROGRAM, "survive", end, std::to_string(status)};
  RunningProgram scheduler({HEDDLE_COMMAND, "scheduler"}, settings({}));
  RunningProgram server({HEDDLE_COMMAND, "server"}, settings({}));
  RunningProgram survivor(worker, settings({"HEDDLE_RANK=0"}));
  RunningProgram last(worker, settings({"HEDDLE_RANK=1"}));
  End result;
  result.last = last.Wait();
  result.survivor = survivor.Wait();
  result.server = server.Wait();
  result.scheduler = scheduler.Wait();
  return result;
}

class BadEnd : public ::testing::TestWithParam<std::string> {};

TEST_P(BadEnd, FailsTheJobNamingTheRankAndTheStatus) {
  const End end = RunJob(GetParam(), 3);
  EXPECT_EQ(end.last.status, 3) << end.last.output;
  EXPECT_EQ(end.survivor.status, 0) << end.survivor.output;
  for (const ProgramResult* const other : {&end.survivor, &end.server, &end.scheduler}) {
    EXPECT_THAT(other->output, AllOf(HasSubstr("worker 1"), HasSubstr("exited with status 3")));
  }
  EXPECT_EQ(end.server.status, 1);
  EXPECT_EQ(end.scheduler.status, 1);
}

INSTANTIATE_TEST_SUITE_P(All, BadEnd, ::testing::Values("exit", "static", "return"),
                         [](const auto& info) { return info.param; });

// What kills the process by std::terminate. It used to be told to others as a connection that was
// closed.
class UncaughtException : public ::testing::TestWithParam<std::string> {};

TEST_P(UncaughtException, FailsTheJobNamingTheRankAndTheException) {
  const End end = RunJob(GetParam(), 0);
  EXPECT_EQ(end.last.status, -6) << end.last.output;  // aborted
  EXPECT_THAT(end.last.output, HasSubstr("terminate called after throwing"));
  for (const ProgramResult* const other : {&end.survivor, &end.server, &end.scheduler}) {
    EXPECT_THAT(other->output,
                AllOf(HasSubstr("worker 1"),
                      HasSubstr("an uncaught exception: std::runtime_error: out of luck")));
  }
  EXPECT_EQ(end.scheduler.status, 1);
}

INSTANTIATE_TEST_SUITE_P(All, UncaughtException, ::testing::Values("throw", "throw-in-thread"),
                         [](const auto& info) { return info.index == 0 ? "InMain" : "InAThread"; });

TEST(Exit, ATerminateWithoutAnExceptionIsToldAsSuch) {
  const End end = RunJob("terminate", 0);
  EXPECT_EQ(end.last.status, -6) << end.last.output;
  EXPECT_THAT(end.survivor.output, AllOf(HasSubstr("worker 1"), HasSubstr("std::terminate")));
}

// The handler that the program has set before is called as well, and may end the process as it
// likes.
TEST(Exit, AProgramsOwnTerminateHandlerIsCalled) {
  const End end = RunJob("throw-to-handler", 7);
  EXPECT_EQ(end.last.status, 7) << end.last.output;
  EXPECT_THAT(end.survivor.output, AllOf(HasSubstr("worker 1"), HasSubstr("out of luck")));
}

// Who drops its stores on the way to a handler does not know the exception.
TEST(Exit, AnExceptionThatIsCaughtBehindTheStoresFailsTheJobSayingSo) {
  const End end = RunJob("throw-and-catch", 3);
  EXPECT_EQ(end.last.status, 3) << end.last.output;
  for (const ProgramResult* const other : {&end.survivor, &end.server, &end.scheduler}) {
    EXPECT_THAT(other->output, AllOf(HasSubstr("worker 1"), HasSubstr("an exception ended")));
  }
}

// Of the number that exit() is given others see the last eight bits.
TEST(Exit, AMultipleOf256IsNoFailure) {
  const End end = RunJob("return", 512);
  EXPECT_EQ(end.last.status, 0) << end.last.output;
  EXPECT_THAT(end.survivor.output, Not(HasSubstr("lost")));
  EXPECT_EQ(end.server.status, 0) << end.server.output;
  EXPECT_EQ(end.scheduler.status, 0) << end.scheduler.output;
}

}  // namespace
}  // namespace heddle::tools
