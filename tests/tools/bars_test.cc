// How the benchmark programs say what they have measured: benchmarks/support/bars.h and what
// benchmarks/dist adds.
#include "benchmarks/support/bars.h"

#include <fstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "benchmarks/dist/turns.h"
#include "tools/testing/temp_folder.h"

namespace heddle {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// A line of the JSON, and what was printed.
struct Said {
  nlohmann::json bar;
  std::string text;
  bool all_hold;
};

Said Say(const bench_dist::PairBar& bar) {
  const tools::TempFolder folder;
  bench::BarReport report;
  EXPECT_TRUE(report.Open(folder / "bars.json"));
  ::testing::internal::CaptureStdout();
  bench_dist::AddBar(report, bar);
  const std::string text = ::testing::internal::GetCapturedStdout();
  std::ifstream file(folder / "bars.json");
  return {nlohmann::json::parse(file), text, report.all_hold()};
}

bench_dist::PairBar TwiceAsLong() {
  return {.what = "a copy", .unit = "us", .ours = {2, 4}, .against = "another", .theirs = {1, 2}};
}

// It used to hold, in text and JSON.
TEST(Bars, ALineWithoutABarIsMeasuredAndHoldsNothing) {
  const Said said = Say(TwiceAsLong());
  EXPECT_TRUE(said.bar.at("holds").is_null()) << said.bar;
  EXPECT_EQ(said.bar.at("ratio"), 2);
  EXPECT_THAT(said.text, HasSubstr("ratio 2.00 [2.00..2.00], measured\n"));
  EXPECT_THAT(said.text, Not(HasSubstr("holds")));
  EXPECT_TRUE(said.all_hold);
}

TEST(Bars, ABarHoldsOrFallsShort) {
  bench_dist::PairBar bar = TwiceAsLong();
  bar.most = 2;
  const Said kept = Say(bar);
  EXPECT_EQ(kept.bar.at("holds"), true);
  EXPECT_THAT(kept.text, HasSubstr(", holds\n"));
  EXPECT_TRUE(kept.all_hold);
  bar.most = 1.9;
  const Said short_of = Say(bar);
  EXPECT_EQ(short_of.bar.at("holds"), false);
  EXPECT_THAT(short_of.text, HasSubstr(", falls short\n"));
  EXPECT_FALSE(short_of.all_hold);
}

}  // namespace
}  // namespace heddle
