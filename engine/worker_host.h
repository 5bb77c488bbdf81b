// Where the workers of a threaded engine come from.
//
// The engine asks for a worker when it has work and too few look at it; the host calls run_worker()
// on some thread, soon. A worker drains the ready ops, lingers briefly and returns: nothing parks
// inside the host.
#pragma once

#include <heddle/engine.h>

#include <functional>
#include <memory>

namespace heddle::engine {

class WorkerHost {
 public:
  virtual ~WorkerHost() = default;  // after every requested run has returned
  // Calls run_worker once, on another thread. Threads: any.
  virtual void RequestWorker() noexcept = 0;
};

std::unique_ptr<WorkerHost> MakeTbbHost(int workers, std::function<void()> run_worker);
std::unique_ptr<WorkerHost> MakeThreadHost(int workers, std::function<void()> run_worker);

}  // namespace heddle::engine
