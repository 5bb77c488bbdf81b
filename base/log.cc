#include "base/log.h"

#include <heddle/error.h>

#include <array>
#include <memory>
#include <string>
#include <utility>

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>

#include "base/env.h"
#include "base/mutex.h"

namespace heddle {
namespace internal {

std::atomic<LogLevel> log_level = LogLevel::kWarning;

namespace {

struct NamedLevel {
  std::string_view name;
  LogLevel level;
};
constexpr std::array<NamedLevel, 5> kLevels = {{{"debug", LogLevel::kDebug},
                                                {"info", LogLevel::kInfo},
                                                {"warning", LogLevel::kWarning},
                                                {"error", LogLevel::kError},
                                                {"off", LogLevel::kOff}}};

// Before main(), so that whatever level a program sets comes later.
[[maybe_unused]] const bool level_is_read = [] {
  try {
    SetLogLevel(LogLevelFromEnvironment());
  } catch (const InvalidArgument& error) {
    Log(LogLevel::kWarning, "{}; the level is warning", error.what());
  }
  return true;
}();

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
    case LogLevel::kOff:
      break;
  }
  return spdlog::level::off;
}

// The sink in use, and the mutex that keeps its calls one at a time.
struct Output {
  Output() {
    stderr_sink.set_formatter(
        std::make_unique<spdlog::pattern_formatter>("%Y-%m-%d %H:%M:%S.%e heddle %l: %v"));
  }

  void Write(LogLevel level, std::string_view message) EXCLUDES(mutex) {
    MutexLock lock(mutex);
    if (sink) {
      sink(level, message);
      return;
    }
    stderr_sink.log(spdlog::details::log_msg("heddle", ToSpdlog(level), message));
    stderr_sink.flush();
  }

  Mutex mutex;
  LogSink sink GUARDED_BY(mutex);
  spdlog::sinks::stderr_sink_st stderr_sink GUARDED_BY(mutex);
};

Output& TheOutput() {
  // Never destroyed: static destructors of the host program may still log.
  static Output* const output = new Output;
  return *output;
}

}  // namespace

LogLevel LogLevelFromEnvironment() {
  const std::size_t choice =
      EnvChoice("HEDDLE_LOG_LEVEL", {"debug", "info", "warning", "error", "off"}, 2);
  return kLevels[choice].level;
}

void WriteLog(LogLevel level, fmt::string_view format, fmt::format_args args) noexcept {
  try {
    TheOutput().Write(level, fmt::vformat(format, args));
  } catch (...) {
    // A log line must not turn a cleanup into a crash, and there is nowhere left to report it.
  }
}

}  // namespace internal

void SetLogSink(LogSink sink) {
  internal::Output& output = internal::TheOutput();
  MutexLock lock(output.mutex);
  // Swapped, so that the old sink is destroyed after the lock is released.
  output.sink.swap(sink);
}

void SetLogLevel(LogLevel level) {
  internal::log_level.store(level, std::memory_order_relaxed);  // see Log
}

LogLevel GetLogLevel() { return internal::log_level.load(std::memory_order_relaxed); }

LogLevel ParseLogLevel(std::string_view text) {
  for (const internal::NamedLevel& known : internal::kLevels) {
    if (known.name == text) return known.level;
  }
  throw InvalidArgument(
      fmt::format("log level: expected debug, info, warning, error or off, given '{}'", text));
}

}  // namespace heddle
