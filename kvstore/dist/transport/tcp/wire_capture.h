// Copies what goes over a connection into files, for `heddle wire-dump`.
//
// A stream is written as docs/wire.md has it, from the first message behind the handshake on:
// proofs of the token are never in it. Values are, so the files are for their owner alone.
#pragma once

#include <cstddef>
#include <string>

#include <sys/uio.h>

namespace heddle::kvstore::dist {

// Threads: Sent and Received may be called at the same time, each by one thread at a time.
class WireCapture {
 public:
  // Writes to "<name>.sent" and "<name>.received", in place of old files of this user. What cannot
  // be written is logged, and ends that file.
  explicit WireCapture(const std::string& name);
  ~WireCapture();
  WireCapture(const WireCapture&) = delete;
  WireCapture& operator=(const WireCapture&) = delete;

  // The first `bytes` bytes of the runs.
  void Sent(const iovec* runs, std::size_t bytes) { sent_.Write(runs, bytes); }
  void Received(const iovec* runs, std::size_t bytes) { received_.Write(runs, bytes); }

 private:
  struct File {
    void Open(const std::string& path);
    void Write(const iovec* runs, std::size_t bytes);
    void Append(const void* data, std::size_t bytes);
    void Close();

    std::string path;
    int fd = -1;
  };

  File sent_, received_;
};

}  // namespace heddle::kvstore::dist
