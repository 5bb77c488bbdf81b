// Where heddle's log lines go. Process-wide: to stderr, if no sink is set.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace heddle {

enum class LogLevel { kDebug, kInfo, kWarning, kError, kOff };

using LogSink = std::function<void(LogLevel level, std::string_view message)>;

// Replaces the sink; an empty one restores stderr. The sink may be called from any thread, one call
// at a time; it must not call back into heddle.
void SetLogSink(LogSink sink);

// Messages below `level` are dropped. Default: what HEDDLE_LOG_LEVEL says ("info", as for
// ParseLogLevel) when the process starts, else kWarning.
void SetLogLevel(LogLevel level);
LogLevel GetLogLevel();

// Reads "debug", "info", "warning", "error" or "off"; throws InvalidArgument for anything else.
LogLevel ParseLogLevel(std::string_view text);

}  // namespace heddle
