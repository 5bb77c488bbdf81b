// The machines of a job, and which processes go where.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tools/heddle/launcher.h"

namespace heddle::tools {

using VariableLookup = std::function<std::optional<std::string>(const std::string& name)>;

// "node1,node2": a name that is there twice has two slots. Throws InvalidArgument for an empty one.
std::vector<Host> ParseHosts(std::string_view text);

// A host a line: its name, then "slots=4" if it has more than one; "#" begins a comment. Throws
// IoError for a file that cannot be read, InvalidArgument naming the line.
std::vector<Host> ReadHostsFile(const std::string& path);

// What the batch system has given this job: PE_HOSTFILE (Grid Engine), PBS_NODEFILE, or
// SLURM_JOB_NODELIST with SLURM_TASKS_PER_NODE; none outside of one. Throws as ReadHostsFile.
std::vector<Host> HostsFromEnvironment(const VariableLookup& variables);

// Those of the job, or else of the environment; InvalidArgument if there are none.
std::vector<Host> HostsOf(const Job& job);

// Slurm's short form: "n[1-3,07],login" is n1, n2, n3, n07 and login. Throws InvalidArgument.
std::vector<std::string> ExpandNodeList(std::string_view text);

// Which workers, or servers, each of the hosts gets, by host; some get none.
// Workers fill slots in order, neighbouring ranks together; servers are spread over the hosts.
std::vector<std::vector<Place>> PlacesOnHosts(const std::vector<Host>& hosts, DistRole role,
                                              int count);

}  // namespace heddle::tools
