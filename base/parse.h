// Text to numbers, all or nothing.
#pragma once

#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

namespace heddle {

// All of `text` as a decimal number; nothing if it is not one or does not fit.
template <class Number>
std::optional<Number> ParseWhole(std::string_view text) {
  Number number = 0;
  const char* const end = text.data() + text.size();
  const std::from_chars_result result = std::from_chars(text.data(), end, number);
  if (result.ec != std::errc() || result.ptr != end) return std::nullopt;
  return number;
}

// "1", "true", "yes", "on" or "0", "false", "no", "off"; nothing for anything else.
inline std::optional<bool> ParseBool(std::string_view text) {
  for (const std::string_view yes : {"1", "true", "yes", "on"}) {
    if (text == yes) return true;
  }
  for (const std::string_view no : {"0", "false", "no", "off"}) {
    if (text == no) return false;
  }
  return std::nullopt;
}

}  // namespace heddle
