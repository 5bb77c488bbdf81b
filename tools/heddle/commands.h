// The commands of `heddle`. Each lives in a file of its own; main.cc has the list.
#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace heddle::tools {

// Each adds one subcommand to `app`, whose callback does the work. A heddle::Error that leaves the
// callback is printed as "heddle: <message>" and makes the exit status 1. `taken`: by TakeProgram
// (program_words.h); lives as long as `app`.
void AddBenchCommand(CLI::App& app);
void AddDoctorCommand(CLI::App& app);
void AddKeepCommand(CLI::App& app);  // its exit status is that of its part of a job
// Its exit status is that of the job.
void AddLaunchCommand(CLI::App& app, const std::vector<std::string>& taken);
void AddRunCommand(CLI::App& app, const std::vector<std::string>& taken);
void AddSchedulerCommand(CLI::App& app);
void AddServerCommand(CLI::App& app);
void AddStatusCommand(CLI::App& app);
void AddTraceCommand(CLI::App& app);
void AddWireDumpCommand(CLI::App& app);

}  // namespace heddle::tools
