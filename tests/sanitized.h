// How much a test does where a sanitizer makes it slow.
#pragma once

#include <algorithm>
#include <concepts>

#include "base/sanitizers.h"

namespace heddle {

inline constexpr bool kSanitized = kThreadSanitizer || kAddressSanitizer;

// A number of repetitions, fewer under the sanitizers.
template <std::integral T>
constexpr T Scaled(T count) {
  return std::max(T{1}, count / T{kThreadSanitizer ? 10 : kAddressSanitizer ? 4 : 1});
}

}  // namespace heddle
