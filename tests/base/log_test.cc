#include "base/log.h"

#include <heddle/error.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace heddle {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

class LogTest : public ::testing::Test {
 protected:
  LogTest() {
    SetLogSink(
        [this](LogLevel level, std::string_view message) { lines_.emplace_back(level, message); });
  }
  ~LogTest() override {
    SetLogSink({});
    SetLogLevel(LogLevel::kWarning);
  }

  std::vector<std::pair<LogLevel, std::string>> lines_;
};

TEST_F(LogTest, SinkGetsLevelAndFormattedMessage) {
  Log(LogLevel::kError, "op {} failed after {} ms", "add", 12);
  EXPECT_THAT(lines_, ElementsAre(Pair(LogLevel::kError, "op add failed after 12 ms")));
}

TEST_F(LogTest, WarningIsTheDefaultLevel) {
  EXPECT_EQ(GetLogLevel(), LogLevel::kWarning);
  Log(LogLevel::kInfo, "dropped");
  Log(LogLevel::kWarning, "kept");
  EXPECT_THAT(lines_, ElementsAre(Pair(LogLevel::kWarning, "kept")));
}

TEST_F(LogTest, LevelDecidesWhatIsKept) {
  SetLogLevel(LogLevel::kDebug);
  Log(LogLevel::kDebug, "one");
  SetLogLevel(LogLevel::kError);
  Log(LogLevel::kWarning, "two");
  SetLogLevel(LogLevel::kOff);
  Log(LogLevel::kError, "three");
  EXPECT_THAT(lines_, ElementsAre(Pair(LogLevel::kDebug, "one")));
}

TEST_F(LogTest, EmptySinkWritesToStderr) {
  SetLogSink({});
  ::testing::internal::CaptureStderr();
  Log(LogLevel::kWarning, "var {} is poisoned", "x");
  const std::string written = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(written, HasSubstr("heddle warning: var x is poisoned\n"));
  EXPECT_THAT(lines_, IsEmpty());
}

TEST_F(LogTest, SinkThatThrowsLosesTheMessageOnly) {
  SetLogSink([](LogLevel, std::string_view) { throw std::runtime_error("disk full"); });
  Log(LogLevel::kError, "lost");
  SetLogSink(
      [this](LogLevel level, std::string_view message) { lines_.emplace_back(level, message); });
  Log(LogLevel::kError, "seen");
  EXPECT_THAT(lines_, ElementsAre(Pair(LogLevel::kError, "seen")));
}

TEST_F(LogTest, SinkIsCalledByOneThreadAtATime) {
  constexpr int kThreads = 4;
  constexpr int kLines = 500;
  std::atomic<int> inside = 0;
  std::atomic<bool> overlapped = false;
  int calls = 0;  // plain on purpose: the log's own lock has to protect it
  SetLogSink([&](LogLevel, std::string_view) {
    if (inside.fetch_add(1) != 0) overlapped = true;
    ++calls;
    inside.fetch_sub(1);
  });
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([i] {
      for (int line = 0; line < kLines; ++line) Log(LogLevel::kError, "{} {}", i, line);
    });
  }
  for (std::thread& thread : threads) thread.join();
  SetLogSink({});
  EXPECT_FALSE(overlapped);
  EXPECT_EQ(calls, kThreads * kLines);
}

TEST(ParseLogLevel, ReadsEveryLevel) {
  EXPECT_EQ(ParseLogLevel("debug"), LogLevel::kDebug);
  EXPECT_EQ(ParseLogLevel("info"), LogLevel::kInfo);
  EXPECT_EQ(ParseLogLevel("warning"), LogLevel::kWarning);
  EXPECT_EQ(ParseLogLevel("error"), LogLevel::kError);
  EXPECT_EQ(ParseLogLevel("off"), LogLevel::kOff);
}

TEST(ParseLogLevel, UnknownNamesExpectedAndGiven) {
  try {
    ParseLogLevel("loud");
    FAIL() << "nothing was thrown";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), HasSubstr("debug, info, warning, error or off"));
    EXPECT_THAT(error.what(), HasSubstr("'loud'"));
  }
}

}  // namespace
}  // namespace heddle
