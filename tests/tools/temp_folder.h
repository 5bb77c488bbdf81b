// A folder that lives as long as the object.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

namespace heddle::tools {

class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "heddle_tools_XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
  }
  ~TempFolder() { std::filesystem::remove_all(folder_); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  std::string operator/(const std::string& name) const { return folder_ + "/" + name; }

 private:
  std::string folder_;
};

}  // namespace heddle::tools
