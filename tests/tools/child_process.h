// Programs run by tests.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <sys/types.h>

namespace heddle::tools {

struct ProgramResult {
  int status = -1;     // exit status; -signal if a signal ended it
  std::string output;  // stdout and stderr
};

// Runs a program to its end. `environment` changes the test's own: "NAME=value".
ProgramResult RunProgram(const std::vector<std::string>& command,
                         const std::vector<std::string>& environment = {});

// A program that runs until it ends or is killed, at the latest by the destructor.
class RunningProgram {
 public:
  // With a file, stdout and stderr go there, and not to the methods that read them.
  explicit RunningProgram(const std::vector<std::string>& command,
                          const std::vector<std::string>& environment = {},
                          const std::string& output_file = "");
  ~RunningProgram() { Kill(); }
  RunningProgram(const RunningProgram&) = delete;
  RunningProgram& operator=(const RunningProgram&) = delete;

  pid_t pid() const { return pid_; }
  std::string ReadLine();  // of its output; waits for it
  // Up to and with the first line that contains `text`; all there is if none does.
  std::string ReadUntil(const std::string& text);
  // Until each of `beginnings` has begun a line. Returns those that none began with when the output
  // ended.
  std::vector<std::string> ReadUntilAll(std::vector<std::string> beginnings);
  void Signal(int signal);  // nothing if it is known to have ended
  // Its status, as in ProgramResult, if it has ended. No Wait after that.
  std::optional<int> Ended();
  ProgramResult Wait();  // for its end, with what was not read of the output
  void Kill();           // SIGKILL; returns when the process is gone

 private:
  pid_t pid_ = -1;
  int output_ = -1;
};

}  // namespace heddle::tools
