// Workers as plain threads of the engine's own: what the thread sanitizer can follow, and what
// programs take that do not want oneTBB's threads.
#include <atomic>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "engine/scheduling.h"
#include "engine/worker_host.h"

namespace heddle::engine {
namespace {

class ThreadHost final : public WorkerHost {
 public:
  ThreadHost(int workers, RunWorker run_worker) : run_worker_(std::move(run_worker)) {
    threads_.reserve(static_cast<std::size_t>(workers));
    try {
      for (int i = 0; i < workers; ++i) threads_.emplace_back([this] { Loop(); });
    } catch (...) {  // the system has no more: those that are there go again
      End();
      throw;
    }
  }
  ~ThreadHost() override { End(); }

  void End() noexcept override {
    {
      const MutexLock lock(mutex_);
      stopping_ = true;
    }
    wake_.NotifyAll();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  void RequestWorker(When /*when*/) noexcept override {
    // Notified under the lock: once the request is taken, the engine may stop and go.
    const MutexLock lock(mutex_);
    requests_.fetch_add(1, std::memory_order_seq_cst);
    wake_.NotifyOne();
  }

  // There is a thread for each request.
  bool IsComing() const noexcept override { return requests_.load(std::memory_order_seq_cst) > 0; }

 private:
  void Loop() {
    PreferPromptWakeups();
    while (TakeRequest()) run_worker_(WorkerThread::kOwn);
  }

  bool TakeRequest() {
    const MutexLock lock(mutex_);
    // relaxed: changed under mutex_ alone
    while (requests_.load(std::memory_order_relaxed) == 0 && !stopping_) wake_.Wait(mutex_);
    if (requests_.load(std::memory_order_relaxed) == 0) return false;
    requests_.fetch_sub(1, std::memory_order_seq_cst);  // before the run looks; see IsComing
    return true;
  }

  const RunWorker run_worker_;
  Mutex mutex_;
  CondVar wake_;
  std::atomic<int> requests_{0};  // changed under mutex_
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;  // constant from construction to End()
};

}  // namespace

std::unique_ptr<WorkerHost> MakeThreadHost(int workers, RunWorker run_worker) {
  return std::make_unique<ThreadHost>(workers, std::move(run_worker));
}

}  // namespace heddle::engine
