#include "tools/heddle/bench.h"

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tools/heddle/bench_plot.h"

namespace heddle::tools {
namespace {

// n, n - 1, ..., 1: the value of rank r is r.
std::vector<double> Ranks(int n) {
  std::vector<double> values(static_cast<std::size_t>(n));
  std::iota(values.rbegin(), values.rend(), 1.0);
  return values;
}

// The largest used to be left out.
TEST(BenchPercentile, The99thOfFewerThan100ValuesIsTheLargest) {
  for (const int n : {1, 2, 5, 50, 99}) EXPECT_EQ(Percentile(Ranks(n), 99), n) << n;
}

TEST(BenchPercentile, NoMoreThanOneOf100ValuesIsLarger) {
  for (const int n : {100, 101, 200, 700, 1100, 100'000}) {
    const double found = Percentile(Ranks(n), 99);
    EXPECT_GE(100 * found, 99.0 * n) << n;
    EXPECT_LT(100 * (found - 1), 99.0 * n) << n << ": the one below would do";
  }
}

TEST(BenchPercentile, The50thIsTheLowerOfTwoInTheMiddle) {
  EXPECT_EQ(Percentile(Ranks(5), 50), 3);
  EXPECT_EQ(Percentile(Ranks(6), 50), 3);
  EXPECT_EQ(Percentile({7}, 50), 7);
}

// Curves went to and fro where --sizes did.
TEST(BenchPlot, PointsAreJoinedInTheOrderOfTheirSizes) {
  std::vector<BenchResult> results;
  for (const std::int64_t bytes : {4096, 65536, 8192, 8192}) {
    results.push_back({.store = "local", .devices = 1, .bytes = bytes, .latency_us = 1});
  }
  const std::string script = PlotScript(results, "bench.svg");
  const std::size_t begin = script.find("EOD\n") + 4, end = script.find("EOD\n", begin);
  EXPECT_EQ(script.substr(begin, end - begin),
            "4096 1.000 0.0000\n8192 1.000 0.0000\n8192 1.000 0.0000\n65536 1.000 0.0000\n");
}

}  // namespace
}  // namespace heddle::tools
