#include "tools/heddle/line_relay.h"

#include <algorithm>
#include <array>
#include <cerrno>

#include <limits.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace heddle::tools {

void LineSink::Append(std::string_view prefix, std::string_view line) {
  if (error_ != 0) return;
  text_.append(prefix).append(line).push_back('\n');
}

void LineSink::AppendBytes(std::string_view bytes) {
  if (error_ == 0) text_.append(bytes);
}

void LineSink::WriteSome() {
  std::size_t written = 0;
  // A pipe that is ready takes PIPE_BUF bytes without blocking. The descriptor is left in its
  // blocking mode, which it shares with programs that know nothing of heddle.
  while (written < text_.size()) {
    pollfd ready = {.fd = fd_, .events = POLLOUT, .revents = 0};
    if (poll(&ready, 1, 0) <= 0) break;
    const std::size_t bytes = std::min<std::size_t>(text_.size() - written, PIPE_BUF);
    const ssize_t taken = write(fd_, text_.data() + written, bytes);
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
  struct stat file {};
  const bool is_file = fstat(fd_, &file) == 0 && S_ISREG(file.st_mode);
  const bool reader_gone = error_ == EPIPE || error_ == ECONNRESET || (error_ == EIO && !is_file);
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
  if (partial_.size() < kLineBytesMax) return;
  show_(partial_, *sink_);
  partial_.clear();
}

void LineSource::Finish() {
  if (!partial_.empty()) show_(partial_, *sink_);
  partial_.clear();
  fd_.Close();
}

}  // namespace heddle::tools
