#include "tools/heddle/line_relay.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>

#include <fcntl.h>
#include <fmt/format.h>
#include <limits.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file_size_signal.h"

namespace heddle::tools {
namespace {

// A pipe or terminal that is ready may take less than what is to be written, and then blocks. Its
// descriptor is left in its blocking mode, which it shares with programs that know nothing of
// heddle; one that is opened anew has a mode of its own. None for those that do not block, for
// other files, and for what this user may not open: a terminal that is another user's after su.
FileDescriptor OpenAnew(int fd, mode_t mode) {
  int number = 0;
  // The outer end of a pseudoterminal would be that of another one.
  const bool is_terminal = isatty(fd) == 1 && ioctl(fd, TIOCGPTN, &number) != 0;
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || (flags & O_ACCMODE) == O_RDONLY || (flags & O_NONBLOCK) != 0) return {};
  if (!S_ISFIFO(mode) && !is_terminal) return {};
  // The keeper is the first process of a session without a terminal, and shall not get this one.
  return FileDescriptor(open(fmt::format("/proc/self/fd/{}", fd).c_str(),
                             O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
}

}  // namespace

LineSink::LineSink(int fd) : fd_(fd) {
  struct stat file {};
  if (fstat(fd, &file) != 0) return;
  is_socket_ = S_ISSOCK(file.st_mode);
  is_file_ = S_ISREG(file.st_mode);
  reopened_ = OpenAnew(fd, file.st_mode);
}

ssize_t LineSink::Write(const char* data, std::size_t bytes) const {
  if (is_socket_) return send(fd_, data, bytes, MSG_DONTWAIT);
  std::optional<NoFileSizeSignal> no_signal;
  if (is_file_) no_signal.emplace();
  return write(reopened_ ? reopened_.get() : fd_, data, bytes);
}

void LineSink::Append(std::string_view prefix, std::string_view line) {
  if (error_ != 0) return;
  text_.append(prefix).append(line).push_back('\n');
}

void LineSink::AppendBytes(std::string_view bytes) {
  if (error_ == 0) text_.append(bytes);
}

void LineSink::WriteSome() {
  std::size_t written = 0;
  // A pipe that is ready takes PIPE_BUF bytes, if nobody else writes to it.
  while (written < text_.size()) {
    pollfd ready = {.fd = fd_, .events = POLLOUT, .revents = 0};
    if (poll(&ready, 1, 0) <= 0) break;
    const std::size_t bytes = std::min<std::size_t>(text_.size() - written, PIPE_BUF);
    const ssize_t taken = Write(text_.data() + written, bytes);
    if (taken < 0 && (errno == EINTR || errno == EAGAIN)) break;
    if (taken < 0) {
      error_ = errno;
      written = text_.size();
      break;
    }
    written += static_cast<std::size_t>(taken);
  }
  text_.erase(0, written);
}

int LineSink::error() const {
  const bool reader_gone = error_ == EPIPE || error_ == ECONNRESET || (error_ == EIO && !is_file_);
  return reader_gone ? 0 : error_;
}

bool LineSource::ReadSome() {
  if (!open()) return false;
  std::array<char, kReadBytesMax> buffer;
  const ssize_t got = read(fd_.get(), buffer.data(), buffer.size());
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (got <= 0) {
    Finish();
    return false;
  }
  partial_.append(buffer.data(), static_cast<std::size_t>(got));
  TakeLines();
  return true;
}

void LineSource::ReadPresent() {
  int present = 0;
  if (!open() || ioctl(fd_.get(), FIONREAD, &present) != 0) return;
  // A read of a pipe takes all that it has room for; one more may see the end.
  std::size_t reads = static_cast<std::size_t>(present) / kReadBytesMax + 2;
  while (reads-- > 0 && ReadSome()) continue;
}

void LineSource::TakeLines() {
  std::size_t begin = 0;
  for (std::size_t end; (end = partial_.find('\n', begin)) != std::string::npos; begin = end + 1) {
    show_(std::string_view(partial_).substr(begin, end - begin), *sink_);
  }
  partial_.erase(0, begin);
  if (partial_.size() < line_bytes_max_) return;
  show_(partial_, *sink_);
  partial_.clear();
}

void LineSource::Finish() {
  if (!partial_.empty()) show_(partial_, *sink_);
  partial_.clear();
  fd_.Close();
}

}  // namespace heddle::tools
