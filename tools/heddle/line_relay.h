// Shows what several processes write: whole lines only, each with its writer's name in front.
//
// Nothing here blocks: what the reader of the output does not take yet is kept, up to a bound, and
// beyond it the processes are read no further, so they wait as if they wrote to the reader
// themselves.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include <sys/types.h>

#include "tools/heddle/file_descriptor.h"

namespace heddle::tools {

// What is to be written to one descriptor, which it borrows.
class LineSink {
 public:
  explicit LineSink(int fd);

  void Append(std::string_view prefix, std::string_view line);  // adds the line's end
  void AppendBytes(std::string_view bytes);
  // Writes some of it, if the descriptor takes any at once. When the reader has gone, or it cannot
  // be written otherwise, drops it all, and what comes later.
  void WriteSome();

  int fd() const { return fd_; }
  // Why output was lost, as errno; 0: none was, or its reader has gone, which may do so: of a pipe,
  // a socket, or a terminal.
  int error() const;
  bool empty() const { return text_.empty(); }
  bool full() const { return text_.size() >= kBytesMax; }

 private:
  static constexpr std::size_t kBytesMax = 1 << 20;

  ssize_t Write(const char* data, std::size_t bytes) const;

  int fd_;
  FileDescriptor reopened_;  // the same pipe or terminal, for writes that do not block; may be none
  bool is_socket_ = false;
  bool is_file_ = false;
  std::string text_;
  int error_ = 0;
};

// What one process writes to one descriptor.
class LineSource {
 public:
  // What becomes of a line.
  using Show = std::function<void(std::string_view line, LineSink& sink)>;

  // A line that grows longer than this is shown in pieces, each a line.
  static constexpr std::size_t kLineBytesMax = 1 << 20;
  // What comes from a process that shows lines so itself: longer than a piece with its prefix, so
  // that it is not cut once more, and its rest taken for a line without a prefix.
  static constexpr std::size_t kShownLineBytesMax = 2 * kLineBytesMax;

  // `fd` does not block. The sink outlives this.
  LineSource(FileDescriptor fd, Show show, LineSink& sink,
             std::size_t line_bytes_max = kLineBytesMax)
      : fd_(std::move(fd)), show_(std::move(show)), sink_(&sink), line_bytes_max_(line_bytes_max) {}
  LineSource(FileDescriptor fd, std::string prefix, LineSink& sink)
      : LineSource(
            std::move(fd),
            [prefix = std::move(prefix)](std::string_view line, LineSink& to) {
              to.Append(prefix, line);
            },
            sink) {}

  // Reads what is there, some of it at a time. At the end closes, and shows a last line that has no
  // end. False if there is nothing now.
  bool ReadSome();
  // Reads what is there, and the end if that has come, but not all that a writer still adds.
  void ReadPresent();
  // Shows what is left without an end, and closes.
  void Finish();

  int fd() const { return fd_.get(); }
  bool open() const { return static_cast<bool>(fd_); }
  const LineSink& sink() const { return *sink_; }

 private:
  static constexpr std::size_t kReadBytesMax = 1 << 16;

  void TakeLines();

  FileDescriptor fd_;
  Show show_;
  LineSink* sink_;
  std::size_t line_bytes_max_;
  std::string partial_;  // a line whose end has not come
};

}  // namespace heddle::tools
