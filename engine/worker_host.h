// Where the workers of a threaded engine come from.
//
// The engine asks for a worker when it has work and too few look at it; the host calls run_worker
// on some thread, soon. A worker drains the ready ops, lingers briefly and returns: nothing parks
// inside the host.
#pragma once

#include <heddle/engine.h>

#include <functional>
#include <memory>

namespace heddle::engine {

// Whose thread a worker runs on. A guest's is others' as well: after a while of work the worker
// returns true, to be called again when those have had their turn. On a thread of the engine's own
// it works on, and returns false.
enum class WorkerThread { kOwn, kGuest };
using RunWorker = std::function<bool(WorkerThread)>;

class WorkerHost {
 public:
  virtual ~WorkerHost() = default;  // after End()

  // Ends the host's threads, once every requested run has returned. Nobody asks for more; but
  // threads that have lost their reason to ask meanwhile may still find out that nobody IsComing.
  virtual void End() noexcept = 0;

  // When a worker is to come. kSoon: some microseconds later, which costs the caller less.
  enum class When { kNow, kSoon };

  // Calls run_worker on another thread, until it returns false. Threads: any.
  virtual void RequestWorker(When when) noexcept = 0;
  // Takes back requests that the host's threads have not come to, and may not for long. Returns how
  // many: their calls will not come.
  virtual int Revoke() noexcept { return 0; }
  // True: some call of run_worker() begins soon and has not begun yet. seq_cst: of
  // a ticket taken or a mode changed before the call it will know. Threads: any.
  virtual bool IsComing() const noexcept = 0;
  // By a worker inside run_worker. AboutToLeave: it will return false without looking for work
  // again, so a request that comes from now on may be met by calling it once more. Stay: it goes on
  // after all; a call that was asked for in between comes on another thread.
  virtual void AboutToLeave() noexcept {}
  virtual void Stay() noexcept {}
};

std::unique_ptr<WorkerHost> MakeTbbHost(int workers, RunWorker run_worker);
std::unique_ptr<WorkerHost> MakeThreadHost(int workers, RunWorker run_worker);

}  // namespace heddle::engine
