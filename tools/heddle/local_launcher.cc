// All processes of the job on this machine.
#include <heddle/error.h>

#include <filesystem>
#include <string_view>
#include <utility>
#include <vector>

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
    // Else the folder may be one that its path does not lead to, behind another user's.
    if (job.folder != std::filesystem::current_path()) EnterFolder(job);
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

  std::vector<std::string_view> UselessOptions() const override {
    std::vector<std::string_view> options = Launcher::UselessOptions();
    options.push_back("--launcher-arg");
    return options;
  }
};

}  // namespace

std::unique_ptr<Launcher> MakeLocalLauncher() { return std::make_unique<LocalLauncher>(); }

}  // namespace heddle::tools
