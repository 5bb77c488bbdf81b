// Processes that are started, and what is done so that none of them is left.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <sys/types.h>

#include "tools/heddle/file_descriptor.h"

namespace heddle::tools {

// The two ends of a pipe that no program inherits by accident. Throws IoError.
struct Pipe {
  Pipe();
  FileDescriptor read;
  FileDescriptor write;
};

struct Command {
  std::vector<std::string> arguments;    // [0]: the program, looked for in PATH
  std::vector<std::string> environment;  // all of it, "NAME=value"
  // Stay open in the program, under the same numbers.
  std::vector<FileDescriptor> inherited = {};
  bool has_input = false;  // its stdin is a pipe, and not empty
};

struct StartedProcess {
  pid_t pid = -1;
  FileDescriptor in;        // of a program with input; never blocks
  FileDescriptor out, err;  // what it writes; never block
  int error = 0;            // errno if the program could not be run; then there is no process
};

// Runs a program in a process group of its own, with an empty stdin or a pipe. It is killed when
// the calling thread's process dies, whenever that is. Signals that the caller blocks or ignores
// are neither in the program. Throws IoError if there are no more processes or descriptors.
StartedProcess StartProcess(const Command& command);

// From now on a process whose parent has died becomes a child of this one, if this one is its
// nearest ancestor that has asked.
void AdoptOrphans();

// Kills what has this process as its parent, then what becomes its child by that, and so on until
// nothing is left. For processes that adopt orphans and have one thread. False if something cannot
// be killed.
bool KillDescendants();

// Sends a signal to those processes of the groups that have a handler for it.
void SignalHandlers(const std::vector<pid_t>& groups, int signal);

// "exited with status 3", "was ended by signal 6 (Aborted)", and the status that stands for that
// where a number must: 3, 134.
std::string DescribeStatus(int wait_status);
int ExitStatus(int wait_status);

}  // namespace heddle::tools
