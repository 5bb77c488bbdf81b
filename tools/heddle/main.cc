// The `heddle` command.
#include <heddle/error.h>

#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "base/build_info.h"
#include "tools/heddle/commands.h"

namespace {

// Prints what CLI11 has to say, if anything. Help is a success, a command ends with a status of its
// own by a RuntimeError; all else is 1, as for every other reason not to begin.
int Exit(const CLI::App& app, const CLI::ParseError& error) {
  const int status = app.exit(error);
  return status == 0 || dynamic_cast<const CLI::RuntimeError*>(&error) != nullptr ? status : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("heddle: asynchronous execution engine and parameter store", "heddle");
  app.set_version_flag("--version", fmt::format("heddle {}", heddle::kVersion));
  app.require_subcommand(1);
  heddle::tools::AddBenchCommand(app);
  heddle::tools::AddDoctorCommand(app);
  heddle::tools::AddKeepCommand(app);
  heddle::tools::AddLaunchCommand(app);
  heddle::tools::AddRunCommand(app);
  heddle::tools::AddSchedulerCommand(app);
  heddle::tools::AddServerCommand(app);
  heddle::tools::AddStatusCommand(app);
  heddle::tools::AddTraceCommand(app);
  heddle::tools::AddWireDumpCommand(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::RequiredError& error) {
    // CLI11 would only say that a command is missing.
    const std::vector<std::string> given = app.remaining();
    if (!app.get_subcommands().empty() || given.empty()) return Exit(app, error);
    std::vector<std::string> known;
    for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
      if (!command->get_group().empty()) known.push_back(command->get_name());
    }
    fmt::print(stderr, "heddle: unknown command '{}': expected one of {}\n", given.front(),
               fmt::join(known, ", "));
    return 1;
  } catch (const CLI::ParseError& error) {
    return Exit(app, error);
  } catch (const std::exception& error) {
    fmt::print(stderr, "heddle: {}\n", error.what());
    return 1;
  }
  return 0;
}
