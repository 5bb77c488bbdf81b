// The main job in several processes: training on real images through the stores of a job.
#include <regex>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/tools/child_process.h"

namespace heddle::tools {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::SizeIs;

using Strings = std::vector<std::string>;

// A job of two servers, and of workers with a device each.
ProgramResult Train(const Strings& launch_options, const Strings& options) {
  Strings command = {HEDDLE_COMMAND, "launch", "-s", "2"};
  command.insert(command.end(), launch_options.begin(), launch_options.end());
  command.insert(command.end(), {"--", DIGITS_PROGRAM, "--devices", "1"});
  command.insert(command.end(), options.begin(), options.end());
  return RunProgram(command);
}

// Of the weights that the workers end with.
Strings ChecksumsIn(const std::string& output) {
  static const std::regex line(R"(\[worker [0-9]+\] Checksum of the weights: ([0-9a-f]{16})\n)");
  Strings checksums;
  for (std::sregex_iterator match(output.begin(), output.end(), line), end; match != end; ++match) {
    checksums.push_back((*match)[1]);
  }
  return checksums;
}

// Three workers, since two numbers have the same sum in either order.
Strings TrainInSync(Strings launch_options, const std::string& equals) {
  launch_options.insert(launch_options.end(), {"-n", "3"});
  const ProgramResult result = Train(launch_options, {"--store", "dist_sync", "--batch", "63",
                                                      "--equals", equals, "--at-least", "0.96"});
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("The weights equal those of store " + equals +
                                       " with 3 devices, bit for bit"));
  EXPECT_THAT(result.output, HasSubstr("dist_sync: test accuracy 0.9"));
  return ChecksumsIn(result.output);
}

TEST(DigitsJob, DistSyncGivesAllWorkersTheBitsOfOneProcessInEachRunHoweverArraysAreCut) {
  Strings checksums = TrainInSync({}, "local");
  const Strings of_cut_arrays = TrainInSync(
      {"--env", "HEDDLE_BIGARRAY_BOUND=1000", "--env", "HEDDLE_SLICE_BYTES=4096"}, "device");
  checksums.insert(checksums.end(), of_cut_arrays.begin(), of_cut_arrays.end());
  ASSERT_THAT(checksums, SizeIs(6));
  EXPECT_THAT(checksums, Each(checksums.front()));
}

TEST(DigitsJob, DistAsyncLearnsToReadTheDigitsAndAllWorkersEndWithTheSameWeights) {
  const ProgramResult result = Train({"-n", "2"}, {"--store", "dist_async", "--at-least", "0.94"});
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("dist_async: test accuracy 0.9"));
  const Strings checksums = ChecksumsIn(result.output);
  ASSERT_THAT(checksums, SizeIs(2));
  EXPECT_EQ(checksums[0], checksums[1]);
}

}  // namespace
}  // namespace heddle::tools
