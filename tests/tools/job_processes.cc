#include "tests/tools/job_processes.h"

#include <algorithm>
#include <csignal>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "tests/tools/free_port.h"

namespace heddle::tools {

std::string JobProcesses::Process::Output() const {
  const std::ifstream stream(file, std::ios::binary);
  std::ostringstream content;
  content << stream.rdbuf();
  return content.str();
}

std::string JobProcesses::Process::StatusLine(const std::string& name) const {
  if (status) return {};
  std::ifstream stream("/proc/" + std::to_string(program->pid()) + "/status");
  for (std::string line; std::getline(stream, line);) {
    if (line.starts_with(name + ":")) return line.substr(name.size() + 1);
  }
  return {};
}

long JobProcesses::Process::ResidentKiB() const {
  const std::string line = StatusLine("VmRSS");
  return line.empty() ? 0 : std::stol(line);
}

JobProcesses::JobProcesses(const JobSpec& spec, std::mt19937_64& random)
    : mark_("HEDDLE_JOB_ID=faults-" + std::to_string(random())) {
  const std::string port = FreePort();
  port_ = std::stoi(port);
  std::vector<std::string> environment = {"HEDDLE_ROOT_HOST=127.0.0.1",
                                          "HEDDLE_ROOT_PORT=" + port,
                                          "HEDDLE_JOB_WORKERS=" + std::to_string(spec.num_workers),
                                          "HEDDLE_JOB_SERVERS=" + std::to_string(spec.num_servers),
                                          "HEDDLE_TOKEN=secret",
                                          mark_};
  environment.insert(environment.end(), spec.environment.begin(), spec.environment.end());
  struct Place {
    std::string role;
    int rank;
  };
  std::vector<Place> places = {{"scheduler", -1}};
  for (int i = 0; i < spec.num_servers; ++i) places.push_back({"server", i});
  for (int i = 0; i < spec.num_workers; ++i) places.push_back({"worker", i});
  std::shuffle(places.begin(), places.end(), random);
  for (const Place& place : places) {
    std::vector<std::string> command;
    if (spec.prefix) command = spec.prefix(place.role, place.rank);
    const auto program = place.role == "worker"
                             ? spec.program
                             : std::vector{std::string(HEDDLE_COMMAND), place.role};
    command.insert(command.end(), program.begin(), program.end());
    Start(place.role, place.rank, command, environment);
  }
}

void JobProcesses::Start(const std::string& role, int rank, const std::vector<std::string>& command,
                         const std::vector<std::string>& environment) {
  Process process;
  process.name = rank < 0 ? role : role + " " + std::to_string(rank);
  process.file = folder_ / process.name;
  std::vector<std::string> mine = environment;
  mine.push_back("HEDDLE_ROLE=" + role);
  if (rank >= 0) mine.push_back("HEDDLE_RANK=" + std::to_string(rank));
  process.program = std::make_unique<RunningProgram>(command, mine, process.file);
  processes_.push_back(std::move(process));
}

JobProcesses::Process& JobProcesses::Find(const std::string& name) {
  const auto found = std::find_if(processes_.begin(), processes_.end(),
                                  [&](const Process& process) { return process.name == name; });
  if (found == processes_.end()) throw std::runtime_error("no process " + name);
  return *found;
}

void JobProcesses::Look() {
  for (Process& process : processes_) {
    if (process.status) continue;
    process.status = process.program->Ended();
    if (process.status) process.ended = Clock::now();
  }
}

void JobProcesses::Pause() { std::this_thread::sleep_for(std::chrono::milliseconds(2)); }

bool JobProcesses::WaitForEnd(Clock::time_point until, const Process* spared) {
  return WaitUntil(until, [&] {
    return std::all_of(processes_.begin(), processes_.end(), [&](const Process& process) {
      return &process == spared || process.status.has_value();
    });
  });
}

bool JobProcesses::WaitForOutput(const Process& process, const std::string& text,
                                 Clock::time_point until) {
  return WaitUntil(until, [&] { return process.Output().find(text) != std::string::npos; });
}

std::string JobProcesses::Describe() {
  for (const Process& process : processes_) {
    if (!process.status) process.program->Signal(SIGUSR1);
  }
  WaitUntil(Clock::now() + std::chrono::seconds(1), [] { return false; });
  std::string text;
  for (const Process& process : processes_) {
    text += "---- " + process.name + ", " +
            (process.status ? "status " + std::to_string(*process.status)
                            : "running:" + process.StatusLine("State")) +
            "\n" + process.Output();
  }
  return text;
}

}  // namespace heddle::tools
