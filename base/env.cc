#include "base/env.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>

#include <fmt/format.h>

#include "base/parse.h"

namespace heddle {
namespace {

[[noreturn]] void ThrowBadValue(const char* name, std::string_view expected,
                                std::string_view given) {
  throw InvalidArgument(
      fmt::format("environment variable {}: expected {}, given '{}'", name, expected, given));
}

std::string DescribeRange(std::int64_t min, std::int64_t max) {
  using Limits = std::numeric_limits<std::int64_t>;
  if (min == Limits::min() && max == Limits::max()) return "a whole number";
  if (max == Limits::max()) return fmt::format("a whole number of at least {}", min);
  return fmt::format("a whole number from {} to {}", min, max);
}

}  // namespace

std::optional<std::string> EnvString(const char* name) {
  const char* const value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

std::string EnvString(const char* name, std::string_view fallback) {
  return EnvString(name).value_or(std::string(fallback));
}

std::int64_t EnvInt(const char* name, std::int64_t fallback, std::int64_t min, std::int64_t max) {
  const std::optional<std::string> text = EnvString(name);
  if (!text) return fallback;
  const std::optional<std::int64_t> number = ParseWhole<std::int64_t>(*text);
  if (!number || *number < min || *number > max) {
    ThrowBadValue(name, DescribeRange(min, max), *text);
  }
  return *number;
}

std::uint64_t EnvUint64(const char* name, std::uint64_t fallback) {
  const std::optional<std::string> text = EnvString(name);
  if (!text) return fallback;
  const std::optional<std::uint64_t> number = ParseWhole<std::uint64_t>(*text);
  if (!number) ThrowBadValue(name, "a whole number from 0 to 18446744073709551615", *text);
  return *number;
}

bool EnvBool(const char* name, bool fallback) {
  const std::optional<std::string> text = EnvString(name);
  if (!text) return fallback;
  if (const std::optional<bool> value = ParseBool(*text)) return *value;
  ThrowBadValue(name, "1, true, yes, on, 0, false, no or off", *text);
}

std::size_t EnvChoice(const char* name, std::initializer_list<std::string_view> choices,
                      std::size_t fallback) {
  const std::optional<std::string> text = EnvString(name);
  if (!text) return fallback;
  const auto* const found = std::find(choices.begin(), choices.end(), *text);
  if (found == choices.end()) {
    ThrowBadValue(name, fmt::format("one of {}", fmt::join(choices, ", ")), *text);
  }
  return static_cast<std::size_t>(std::distance(choices.begin(), found));
}

void EnvReader::Keep(std::string_view message) {
  if (!messages_.empty()) messages_ += '\n';
  messages_ += message;
}

void EnvReader::ThrowIfAnyIsWrong() const {
  if (!messages_.empty()) throw InvalidArgument(messages_);
}

}  // namespace heddle
