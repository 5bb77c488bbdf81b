// Text in UTF-8.
#pragma once

#include <cstddef>
#include <string_view>

namespace heddle {

// `text`; of a longer one than `bytes_max` the first bytes, up to the end of a letter. What is no
// UTF-8 is cut anywhere.
inline std::string_view CutAtLetter(std::string_view text, std::size_t bytes_max) {
  constexpr std::size_t kLetterMax = 4;
  if (text.size() <= bytes_max) return text;
  const auto continues = [&](std::size_t at) {
    return (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80;
  };
  std::size_t end = bytes_max;
  while (end > 0 && bytes_max - end < kLetterMax && continues(end)) --end;
  return text.substr(0, continues(end) ? bytes_max : end);
}

}  // namespace heddle
