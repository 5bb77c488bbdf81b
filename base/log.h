// Log lines of heddle's own code; the public half is heddle/logging.h.
//
//   Log(LogLevel::kWarning, "op {} has waited for {} ms", name, waited_ms);
//
// A message below the level costs one relaxed load; its arguments are not formatted.
// Threads: any. A sink that throws loses the message, so Log is safe in destructors.
#pragma once

#include <heddle/logging.h>

#include <atomic>
#include <string_view>
#include <utility>

#include <fmt/format.h>

namespace heddle {
namespace internal {

extern std::atomic<LogLevel> log_level;
// HEDDLE_LOG_LEVEL, or what holds without it. Throws InvalidArgument.
LogLevel LogLevelFromEnvironment();
void WriteLog(LogLevel level, fmt::string_view format, fmt::format_args args) noexcept;

}  // namespace internal

template <class... Args>
void Log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) noexcept {
  // relaxed: a level change need not reach other threads at once
  if (level < internal::log_level.load(std::memory_order_relaxed)) return;
  internal::WriteLog(level, format, fmt::make_format_args(args...));
}

}  // namespace heddle
