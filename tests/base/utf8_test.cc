#include "base/utf8.h"

#include <string>

#include <gtest/gtest.h>

namespace heddle {
namespace {

TEST(CutAtLetterTest, CutsWhereALetterEnds) {
  const std::string text = "a\u00e9\u2713\U0001F9F5";  // letters of 1, 2, 3 and 4 bytes
  const std::size_t ends[] = {0, 1, 1, 3, 3, 3, 6, 6, 6, 6, 10, 10};
  for (std::size_t bytes_max = 0; bytes_max < std::size(ends); ++bytes_max) {
    EXPECT_EQ(CutAtLetter(text, bytes_max), text.substr(0, ends[bytes_max])) << bytes_max;
  }
}

TEST(CutAtLetterTest, CutsWhatIsNoUtf8Anywhere) {
  const std::string text(9, '\x80');
  for (std::size_t bytes_max = 0; bytes_max <= text.size(); ++bytes_max) {
    EXPECT_EQ(CutAtLetter(text, bytes_max), text.substr(0, bytes_max)) << bytes_max;
  }
}

}  // namespace
}  // namespace heddle
