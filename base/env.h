// Environment variables, read with a type. For the edge only: deeper code takes an options struct.
//
// Each function returns `fallback` if the variable is unset or empty, and throws InvalidArgument
// naming the variable, what was expected and what it holds if that does not parse.
// Threads: safe as long as nobody changes the environment at the same time.
#pragma once

#include <heddle/error.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

namespace heddle {

// The raw value; nothing if unset or empty.
std::optional<std::string> EnvString(const char* name);
std::string EnvString(const char* name, std::string_view fallback);

// A decimal number in [min, max], nothing around it.
std::int64_t EnvInt(const char* name, std::int64_t fallback,
                    std::int64_t min = std::numeric_limits<std::int64_t>::min(),
                    std::int64_t max = std::numeric_limits<std::int64_t>::max());
std::uint64_t EnvUint64(const char* name, std::uint64_t fallback);

// 1, true, yes, on or 0, false, no, off.
bool EnvBool(const char* name, bool fallback);

// One of `choices`; returns its index.
std::size_t EnvChoice(const char* name, std::initializer_list<std::string_view> choices,
                      std::size_t fallback);

// Reads several variables to the end, so that one error names all that are wrong.
class EnvReader {
 public:
  // Calls read(), and keeps the message of the InvalidArgument that it throws.
  template <class Call>
  void Read(const Call& read) {
    try {
      read();
    } catch (const InvalidArgument& error) {
      Keep(error.what());
    }
  }
  // Throws InvalidArgument, a line for each message, if there are any.
  void ThrowIfAnyIsWrong() const;

 private:
  void Keep(std::string_view message);

  std::string messages_;
};

}  // namespace heddle
