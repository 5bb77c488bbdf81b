#include "benchmarks/support/resnet.h"

namespace heddle::bench {

std::vector<std::int64_t> ResNet50() {
  std::vector<std::int64_t> sizes;
  const auto add_convolution = [&](std::int64_t in, std::int64_t out, std::int64_t width) {
    for (const std::int64_t size : {in * out * width * width, out, out}) sizes.push_back(size);
  };
  add_convolution(3, 64, 7);
  std::int64_t in = 64;
  std::int64_t width = 64;
  for (const int blocks : {3, 4, 6, 3}) {
    for (int block = 0; block < blocks; ++block) {
      add_convolution(in, width, 1);
      add_convolution(width, width, 3);
      add_convolution(width, 4 * width, 1);
      if (block == 0) add_convolution(in, 4 * width, 1);  // of the shortcut
      in = 4 * width;
    }
    width *= 2;
  }
  for (const std::int64_t size : {in * 1000, std::int64_t{1000}}) sizes.push_back(size);
  return sizes;
}

}  // namespace heddle::bench
