// The `heddle` command.
#include <heddle/error.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include "base/build_info.h"
#include "tools/heddle/commands.h"
#include "tools/heddle/program_words.h"

namespace {

// Prints what CLI11 has to say, if anything. Help is a success, a command ends with a status of its
// own by a RuntimeError; all else is 1, as for every other reason not to begin.
int Exit(const CLI::App& app, const CLI::ParseError& error) {
  const int status = app.exit(error);
  return status == 0 || dynamic_cast<const CLI::RuntimeError*>(&error) != nullptr ? status : 1;
}

// A file or socket that got the number of one that is closed would be taken for it, or replaced.
// Writing to stdout goes on to fail, so that lost output is noticed.
void OpenStandardFiles() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(fd, F_GETFD) >= 0) continue;
    [[maybe_unused]] const int opened = open("/dev/null", fd == STDOUT_FILENO ? O_RDONLY : O_RDWR);
  }
}

// fmt::print would throw where stderr cannot be written either.
void Complain(const std::string& text) { std::fputs(("heddle: " + text + "\n").c_str(), stderr); }

// Of a line that lacks something CLI11 says no more than that; words too many, misspelt ones among
// them, say it better. False: there are none.
bool ExplainUnexpected(const CLI::App& app) {
  std::vector<std::string> words = app.remaining(/*recurse=*/true);
  std::erase(words, "--");
  if (words.empty()) return false;
  if (const std::vector<CLI::App*> parsed = app.get_subcommands(); !parsed.empty()) {
    Complain(fmt::format("unexpected '{}': `heddle {} --help` lists what it takes",
                         fmt::join(words, " "), parsed.front()->get_name()));
    return true;
  }
  std::vector<std::string> known;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (!command->get_group().empty()) known.push_back(command->get_name());
  }
  Complain(fmt::format("unknown command '{}': expected one of {}", words.front(),
                       fmt::join(known, ", ")));
  return true;
}

int RunLine(std::vector<const char*> line) {
  const std::vector<std::string> taken = heddle::tools::TakeProgram(line);
  CLI::App app("heddle: asynchronous execution engine and parameter store", "heddle");
  app.set_version_flag("--version", fmt::format("heddle {}", heddle::kVersion));
  app.require_subcommand(1);
  heddle::tools::AddBenchCommand(app);
  heddle::tools::AddDoctorCommand(app);
  heddle::tools::AddKeepCommand(app);
  heddle::tools::AddLaunchCommand(app, taken);
  heddle::tools::AddRunCommand(app, taken);
  heddle::tools::AddSchedulerCommand(app);
  heddle::tools::AddServerCommand(app);
  heddle::tools::AddStatusCommand(app);
  heddle::tools::AddTraceCommand(app);
  heddle::tools::AddWireDumpCommand(app);
  try {
    app.parse(static_cast<int>(line.size()), line.data());
  } catch (const CLI::RequiredError& error) {
    return ExplainUnexpected(app) ? 1 : Exit(app, error);
  } catch (const CLI::ExtrasError& error) {
    return ExplainUnexpected(app) ? 1 : Exit(app, error);
  } catch (const CLI::ParseError& error) {
    return Exit(app, error);
  } catch (const std::exception& error) {
    Complain(error.what());
    return 1;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  OpenStandardFiles();
  const int status = RunLine({argv, argv + argc});
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return status;
  // An earlier failure has left a mark, and not its reason, which another attempt has.
  const int error = write(STDOUT_FILENO, "\n", 1) < 0 ? errno : EIO;
  Complain(fmt::format("stdout cannot be written: {}", std::strerror(error)));
  return status != 0 ? status : 1;
}
