#include "examples/digits/data.h"

#include <heddle/error.h>

#include <array>
#include <charconv>
#include <fstream>
#include <string_view>

#include <fmt/format.h>

namespace digits {
namespace {

constexpr int kHeldOut = 5;  // one image in so many
constexpr int kInkMax = 16;

// One line: the pixels, then the label. False if it is anything else.
bool ParseLine(std::string_view line, std::array<int, kPixels + 1>& values) {
  const char* at = line.data();
  const char* const end = at + line.size();
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i > 0 && (at == end || *at++ != ',')) return false;
    const auto [after, error] = std::from_chars(at, end, values[i]);
    const int max = i < kPixels ? kInkMax : kClasses - 1;
    if (error != std::errc() || values[i] < 0 || values[i] > max) return false;
    at = after;
  }
  return at == end;
}

}  // namespace

DataSet LoadDigits(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw heddle::IoError(fmt::format("{}: cannot be opened", path));
  DataSet data;
  std::array<int, kPixels + 1> values;
  std::string line;
  for (int number = 0; std::getline(file, line); ++number) {
    if (!ParseLine(line, values)) {
      throw heddle::IoError(fmt::format("{}, line {}: expected {} pixels from 0 to {} and a digit",
                                        path, number + 1, kPixels, kInkMax));
    }
    Images& images = number % kHeldOut == kHeldOut - 1 ? data.test : data.train;
    for (int i = 0; i < kPixels; ++i) {
      images.pixels.push_back(static_cast<float>(values[static_cast<std::size_t>(i)]) / kInkMax);
    }
    images.labels.push_back(values[kPixels]);
  }
  if (file.bad()) throw heddle::IoError(fmt::format("{}: cannot be read", path));
  if (data.test.size() == 0) {
    throw heddle::IoError(fmt::format("{}: expected {} images at least, found {}", path, kHeldOut,
                                      data.train.size()));
  }
  return data;
}

}  // namespace digits
