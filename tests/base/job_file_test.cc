#include "base/job_file.h"

#include <cstdlib>
#include <string>

#include <gtest/gtest.h>
#include <unistd.h>

namespace heddle {
namespace {

class JobFileTest : public ::testing::Test {
 protected:
  JobFileTest() { Set(nullptr, nullptr, nullptr); }
  ~JobFileTest() override { Set(nullptr, nullptr, nullptr); }

  static void Set(const char* role, const char* rank, const char* dmlc_role) {
    SetOne("HEDDLE_ROLE", role);
    SetOne("HEDDLE_RANK", rank);
    SetOne("DMLC_ROLE", dmlc_role);
  }

 private:
  static void SetOne(const char* name, const char* value) {
    if (value != nullptr) {
      setenv(name, value, 1);
    } else {
      unsetenv(name);
    }
  }
};

TEST_F(JobFileTest, OutsideOfAJobANameStaysAsItIs) {
  EXPECT_EQ(PlaceInJob(), "");
  EXPECT_EQ(JobFileName("run.trace"), "run.trace");
  EXPECT_EQ(JobFileName(""), "");
  EXPECT_EQ(JobFileName("a-%r.trace"), "a-process.trace");
  EXPECT_EQ(JobFileName("a-%p.trace"), "a-%p.trace");
}

TEST_F(JobFileTest, InAJobEachProcessHasAFileOfItsOwn) {
  Set("worker", "12", nullptr);
  EXPECT_EQ(PlaceInJob(), "worker12");
  EXPECT_EQ(JobFileName("run.trace"), "run.worker12.trace");
  EXPECT_EQ(JobFileName("/a.b/run"), "/a.b/run.worker12");
  EXPECT_EQ(JobFileName("/a.b/.run"), "/a.b/.run.worker12");
  EXPECT_EQ(JobFileName("/a/%r/x-%r.trace"), "/a/worker12/x-worker12.trace");
  EXPECT_EQ(JobFileName("x-%p.trace"), "x-%p.trace");  // as different as need be already
  EXPECT_EQ(JobFileName(""), "");                      // no file is wanted
}

TEST_F(JobFileTest, TheRolesOfOldLaunchersCountToo) {
  Set(nullptr, nullptr, "scheduler");
  EXPECT_EQ(JobFileName("run.trace"), "run.scheduler.trace");
  Set("server", "0", "worker");
  EXPECT_EQ(JobFileName("run.trace"), "run.server0.trace");
}

TEST_F(JobFileTest, WithoutARankItIsTheProcess) {
  Set("worker", nullptr, nullptr);
  EXPECT_EQ(JobFileName("run.trace"), "run.worker-" + std::to_string(getpid()) + ".trace");
}

}  // namespace
}  // namespace heddle
