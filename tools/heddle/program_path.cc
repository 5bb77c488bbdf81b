#include "tools/heddle/program_path.h"

#include <cstdlib>
#include <filesystem>
#include <system_error>

#include <unistd.h>

namespace heddle::tools {

std::optional<std::string> FindProgram(std::string_view program) {
  const char* const variable = std::getenv("PATH");
  std::string_view folders = variable != nullptr ? variable : "/usr/bin:/bin";
  while (!folders.empty()) {
    const std::size_t end = folders.find(':');
    const std::filesystem::path path = std::filesystem::path(folders.substr(0, end)) / program;
    std::error_code ignored;
    if (std::filesystem::is_regular_file(path, ignored) && access(path.c_str(), X_OK) == 0) {
      return path.string();
    }
    folders = end == std::string_view::npos ? std::string_view() : folders.substr(end + 1);
  }
  return std::nullopt;
}

}  // namespace heddle::tools
