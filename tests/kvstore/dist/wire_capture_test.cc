// Captures hold values: whatever lay where they are written, nobody else may read them.
#include "kvstore/dist/transport/tcp/wire_capture.h"

#include <heddle/logging.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include "tests/small_files.h"
#include "tools/testing/temp_folder.h"

namespace heddle::kvstore::dist_test {
namespace {

using dist::WireCapture;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using tools::TempFolder;

std::string Contents(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Captures "new values", sent; returns what is logged.
std::string CaptureTo(const std::string& name) {
  std::string log;
  SetLogSink([&log](LogLevel, std::string_view line) { log.append(line).append("\n"); });
  {
    WireCapture capture(name);
    std::string values = "new values";
    const iovec run{values.data(), values.size()};
    capture.Sent(&run, values.size());
  }
  SetLogSink({});
  return log;
}

TEST(WireCaptureFiles, AFileThatMayNotGrowEndsTheCaptureAlone) {
  const TempFolder folder;
  EXPECT_EQ(WithSmallFiles(4,
                           [&] {
                             const std::string log = CaptureTo(folder / "job");
                             return log.find("File too large") != std::string::npos ? 7 : 8;
                           }),
            7);
}

TEST(WireCaptureFiles, AnOldFileIsReplaced) {
  const TempFolder folder;
  const std::string path = folder / "job.sent";
  std::ofstream(path) << "old values";
  ASSERT_EQ(chmod(path.c_str(), 0644), 0);
  std::ifstream reader(path);  // of somebody who has opened it in time
  EXPECT_EQ(CaptureTo(folder / "job"), "");
  EXPECT_THAT(Contents(path), AllOf(HasSubstr("new values"), Not(HasSubstr("old values"))));
  struct stat status {};
  ASSERT_EQ(stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0600u);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(reader), {}), "old values");
}

TEST(WireCaptureFiles, LinksAreNotFollowed) {
  const TempFolder folder;
  std::ofstream(folder / "precious") << "precious";
  std::filesystem::create_symlink(folder / "precious", folder / "job.sent");
  std::filesystem::create_symlink(folder / "nothing", folder / "job.received");
  const std::string log = CaptureTo(folder / "job");
  for (const char* const file : {"job.sent", "job.received"}) {
    EXPECT_THAT(log, HasSubstr("HEDDLE_WIRE_CAPTURE: capture to " + (folder / file) +
                               ": expected a new file, or an old one of this user"));
  }
  EXPECT_EQ(Contents(folder / "precious"), "precious");
  EXPECT_FALSE(std::filesystem::exists(folder / "nothing"));
}

}  // namespace
}  // namespace heddle::kvstore::dist_test
