// What starts processes on other machines, as a test has it on this one: real daemons of its own,
// in folders and on ports of their own.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tests/tools/child_process.h"
#include "tests/tools/free_port.h"
#include "tools/testing/temp_folder.h"

namespace heddle::tools {

constexpr const char* kHeddle = HEDDLE_COMMAND;
constexpr const char* kWorker = WORKER_PROGRAM;

class Site {
 public:
  virtual ~Site() = default;
  // Two hosts, or as many as this machine can be: options of heddle launch.
  virtual std::vector<std::string> LaunchOptions() const = 0;
  virtual int num_hosts() const { return 2; }
  // A command that runs another one where the batch system wants it: "salloc ...".
  virtual std::vector<std::string> Around(std::vector<std::string> command) const {
    return command;
  }
  virtual std::vector<std::string> Environment() const { return {}; }  // "NAME=value"
  // Ends well, with Around and Environment, where what the site is made of works by itself.
  virtual std::vector<std::string> Probe() const { return {"true"}; }
};

struct SiteEntry {
  std::string launcher;
  std::vector<std::string> programs;  // that it needs
  std::string group;                  // of tools/setup.sh that has them
  std::unique_ptr<Site> (*make)();
};

// Sorted by launcher.
const std::vector<SiteEntry>& Sites();

// The first of the programs that is not in PATH, /usr/sbin or /sbin; "" if all are.
std::string MissingProgram(const std::vector<std::string>& programs);

// An sshd of this user's on 127.0.0.1 and 127.0.0.2.
class SshServer {
 public:
  SshServer();
  std::vector<std::string> ClientArguments() const;  // of ssh: port, key, ...

 private:
  const TempFolder folder_;
  const std::string port_;
  std::unique_ptr<RunningProgram> program_;
};

}  // namespace heddle::tools
