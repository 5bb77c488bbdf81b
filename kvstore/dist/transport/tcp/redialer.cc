#include "kvstore/dist/transport/tcp/redialer.h"

#include <utility>

namespace heddle::kvstore::dist {

void Redialer::Start(std::function<void()> dial) {
  MutexLock lock(mutex_);
  if (stopped_) return;
  calls_.remove_if([](Call& call) {
    // acquire: pairs with the end of the thread
    if (!call.done.load(std::memory_order_acquire)) return false;
    call.thread.join();
    return true;
  });
  std::list<Call> started(1);  // not among the others if there is no thread for it
  Call& call = started.front();
  call.thread = std::thread([&call, dial = std::move(dial)] {
    dial();
    call.done.store(true, std::memory_order_release);
  });
  calls_.splice(calls_.end(), started);
}

void Redialer::Stop() {
  std::list<Call> calls;
  {
    MutexLock lock(mutex_);
    stopped_ = true;
    calls.swap(calls_);
  }
  for (Call& call : calls) call.thread.join();
}

}  // namespace heddle::kvstore::dist
