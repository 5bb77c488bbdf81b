// `heddle scheduler` and `heddle server`: a process of a distributed job that runs no program of
// the user's. Each runs until the job ends.
#include <heddle/dist.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/env.h"
#include "kvstore/dist/config.h"
#include "kvstore/dist/state_signal.h"
#include "tools/heddle/commands.h"

namespace heddle::tools {
namespace {

using kvstore::dist::GivenValue;
using kvstore::dist::Setting;

std::string OptionName(std::string_view field) {
  std::string name = fmt::format("--{}", field);
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

// The role is the command; a secret on a command line is none.
bool IsOption(const Setting& setting) {
  return setting.field != "role" && setting.field != "token";
}

void AddRoleCommand(CLI::App& app, DistRole role, const char* description,
                    const std::function<void(const DistOptions&)>& run) {
  const std::string name(DistRoleName(role));
  CLI::App* const command = app.add_subcommand(name, description);
  auto given = std::make_shared<std::vector<GivenValue>>();
  given->push_back({"role", name, fmt::format("heddle {}", name)});
  for (const Setting& setting : kvstore::dist::Settings()) {
    if (!IsOption(setting)) continue;
    const std::string option = OptionName(setting.field), field(setting.field);
    command->add_option_function<std::string>(
        option,
        [given, field, option](const std::string& text) {
          given->push_back({field, text, option});
        },
        fmt::format("{} ({})", setting.meaning, fmt::join(setting.variables, ", ")));
  }
  command->callback([given, run] {
    kvstore::dist::ExpectStateSignal();
    run(kvstore::dist::ReadDistOptions(
        [](const std::string& variable) { return EnvString(variable.c_str()); }, *given));
  });
}

}  // namespace

void AddSchedulerCommand(CLI::App& app) {
  AddRoleCommand(app, DistRole::kScheduler, "Run the scheduler of a distributed job",
                 [](const DistOptions& options) { RunScheduler(options); });
}

void AddServerCommand(CLI::App& app) {
  AddRoleCommand(app, DistRole::kServer, "Run a server of a distributed job",
                 [](const DistOptions& options) { RunServer(options); });
}

}  // namespace heddle::tools
