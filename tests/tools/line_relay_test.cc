#include "tools/heddle/line_relay.h"

#include <array>
#include <csignal>
#include <string>
#include <utility>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "tools/heddle/process_tree.h"

namespace heddle::tools {
namespace {

void Write(const FileDescriptor& fd, const std::string& text) {
  ASSERT_EQ(write(fd.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
}

// What is in a pipe now.
std::string ReadAll(const FileDescriptor& fd) {
  fcntl(fd.get(), F_SETFL, O_NONBLOCK);
  std::string text;
  std::array<char, 4096> buffer;
  for (ssize_t got; (got = read(fd.get(), buffer.data(), buffer.size())) > 0;) {
    text.append(buffer.data(), static_cast<std::size_t>(got));
  }
  return text;
}

class LineRelayTest : public ::testing::Test {
 protected:
  LineRelayTest() { fcntl(from_.read.get(), F_SETFL, O_NONBLOCK); }

  Pipe from_, to_;
  LineSink sink_{to_.write.get()};
};

TEST_F(LineRelayTest, ALineIsShownWhenItsEndHasCome) {
  LineSource source(std::move(from_.read), "[a] ", sink_);
  Write(from_.write, "one\ntw");
  EXPECT_TRUE(source.ReadSome());
  EXPECT_FALSE(source.ReadSome());
  sink_.WriteSome();
  EXPECT_EQ(ReadAll(to_.read), "[a] one\n");
  Write(from_.write, "o\n\nthr");
  EXPECT_TRUE(source.ReadSome());
  from_.write.Close();
  EXPECT_FALSE(source.ReadSome());
  EXPECT_FALSE(source.open());
  sink_.WriteSome();
  EXPECT_EQ(ReadAll(to_.read), "[a] two\n[a] \n[a] thr\n");
  EXPECT_TRUE(sink_.empty());
}

TEST_F(LineRelayTest, WhatIsPresentIsReadAndTheEndIsSeen) {
  LineSource source(std::move(from_.read), "[a] ", sink_);
  source.ReadPresent();
  EXPECT_TRUE(sink_.empty());
  EXPECT_TRUE(source.open());
  Write(from_.write, "one\ntwo");
  from_.write.Close();
  source.ReadPresent();
  EXPECT_FALSE(source.open());
  sink_.WriteSome();
  EXPECT_EQ(ReadAll(to_.read), "[a] one\n[a] two\n");
}

TEST_F(LineRelayTest, AReaderThatDoesNotReadIsNotWaitedFor) {
  std::string expected, taken;
  while (!sink_.full()) {
    sink_.Append("[a] ", std::string(1000, 'x'));
    expected += "[a] " + std::string(1000, 'x') + "\n";
    sink_.WriteSome();  // returns, although nobody reads
  }
  while (!sink_.empty()) {
    taken += ReadAll(to_.read);
    sink_.WriteSome();
    EXPECT_EQ(fcntl(to_.write.get(), F_GETFL) & O_NONBLOCK, 0) << "others share the descriptor";
  }
  taken += ReadAll(to_.read);
  EXPECT_TRUE(taken == expected);
}

TEST_F(LineRelayTest, WithoutAReaderAllIsDropped) {
  std::signal(SIGPIPE, SIG_IGN);
  to_.read.Close();
  sink_.Append("", "one");
  sink_.WriteSome();
  EXPECT_TRUE(sink_.empty());
  sink_.Append("", "two");
  EXPECT_TRUE(sink_.empty());
}

TEST_F(LineRelayTest, AVeryLongLineIsShownInPieces) {
  LineSource source(std::move(from_.read), "[a] ", sink_);
  std::string shown;
  for (int i = 0; i < 40; ++i) {
    Write(from_.write, std::string(60'000, static_cast<char>('a' + i % 26)));
    while (source.ReadSome()) continue;
    for (; !sink_.empty(); sink_.WriteSome()) shown += ReadAll(to_.read);
  }
  from_.write.Close();
  while (source.ReadSome()) continue;
  for (; !sink_.empty(); sink_.WriteSome()) shown += ReadAll(to_.read);
  shown += ReadAll(to_.read);
  std::size_t letters = 0, lines = 0;
  for (const char c : shown) {
    lines += c == '\n';
    letters += c >= 'a' && c <= 'z';
  }
  EXPECT_GT(lines, 1u);
  EXPECT_EQ(letters, 40u * 60'000 + lines) << "each line has the a of [a]";
}

}  // namespace
}  // namespace heddle::tools
