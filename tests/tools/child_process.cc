#include "tests/tools/child_process.h"

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace heddle::tools {
namespace {

struct Child {
  pid_t pid;
  int output;  // stdout and stderr
};

// This process' environment with `changes`, each NAME=value. Made before the fork: the child of a
// program of several threads may take no memory, since a sanitizer's allocator may be locked in it.
std::vector<char*> EnvironmentWith(const std::vector<std::string>& changes) {
  std::vector<char*> variables;
  // Of two of a name the last counts.
  for (auto change = changes.rbegin(); change != changes.rend(); ++change) {
    variables.push_back(const_cast<char*>(change->c_str()));
  }
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text = *variable;
    const std::string_view name_and_sign = text.substr(0, text.find('=') + 1);
    const bool changed = std::ranges::any_of(
        changes, [&](const std::string& change) { return change.starts_with(name_and_sign); });
    if (!changed) variables.push_back(*variable);
  }
  variables.push_back(nullptr);
  return variables;
}

Child Start(const std::vector<std::string>& command, const std::vector<std::string>& environment,
            const std::string& output_file) {
  std::vector<char*> arguments;
  for (const std::string& argument : command) {
    arguments.push_back(const_cast<char*>(argument.c_str()));
  }
  arguments.push_back(nullptr);
  std::vector<char*> variables = EnvironmentWith(environment);
  std::array<int, 2> pipe_ends;
  if (pipe2(pipe_ends.data(), O_CLOEXEC) != 0) throw std::runtime_error("pipe failed");
  if (!output_file.empty()) {
    close(pipe_ends[1]);
    pipe_ends[1] = open(output_file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (pipe_ends[1] < 0) throw std::runtime_error("cannot write " + output_file);
  }
  const pid_t pid = fork();
  if (pid < 0) throw std::runtime_error("fork failed");
  if (pid == 0) {
    dup2(pipe_ends[1], STDOUT_FILENO);
    dup2(pipe_ends[1], STDERR_FILENO);
    execvpe(arguments[0], arguments.data(), variables.data());
    std::perror(arguments[0]);
    _exit(127);
  }
  close(pipe_ends[1]);
  return {pid, pipe_ends[0]};
}

int StatusOf(int wait_status) {
  return WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : -WTERMSIG(wait_status);
}

}  // namespace

ProgramResult RunProgram(const std::vector<std::string>& command,
                         const std::vector<std::string>& environment) {
  return RunningProgram(command, environment).Wait();
}

RunningProgram::RunningProgram(const std::vector<std::string>& command,
                               const std::vector<std::string>& environment,
                               const std::string& output_file) {
  const Child child = Start(command, environment, output_file);
  pid_ = child.pid;
  output_ = child.output;
}

std::string RunningProgram::ReadLine() {
  std::string line;
  for (char c; read(output_, &c, 1) == 1 && c != '\n';) line += c;
  return line;
}

std::string RunningProgram::ReadUntil(const std::string& text) {
  std::string output;
  for (;;) {
    const std::string line = ReadLine();
    output += line + "\n";
    if (line.empty() || line.find(text) != std::string::npos) return output;
  }
}

std::vector<std::string> RunningProgram::ReadUntilAll(std::vector<std::string> beginnings) {
  while (!beginnings.empty()) {
    const std::string line = ReadLine();
    if (line.empty()) break;
    std::erase_if(beginnings, [&](const std::string& text) { return line.starts_with(text); });
  }
  return beginnings;
}

void RunningProgram::Signal(int signal) {
  if (pid_ > 0) kill(pid_, signal);  // -1 would be all processes there are
}

ProgramResult RunningProgram::Wait() {
  ProgramResult result;
  std::array<char, 4096> buffer;
  for (ssize_t got; (got = read(output_, buffer.data(), buffer.size())) > 0;) {
    result.output.append(buffer.data(), static_cast<std::size_t>(got));
  }
  close(output_);
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = -1;
  result.status = StatusOf(status);
  return result;
}

std::optional<int> RunningProgram::Ended() {
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) != pid_) return std::nullopt;
  close(output_);
  pid_ = -1;
  return StatusOf(status);
}

void RunningProgram::Kill() {
  if (pid_ < 0) return;
  kill(pid_, SIGKILL);
  int status = 0;
  waitpid(pid_, &status, 0);
  close(output_);
  pid_ = -1;
}

}  // namespace heddle::tools
