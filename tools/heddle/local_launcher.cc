// All processes of the job on this machine.
#include <heddle/error.h>

#include <utility>

#include "tools/heddle/job_keeper.h"
#include "tools/heddle/launcher.h"
#include "tools/heddle/root_listener.h"

namespace heddle::tools {
namespace {

class LocalLauncher final : public Launcher {
 public:
  int Run(const Job& job) override {
    if (!job.hosts.empty()) {
      throw InvalidArgument("launcher local starts processes on this machine: expected no hosts");
    }
    RootListener root =
        ListenAt(job.root_host.empty() ? "127.0.0.1" : job.root_host, job.root_port);
    std::vector<Task> tasks;
    tasks.push_back(SchedulerTask(job, root));
    AskForCause(tasks.back());
    const auto add = [&](const Place& place) {
      tasks.push_back(
          {.name = PlaceName(place),
           .command = {.arguments = CommandOf(job, place.role),
                       .environment = FullEnvironment(job, place, root.host, root.port)},
           .works = place.role == DistRole::kWorker});
    };
    for (int rank = 0; rank < job.num_servers; ++rank) {
      add({.role = DistRole::kServer, .rank = rank});
    }
    for (int rank = 0; rank < job.num_workers; ++rank) {
      add({.role = DistRole::kWorker,
           .rank = rank,
           .local_rank = rank,
           .local_size = job.num_workers});
    }
    return KeepTasks(std::move(tasks), {.grace = job.grace, .linger = job.linger});
  }
};

}  // namespace

std::unique_ptr<Launcher> MakeLocalLauncher() { return std::make_unique<LocalLauncher>(); }

}  // namespace heddle::tools
