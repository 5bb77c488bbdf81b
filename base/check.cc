#include "base/check.h"

#include <cstdio>
#include <cstdlib>
#include <string>

namespace heddle::internal {

// Straight to stderr: the log may be what is broken, and its sink may hold locks.
void CheckFailed(const char* file, int line, const char* condition, const std::string& message) {
  std::fprintf(stderr, "%s:%d: CHECK failed: %s%s%s\n", file, line, condition,
               message.empty() ? "" : ": ", message.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace heddle::internal
