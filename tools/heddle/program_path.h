// Where other programs lie.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace heddle::tools {

// The executable file that the shell would run for `program`, by PATH; nothing if there is none.
std::optional<std::string> FindProgram(std::string_view program);

}  // namespace heddle::tools
