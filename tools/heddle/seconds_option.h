// Options that are seconds, with a fraction.
#pragma once

#include <string>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

namespace heddle::tools {

// From `least` to an hour; not a number is none, which CLI::Range takes.
inline CLI::Validator SecondsFrom(double least) {
  static constexpr double kMost = 3600;
  const auto check = [least](const std::string& text) {
    double seconds = 0;
    const bool is_one =
        CLI::detail::lexical_cast(text, seconds) && seconds >= least && seconds <= kMost;
    return is_one ? std::string()
                  : fmt::format("Value {} not in range [{} - {}]", text, least, kMost);
  };
  return CLI::Validator(check, fmt::format("FLOAT in [{} - {}]", least, kMost));
}

}  // namespace heddle::tools
