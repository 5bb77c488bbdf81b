#include "kvstore/dist/transport/tcp/wire_capture.h"

#include <algorithm>
#include <cerrno>
#include <system_error>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file_size_signal.h"
#include "base/log.h"
#include "kvstore/dist/protocol/wire.h"

namespace heddle::kvstore::dist {
namespace {

// An old file may be open to others, or be a link to what is precious: the new one is another file.
// -1, with errno.
int OpenNew(const std::string& path) {
  struct stat old {};
  const bool is_own =
      lstat(path.c_str(), &old) == 0 && S_ISREG(old.st_mode) && old.st_uid == geteuid();
  if (is_own && unlink(path.c_str()) != 0) return -1;
  return open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
}

}  // namespace

WireCapture::WireCapture(const std::string& name) {
  sent_.Open(name + ".sent");
  received_.Open(name + ".received");
}

WireCapture::~WireCapture() {
  sent_.Close();
  received_.Close();
}

void WireCapture::File::Open(const std::string& name) {
  path = name;
  fd = OpenNew(path);
  if (fd < 0) {
    Log(LogLevel::kWarning, "HEDDLE_WIRE_CAPTURE: capture to {}: {}", path,
        errno == EEXIST ? "expected a new file, or an old one of this user"
                        : std::generic_category().message(errno));
    return;
  }
  const auto preamble = EncodePreamble();
  Append(preamble.data(), preamble.size());
}

void WireCapture::File::Write(const iovec* runs, std::size_t bytes) {
  for (; bytes > 0 && fd >= 0; ++runs) {
    const std::size_t count = std::min(bytes, runs->iov_len);
    Append(runs->iov_base, count);
    bytes -= count;
  }
}

void WireCapture::File::Append(const void* data, std::size_t bytes) {
  const NoFileSizeSignal no_signal;
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = write(fd, from, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      Log(LogLevel::kWarning, "HEDDLE_WIRE_CAPTURE: capture to {} ends: {}", path,
          std::generic_category().message(errno));
      return Close();
    }
    from += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

void WireCapture::File::Close() {
  if (fd >= 0) close(fd);
  fd = -1;
}

}  // namespace heddle::kvstore::dist
