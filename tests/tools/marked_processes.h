// What runs on this machine of a test's jobs, by a mark that they carry in their environment, and
// launchers in their command line.
#pragma once

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

#include <sys/types.h>

namespace heddle::tools {

// What can be read of it: a file of /proc may end when its process does.
inline std::string ReadFile(const std::string& path) {
  const std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  content << file.rdbuf();
  return content.str();
}

struct MarkedProcess {
  pid_t pid;
  std::string command;      // its first argument
  std::string environment;  // entries "NAME=value", each with a zero after it
};

inline std::vector<MarkedProcess> MarkedProcesses(const std::string& mark) {
  std::vector<MarkedProcess> found;
  std::error_code error;
  for (std::filesystem::directory_iterator entry("/proc", error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string folder = entry->path().string();
    const std::string command = ReadFile(folder + "/cmdline");
    std::string environment = ReadFile(folder + "/environ");
    if ((environment + command).find(mark) == std::string::npos) continue;
    found.push_back({static_cast<pid_t>(std::stoi(entry->path().filename().string())),
                     command.c_str(), std::move(environment)});
  }
  return found;
}

}  // namespace heddle::tools
