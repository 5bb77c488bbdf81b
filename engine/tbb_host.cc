// Workers as oneTBB tasks, in one arena for all engines of the process; but the first worker of
// each engine is a thread of its own, see doorman.h.
//
// TBB gives its threads to arenas by a fixed rule: of several arenas that all want the only thread,
// the same one gets it every time. Inside one arena enqueued tasks run in the order in which they
// came, so engines that share an arena, and whose workers return to it after each turn, all
// advance.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/info.h>
#include <oneapi/tbb/task_arena.h>

#include "base/mutex.h"
#include "engine/doorman.h"
#include "engine/scheduling.h"
#include "engine/worker_host.h"

namespace heddle::engine {
namespace {

using oneapi::tbb::global_control;
using oneapi::tbb::task_arena;

constexpr std::chrono::microseconds kAtOnce{0};
// Enough for the call that asks for it to return: an interrupt before that would make it wait for
// the doorman's run.
constexpr std::chrono::microseconds kSoon{12};

// The arena with at least so many places for workers. It never goes: TBB's threads may be in it.
class SharedArena {
 public:
  static task_arena& WithPlaces(int workers) {
    static auto* shared = new SharedArena;
    const MutexLock lock(shared->mutex_);
    if (workers > shared->places_) shared->GrowLocked(workers);
    return *shared->arenas_.back();
  }

 private:
  // By default TBB has one thread less than there are CPUs, since it counts on the thread that
  // calls it. There is one control for all engines, since of several the least would count; one
  // that the host program holds still bounds it.
  void GrowLocked(int workers) REQUIRES(mutex_) {
    places_ = std::max(workers, oneapi::tbb::info::default_concurrency());
    limit_.emplace(global_control::max_allowed_parallelism, static_cast<std::size_t>(places_) + 1);
    arenas_.push_back(std::make_unique<task_arena>(places_, /*reserved_for_masters=*/0));
    arenas_.back()->initialize();
  }

  Mutex mutex_;
  int places_ GUARDED_BY(mutex_) = 0;
  std::optional<global_control> limit_ GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<task_arena>> arenas_
      GUARDED_BY(mutex_);  // earlier engines keep theirs
};

class TbbHost;

// The tasks that TBB has and no thread of it has begun, by the number of their host. A task knows
// that number alone: it may outlive its host, and the process may end before its turn.
class WaitingTasks {
 public:
  static WaitingTasks& OfAllHosts() {
    static auto* tasks = new WaitingTasks;  // never destroyed: TBB's threads may look at it
    return *tasks;
  }

  std::uint64_t Add(TbbHost* host) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    hosts_[++last_number_].host = host;
    return last_number_;
  }
  void Remove(std::uint64_t number) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    hosts_.erase(number);
  }
  void Expect(std::uint64_t number) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    ++hosts_.at(number).waiting;
  }
  // Which of the tasks are revoked is all the same. Returns how many.
  int Revoke(std::uint64_t number) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    Host& host = hosts_.at(number);
    host.revoked += host.waiting;
    return std::exchange(host.waiting, 0);
  }
  // The host of a task that begins; null: it was revoked.
  TbbHost* Begin(std::uint64_t number) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    const auto found = hosts_.find(number);
    if (found == hosts_.end()) return nullptr;
    Host& host = found->second;
    const bool begins = host.revoked == 0;
    --(begins ? host.waiting : host.revoked);
    return begins ? host.host : nullptr;
  }

 private:
  struct Host {
    TbbHost* host = nullptr;
    int waiting = 0;
    int revoked = 0;
  };

  Mutex mutex_;
  std::uint64_t last_number_ GUARDED_BY(mutex_) = 0;
  std::unordered_map<std::uint64_t, Host> hosts_ GUARDED_BY(mutex_);
};

class TbbHost final : public WorkerHost {
 public:
  TbbHost(int workers, RunWorker run_worker)
      : run_worker_(std::move(run_worker)),
        arena_(SharedArena::WithPlaces(workers)),
        number_(WaitingTasks::OfAllHosts().Add(this)),
        doorman_([this] { run_worker_(WorkerThread::kOwn); }) {}
  ~TbbHost() override { WaitingTasks::OfAllHosts().Remove(number_); }
  TbbHost(const TbbHost&) = delete;
  TbbHost& operator=(const TbbHost&) = delete;

  void End() noexcept override { doorman_.End(); }
  void RequestWorker(When when) noexcept override {
    if (!doorman_.Wake(when == When::kSoon ? kSoon : kAtOnce)) Enqueue();
  }
  int Revoke() noexcept override { return WaitingTasks::OfAllHosts().Revoke(number_); }
  // Not of those that are enqueued: the host program may keep TBB's threads for long.
  bool IsComing() const noexcept override { return doorman_.IsComing(); }
  void AboutToLeave() noexcept override { doorman_.AboutToLeave(); }
  void Stay() noexcept override {
    if (doorman_.Stay()) Enqueue();
  }

 private:
  void Enqueue() {
    const std::uint64_t number = number_;
    task_arena& arena = arena_;
    WaitingTasks::OfAllHosts().Expect(number);
    // It may be revoked already, and this host be gone.
    arena.enqueue([number] {
      TbbHost* const host = WaitingTasks::OfAllHosts().Begin(number);
      if (host == nullptr) return;
      PreferPromptWakeups();
      if (host->run_worker_(WorkerThread::kGuest)) host->Enqueue();
    });
  }

  const RunWorker run_worker_;
  task_arena& arena_;
  const std::uint64_t number_;
  Doorman doorman_;
};

}  // namespace

std::unique_ptr<WorkerHost> MakeTbbHost(int workers, RunWorker run_worker) {
  return std::make_unique<TbbHost>(workers, std::move(run_worker));
}

}  // namespace heddle::engine
