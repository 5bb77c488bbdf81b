// Owners of file descriptors.
#pragma once

#include <utility>

#include <unistd.h>

namespace heddle::tools {

class FileDescriptor {  // owns one; empty after a move
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void Close() { *this = FileDescriptor(); }

 private:
  int fd_ = -1;
};

}  // namespace heddle::tools
