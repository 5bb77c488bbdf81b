#include "base/job_file.h"

#include <cstddef>
#include <utility>

#include <unistd.h>

#include "base/env.h"

namespace heddle {

std::string PlaceInJob() {
  const std::string role = EnvString("HEDDLE_ROLE", EnvString("DMLC_ROLE", ""));
  if (role.empty() || role == "scheduler") return role;
  const std::string rank = EnvString("HEDDLE_RANK", "");
  return rank.empty() ? role + "-" + std::to_string(getpid()) : role + rank;
}

std::string JobFileName(const std::string& name) {
  const std::string place = PlaceInJob();
  std::string result = name;
  std::size_t at = result.find("%r");
  if (at != std::string::npos) {
    const std::string text = place.empty() ? "process" : place;
    for (; at != std::string::npos; at = result.find("%r", at + text.size())) {
      result.replace(at, 2, text);
    }
    return result;
  }
  if (name.empty() || place.empty() || name.find("%p") != std::string::npos) return result;
  return BeforeEnding(std::move(result), place);
}

std::string BeforeEnding(std::string name, const std::string& text) {
  const std::size_t folder = name.rfind('/');
  const std::size_t first = folder == std::string::npos ? 0 : folder + 1;
  const std::size_t dot = name.rfind('.');
  const bool has_ending = dot != std::string::npos && dot > first;
  name.insert(has_ending ? dot : name.size(), "." + text);
  return name;
}

}  // namespace heddle
