#include "kvstore/updater_mutex.h"

#include <heddle/engine.h>

#include <optional>

#include "engine/wait_checks.h"

namespace heddle::kvstore {

void UpdaterMutex::Lock() {
  for (;;) {
    {
      const MutexLock lock(mutex_);
      if (is_held_) {
        const std::optional<Deadline> due = internal::WaitChecks::Next();
        bool in_time = true;
        while (is_held_ && in_time) {
          if (due) {
            in_time = released_.WaitUntil(mutex_, due->time());
          } else {
            released_.Wait(mutex_);
          }
        }
      }
      if (!is_held_) {
        is_held_ = true;
        return;
      }
    }
    internal::WaitChecks::Look();
  }
}

void UpdaterMutex::Unlock() {
  const MutexLock lock(mutex_);
  is_held_ = false;
  released_.NotifyOne();
}

}  // namespace heddle::kvstore
