// Assertions about heddle's own code. What users or peers may get wrong is an exception instead
// (heddle/error.h).
//
//   CHECK(reads_running_ > 0);
//   CHECK(bytes % 4 == 0, "{} bytes for op {}", bytes, name);   // fmt, evaluated on failure only
//
// CHECK is always on. DCHECK is on in the presets dev, asan and tsan (HEDDLE_DCHECKS); elsewhere it
// is compiled but never evaluated. A failure prints file, line, condition and message to stderr and
// aborts.
#pragma once

#include <string>

#include <fmt/format.h>

namespace heddle::internal {

[[noreturn]] void CheckFailed(const char* file, int line, const char* condition,
                              const std::string& message = {});

}  // namespace heddle::internal

#define CHECK(condition, ...)                                                               \
  do {                                                                                      \
    if (!(condition)) [[unlikely]] {                                                        \
      ::heddle::internal::CheckFailed(__FILE__, __LINE__,                                   \
                                      #condition __VA_OPT__(, ::fmt::format(__VA_ARGS__))); \
    }                                                                                       \
  } while (false)

#ifdef HEDDLE_DCHECKS
#define DCHECK(condition, ...) CHECK(condition __VA_OPT__(, ) __VA_ARGS__)
#else
#define DCHECK(condition, ...)                     \
  do {                                             \
    if (false) {                                   \
      CHECK(condition __VA_OPT__(, ) __VA_ARGS__); \
    }                                              \
  } while (false)
#endif
