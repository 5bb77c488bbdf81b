// The scheduler's socket, bound by the launcher: a port that was only looked for could be somebody
// else's by the time the scheduler binds it, and workers may connect from now on.
#pragma once

#include <string>
#include <vector>

#include "tools/heddle/job_keeper.h"
#include "tools/heddle/launcher.h"

namespace heddle::tools {

struct RootListener {
  FileDescriptor socket;
  std::string host;  // as processes of the job are told
  int port = 0;
};

// At a name or address of this machine; port 0: a free one. Throws IoError naming both, and
// InvalidArgument for a name that has no address, and for the address of all interfaces.
RootListener ListenAt(const std::string& host, int port);

// As the job says; else at the address of this machine that the hosts reach, loopback if all of
// them are loopback. Throws as ListenAt, and for hosts that cannot be found.
RootListener ListenFor(const Job& job, const std::vector<Host>& hosts);

// The scheduler on this machine, which takes the socket over.
Task SchedulerTask(const Job& job, RootListener& listener);

// Has the scheduler say who fails first; for jobs whose processes are all tasks of one keeper.
// Throws IoError.
void AskForCause(Task& scheduler);

}  // namespace heddle::tools
