// The lines that a process of a job writes, for the program that writes them and the test that
// reads them.
#pragma once

#include <random>
#include <string>
#include <vector>

namespace heddle::tools {

// Random ones of 1 to 300 characters, now and then of thousands, each with its number.
inline std::vector<std::string> JobLines(unsigned seed, bool to_stderr, int count) {
  std::mt19937 random(seed * 2 + (to_stderr ? 1 : 0));
  std::vector<std::string> lines;
  for (int i = 0; i < count; ++i) {
    const std::size_t length = random() % 50 == 0 ? random() % 20000 : random() % 300;
    std::string line = (to_stderr ? "err" : "out") + std::to_string(i) + " ";
    while (line.size() < length) line += static_cast<char>('!' + random() % 90);
    lines.push_back(line);
  }
  return lines;
}

}  // namespace heddle::tools
