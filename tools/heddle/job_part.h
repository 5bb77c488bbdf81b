// What the keepers of other hosts must know of a job: the processes of one role, by host. It
// travels as text, through a pipe or in a variable, and never in a command line, for it holds the
// token.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tools/heddle/launcher.h"

namespace heddle::tools {

struct JobPart {
  Job job;  // with the launcher's variables; launcher_arguments stay behind
  std::string root_host;
  int root_port = 0;
  std::vector<std::vector<Place>> places;  // by host
};

// Throws InvalidArgument for text that is not UTF-8.
std::string ToText(const JobPart& part);
// Throws InvalidArgument, naming both versions if it is another heddle's.
JobPart ParseJobPart(std::string_view text);

// Framed by its length, for a pipe in which something else follows.
std::string Framed(const std::string& text);
// Reads it, and nothing of what follows. Throws IoError if it ends early.
std::string ReadFramed(int fd);

// The variables of this process that its job has elsewhere too: HEDDLE_*, DMLC_*, MXNET_* and OMP_*
// that say nothing about a process or its machine.
std::vector<Variable> SettingsPassedOn();

// Those, and on other hosts, whose folders are as here, PATH, LD_LIBRARY_PATH, PYTHONPATH and
// VIRTUAL_ENV.
std::vector<Variable> PassedOn();

// `role`'s part of the job, with the variables above under those of the user.
JobPart MakeJobPart(const Job& job, DistRole role, const std::vector<Host>& hosts,
                    const std::string& root_host, int root_port);

}  // namespace heddle::tools
