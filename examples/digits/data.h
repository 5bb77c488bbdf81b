// The handwritten digits of examples/data, split for training and testing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace digits {

inline constexpr int kPixels = 64;  // of an image
inline constexpr int kClasses = 10;

struct Images {
  std::vector<float> pixels;         // kPixels an image, from 0 to 1
  std::vector<std::int32_t> labels;  // 0 to 9

  std::size_t size() const { return labels.size(); }
};

struct DataSet {
  Images train, test;
};

// Reads the file; every fifth image is held out for the test, the others are for training.
// Errors: heddle::IoError naming the file, and the line if it is not 65 integers in their ranges.
DataSet LoadDigits(const std::string& path);

}  // namespace digits
