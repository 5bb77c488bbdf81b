#include "tools/heddle/program_words.h"

#include <algorithm>
#include <string_view>

namespace heddle::tools {

std::vector<std::string> TakeProgram(std::vector<const char*>& line) {
  if (line.size() < 2) return {};
  const std::string_view command = line[1];
  if (command != "launch" && command != "run") return {};
  const auto mark = std::find(line.begin(), line.end(), std::string_view("--"));
  if (mark == line.end() || mark + 1 == line.end()) return {};
  std::vector<std::string> taken(mark + 1, line.end());
  line.erase(mark + 2, line.end());
  line.back() = "program";  // CLI11 must see that there is one
  return taken;
}

std::vector<std::string> WholeProgram(std::vector<std::string> parsed,
                                      const std::vector<std::string>& taken) {
  if (taken.empty()) return parsed;
  parsed.pop_back();  // what is in front of it stood before the "--", which is the program's then
  parsed.insert(parsed.end(), taken.begin(), taken.end());
  return parsed;
}

}  // namespace heddle::tools
