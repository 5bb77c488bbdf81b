#include "tools/heddle/line_relay.h"

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <string>
#include <utility>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <termios.h>
#include <unistd.h>

#include "tests/small_files.h"
#include "tools/heddle/process_tree.h"
#include "tools/testing/temp_folder.h"

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

struct Ends {
  FileDescriptor read, write;
};

Ends PipeEnds() {
  Pipe pipe;
  return {std::move(pipe.read), std::move(pipe.write)};
}

Ends SocketEnds() {
  std::array<int, 2> ends;
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
  return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

// As terminals are, it puts a "\\r" before a line's end.
Ends TerminalEnds() {
  Ends ends;
  ends.read = FileDescriptor(posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  EXPECT_EQ(grantpt(ends.read.get()), 0);
  EXPECT_EQ(unlockpt(ends.read.get()), 0);
  ends.write = FileDescriptor(open(ptsname(ends.read.get()), O_RDWR | O_NOCTTY | O_CLOEXEC));
  termios settings{};
  EXPECT_EQ(tcgetattr(ends.write.get(), &settings), 0);
  cfmakeraw(&settings);
  settings.c_oflag = OPOST | ONLCR;
  EXPECT_EQ(tcsetattr(ends.write.get(), TCSANOW, &settings), 0);
  return ends;
}

struct Output {
  std::string name;
  Ends (*make)();
};

class LineSinkTest : public ::testing::TestWithParam<Output> {};

TEST_P(LineSinkTest, AReaderThatDoesNotReadIsNotWaitedFor) {
  const Ends ends = GetParam().make();
  LineSink sink(ends.write.get());
  std::string expected, taken;
  while (!sink.full()) {
    sink.Append("[a] ", std::string(70, 'x'));
    expected += "[a] " + std::string(70, 'x') + "\n";
    sink.WriteSome();  // returns, although nobody reads
  }
  while (taken.size() < expected.size()) {
    sink.WriteSome();
    taken += ReadAll(ends.read);
    std::erase(taken, '\r');
    ASSERT_EQ(fcntl(ends.write.get(), F_GETFL) & O_NONBLOCK, 0) << "others share the descriptor";
  }
  EXPECT_TRUE(taken == expected);
  EXPECT_TRUE(sink.empty());
}

INSTANTIATE_TEST_SUITE_P(Outputs, LineSinkTest,
                         ::testing::Values(Output{"Pipe", &PipeEnds}, Output{"Socket", &SocketEnds},
                                           Output{"Terminal", &TerminalEnds}),
                         [](const auto& info) { return info.param.name; });

// Opened anew it would be that of another terminal.
TEST(LineSink, TheOuterEndOfATerminalIsWrittenToItself) {
  const Ends ends = TerminalEnds();
  LineSink sink(ends.read.get());
  sink.Append("", "one");
  sink.WriteSome();
  std::array<char, 4> buffer;
  ASSERT_EQ(read(ends.write.get(), buffer.data(), buffer.size()), 4);
  EXPECT_EQ(std::string(buffer.data(), buffer.size()), "one\n");
}

TEST(LineSink, WhatIsOpenForReadingAloneIsNotWrittenTo) {
  const Ends ends = TerminalEnds();
  const FileDescriptor reading(open(ptsname(ends.read.get()), O_RDONLY | O_NOCTTY | O_CLOEXEC));
  LineSink sink(reading.get());
  sink.Append("", "one");
  sink.WriteSome();
  EXPECT_EQ(sink.error(), EBADF);
}

// ulimit -f, of which the whole job used to die.
TEST(LineSink, AFileThatMayNotGrowIsAnErrorLikeOthers) {
  const TempFolder folder;
  const FileDescriptor file(
      open((folder / "output").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, S_IRUSR | S_IWUSR));
  EXPECT_EQ(WithSmallFiles(2,
                           [&] {
                             LineSink sink(file.get());
                             sink.Append("", "one");
                             sink.WriteSome();
                             return sink.empty() ? sink.error() : 0;
                           }),
            EFBIG);
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

// As the keeper of a host does it, and the launcher with what comes from it.
TEST_F(LineRelayTest, PiecesOfALineThatIsShownTwiceAreNotCutOnceMore) {
  std::string shown;
  Pipe between;
  fcntl(between.read.get(), F_SETFL, O_NONBLOCK);
  LineSink inner_sink(between.write.get());
  LineSource inner(std::move(from_.read), "[a] ", inner_sink);
  LineSource outer(
      std::move(between.read),
      [&shown](std::string_view line, LineSink&) { shown.append(line.substr(0, 4)).append("\n"); },
      sink_, LineSource::kShownLineBytesMax);
  const auto pass_on = [&] {
    while (inner.ReadSome()) continue;
    for (; !inner_sink.empty(); inner_sink.WriteSome()) {
      while (outer.ReadSome()) continue;
    }
  };
  // Of sizes that make the pieces longer than the bound.
  for (int i = 0; i < 80; ++i) {
    Write(from_.write, std::string(65'000, 'x'));
    pass_on();
  }
  from_.write.Close();
  pass_on();
  outer.ReadPresent();
  outer.Finish();
  EXPECT_EQ(shown, "[a] \n[a] \n[a] \n[a] \n[a] \n");
}

}  // namespace
}  // namespace heddle::tools
