// The fields of DistOptions as text: read from variables and command lines, named in messages.
#pragma once

#include <heddle/dist.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace heddle::kvstore::dist {

// One field. Variables earlier in the list win.
struct Setting {
  std::string_view field;  // the name of the member, "root_port"
  std::vector<std::string_view> variables;
  std::string_view meaning;
  std::string default_text;  // "" if there is none
};

// All fields that have a text form, in the order of the struct.
std::vector<Setting> Settings();

// The value of an environment variable; nothing if it is unset or empty.
using VariableLookup = std::function<std::optional<std::string>(const std::string& name)>;

// What the usual launchers (mpirun, srun) tell a process of how many it is one of.
struct LaunchedProcess {
  std::string rank_variable, local_rank_variable, local_size_variable;  // their names
  int rank = 0;
  std::optional<int> size, local_rank, local_size;
};

// Of each launcher that has told anything, the innermost first.
std::vector<LaunchedProcess> LaunchedProcesses(const VariableLookup& variables);

// A value from elsewhere, which wins over variables.
struct GivenValue {
  std::string field;
  std::string text;
  std::string source;  // "--root-port"
};

// What DistOptions::FromEnvironment() does, with variables from anywhere and `given` values first.
// Throws what that throws; also for a `role` that is given and that variables contradict.
DistOptions ReadDistOptions(const VariableLookup& variables,
                            const std::vector<GivenValue>& given = {});

}  // namespace heddle::kvstore::dist
