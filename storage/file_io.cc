#include "storage/file_io.h"

#include <heddle/error.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file_size_signal.h"
#include "base/unique_fd.h"

namespace heddle::storage {
namespace {

// One system call moves at most this much; Linux itself stops at 2 GiB.
constexpr std::int64_t kBytesPerCallMax = std::int64_t{1} << 30;

[[noreturn]] void ThrowErrno(const char* doing, const std::string& path) {
  const int error = errno;
  throw IoError(fmt::format("{} {}: {}", doing, path, std::generic_category().message(error)));
}

std::string DirectoryOf(const std::string& path) {
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  return parent.empty() ? std::string(".") : parent.string();
}

// The system would take what is in front of it for the name.
void CheckName(const char* action, std::string_view path) {
  if (const std::size_t at = path.find('\0'); at != std::string_view::npos) {
    throw IoError(fmt::format("{} {}: expected a file name without a zero byte, got one behind it",
                              action, path.substr(0, at)));
  }
}

}  // namespace

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)) {
  CheckName("write", path_);
  // Renaming to it would put a file in the place of a device, for the whole machine.
  struct stat status = {};
  if (stat(path_.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    throw IoError(fmt::format("write {}: expected a regular file or none", path_));
  }
  static std::atomic<unsigned> counter{0};
  // A name that a killed process of the same id left behind is skipped.
  do {
    temporary_ = fmt::format("{}.tmp-{}-{}", path_, getpid(),
                             counter.fetch_add(1, std::memory_order_relaxed));
    fd_ = open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (fd_ < 0 && errno == EEXIST);
  if (fd_ < 0) ThrowErrno("create", temporary_);
}

AtomicFile::~AtomicFile() {
  if (fd_ >= 0) close(fd_);
  if (!temporary_.empty()) unlink(temporary_.c_str());
}

void AtomicFile::Write(const void* data, std::int64_t bytes) {
  const NoFileSizeSignal no_signal;
  const auto* next = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const ssize_t written =
        write(fd_, next, static_cast<std::size_t>(std::min(bytes, kBytesPerCallMax)));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) ThrowErrno("write", temporary_);
    next += written;
    bytes -= written;
  }
}

void AtomicFile::Commit() {
  if (fsync(fd_) != 0) ThrowErrno("sync", temporary_);
  if (close(std::exchange(fd_, -1)) != 0) ThrowErrno("close", temporary_);
  // Opened first: one that may be written to but not read fails here, and the old file stays.
  const std::string directory = DirectoryOf(path_);
  const UniqueFd opened(open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (opened.get() < 0) ThrowErrno("open directory", directory);
  if (rename(temporary_.c_str(), path_.c_str()) != 0) ThrowErrno("rename to", path_);
  temporary_.clear();
  // Makes the new name survive a crash. Some file systems cannot sync directories and say EINVAL.
  if (fsync(opened.get()) != 0 && errno != EINVAL) ThrowErrno("sync directory", directory);
}

InputFile::InputFile(std::string path) : path_(std::move(path)) {
  CheckName("read", path_);
  // Not blocking: a FIFO must not hang the caller before it is recognised as one.
  fd_ = open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (fd_ < 0) ThrowErrno("open", path_);
  struct stat status = {};
  if (fstat(fd_, &status) != 0) {
    const int error = errno;
    close(fd_);
    errno = error;
    ThrowErrno("stat", path_);
  }
  if (!S_ISREG(status.st_mode)) {
    close(fd_);
    throw IoError(fmt::format("read {}: expected a regular file", path_));
  }
  size_ = status.st_size;
}

InputFile::~InputFile() { close(fd_); }

void InputFile::Read(std::int64_t offset, void* data, std::int64_t bytes) const {
  auto* next = static_cast<std::byte*>(data);
  while (bytes > 0) {
    const ssize_t got =
        pread(fd_, next, static_cast<std::size_t>(std::min(bytes, kBytesPerCallMax)), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) ThrowErrno("read", path_);
    if (got == 0) {
      throw IoError(fmt::format("read {}: expected {} more bytes at {}, found the end of the file",
                                path_, bytes, offset));
    }
    next += got;
    bytes -= got;
    offset += got;
  }
}

}  // namespace heddle::storage
