#include "base/env.h"

#include <heddle/error.h>

#include <cstdint>
#include <cstdlib>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/message_of.h"

namespace heddle {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kName[] = "HEDDLE_ENV_TEST";

class EnvTest : public ::testing::Test {
 protected:
  ~EnvTest() override { unsetenv(kName); }
  static void Set(const std::string& value) { setenv(kName, value.c_str(), 1); }
};

TEST_F(EnvTest, UnsetGivesTheFallback) {
  unsetenv(kName);
  EXPECT_EQ(EnvString(kName), std::nullopt);
  EXPECT_EQ(EnvString(kName, "x"), "x");
  EXPECT_EQ(EnvInt(kName, -7), -7);
  EXPECT_EQ(EnvUint64(kName, 7), 7u);
  EXPECT_TRUE(EnvBool(kName, true));
  EXPECT_EQ(EnvChoice(kName, {"a", "b"}, 1), 1u);
}

TEST_F(EnvTest, EmptyCountsAsUnset) {
  Set("");
  EXPECT_EQ(EnvString(kName), std::nullopt);
  EXPECT_EQ(EnvInt(kName, 5), 5);
  EXPECT_FALSE(EnvBool(kName, false));
}

TEST_F(EnvTest, ReadsEveryType) {
  Set("text with spaces");
  EXPECT_EQ(EnvString(kName), "text with spaces");
  Set("-12");
  EXPECT_EQ(EnvInt(kName, 0), -12);
  Set("18446744073709551615");
  EXPECT_EQ(EnvUint64(kName, 0), ~std::uint64_t{0});
  for (const char* yes : {"1", "true", "yes", "on"}) {
    Set(yes);
    EXPECT_TRUE(EnvBool(kName, false)) << yes;
  }
  for (const char* no : {"0", "false", "no", "off"}) {
    Set(no);
    EXPECT_FALSE(EnvBool(kName, true)) << no;
  }
  Set("b");
  EXPECT_EQ(EnvChoice(kName, {"a", "b"}, 0), 1u);
}

TEST_F(EnvTest, WhatIsNotAWholeNumberIsAnErrorNamingVariableExpectedAndGiven) {
  for (const char* bad : {"two", "3x", " 3", "3 ", "+3", "3.5", "9223372036854775808"}) {
    Set(bad);
    EXPECT_THAT(MessageOf([] { EnvInt(kName, 0); }),
                AllOf(HasSubstr(kName), HasSubstr("expected a whole number"),
                      HasSubstr("given '" + std::string(bad) + "'")));
  }
}

TEST_F(EnvTest, OutOfRangeNamesTheRange) {
  Set("0");
  EXPECT_THAT(MessageOf([] { EnvInt(kName, 4, 1); }), HasSubstr("at least 1"));
  EXPECT_THAT(MessageOf([] { EnvInt(kName, 4, 1, 64); }), HasSubstr("from 1 to 64"));
  Set("65");
  EXPECT_THAT(MessageOf([] { EnvInt(kName, 4, 1, 64); }), HasSubstr("from 1 to 64"));
  Set("64");
  EXPECT_EQ(EnvInt(kName, 4, 1, 64), 64);
}

TEST_F(EnvTest, NegativeSeedIsAnError) {
  Set("-1");
  EXPECT_THAT(MessageOf([] { EnvUint64(kName, 0); }), AllOf(HasSubstr(kName), HasSubstr("'-1'")));
}

TEST_F(EnvTest, AReaderNamesAllThatIsWrong) {
  EnvReader good;
  int value = 0;
  good.Read([&] { value = 7; });
  EXPECT_NO_THROW(good.ThrowIfAnyIsWrong());
  EXPECT_EQ(value, 7);

  EnvReader bad;
  Set("steam");
  bad.Read([] { EnvInt(kName, 0); });
  bad.Read([&] { value = 8; });
  bad.Read([] { EnvBool(kName, true); });
  EXPECT_EQ(value, 8);
  EXPECT_EQ(MessageOf([&] { bad.ThrowIfAnyIsWrong(); }),
            MessageOf([] { EnvInt(kName, 0); }) + "\n" + MessageOf([] { EnvBool(kName, true); }));
}

TEST_F(EnvTest, UnknownWordsListTheKnownOnes) {
  Set("maybe");
  EXPECT_THAT(MessageOf([] { EnvBool(kName, true); }),
              AllOf(HasSubstr(kName), HasSubstr("yes"), HasSubstr("'maybe'")));
  EXPECT_THAT(
      MessageOf([] {
        EnvChoice(kName, {"tbb", "threads"}, 0);
      }),
      AllOf(HasSubstr(kName), HasSubstr("expected one of tbb, threads"), HasSubstr("'maybe'")));
}

}  // namespace
}  // namespace heddle
