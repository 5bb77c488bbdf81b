// Files of the operating system, with errors as IoError: what was done, to which file, what came
// back.
#pragma once

#include <cstdint>
#include <string>

namespace heddle::storage {

// Writes a file that appears whole or not at all: the bytes go to a temporary file in the same
// directory, which Commit syncs and renames. Without Commit the destructor removes it.
// Threads: one at a time.
class AtomicFile {
 public:
  // `path`: a regular file, which will be replaced, or none.
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void Write(const void* data, std::int64_t bytes);
  // Call once, last. If only syncing the directory fails, the new file is in place all the same.
  void Commit();

 private:
  const std::string path_;
  std::string temporary_;  // empty once renamed
  int fd_ = -1;
};

// Reads a regular file.
// Threads: any for Read.
class InputFile {
 public:
  explicit InputFile(std::string path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::string& path() const { return path_; }
  std::int64_t size() const { return size_; }  // when opened
  // Fills data with the `bytes` at `offset`.
  void Read(std::int64_t offset, void* data, std::int64_t bytes) const;

 private:
  const std::string path_;
  int fd_ = -1;
  std::int64_t size_ = 0;
};

}  // namespace heddle::storage
