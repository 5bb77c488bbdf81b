#include "base/check.h"

#include <gtest/gtest.h>

namespace heddle {
namespace {

TEST(CheckDeathTest, FailureNamesFileConditionAndMessage) {
  const int bytes = 3;
  EXPECT_DEATH(CHECK(bytes % 4 == 0, "{} bytes for op {}", bytes, "add"),
               "check_test.cc:[0-9]+: CHECK failed: bytes % 4 == 0: 3 bytes for op add");
}

TEST(CheckDeathTest, FailureWithoutMessageNamesTheCondition) {
  EXPECT_DEATH(CHECK(1 + 1 == 3), "CHECK failed: 1 \\+ 1 == 3");
}

TEST(Check, SuccessEvaluatesTheConditionOnceAndTheMessageNever) {
  int conditions = 0;
  int messages = 0;
  CHECK(++conditions > 0, "{}", ++messages);
  EXPECT_EQ(conditions, 1);
  EXPECT_EQ(messages, 0);
}

TEST(Check, IsOneStatement) {
  if (true)
    CHECK(true);
  else
    FAIL() << "the else belongs to the if around the CHECK";
}

#ifdef HEDDLE_DCHECKS
TEST(CheckDeathTest, DcheckFailsWhenEnabled) { EXPECT_DEATH(DCHECK(false, "{}", 7), "false: 7"); }
#else
TEST(Check, DcheckIsNotEvaluatedWhenDisabled) {
  int conditions = 0;
  DCHECK(++conditions > 100);
  EXPECT_EQ(conditions, 0);
}
#endif

}  // namespace
}  // namespace heddle
