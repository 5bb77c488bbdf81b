// A mutex that is held for as long as an updater of the program's runs.
#pragma once

#include "base/mutex.h"

namespace heddle::kvstore {

// Not recursive. A thread that waits for it calls its check meanwhile (WaitCheckScope), since an
// updater may run for ever, and so may two that wait for each other's.
class CAPABILITY("mutex") UpdaterMutex {
 public:
  UpdaterMutex() = default;
  UpdaterMutex(const UpdaterMutex&) = delete;
  UpdaterMutex& operator=(const UpdaterMutex&) = delete;

  void Lock() ACQUIRE();  // throws what the check throws, and does not have it then
  void Unlock() RELEASE();

 private:
  Mutex mutex_;
  CondVar released_;
  bool is_held_ GUARDED_BY(mutex_) = false;
};

// Holds one from here to the end of the scope.
class SCOPED_CAPABILITY UpdaterLock {
 public:
  explicit UpdaterLock(UpdaterMutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.Lock(); }
  ~UpdaterLock() RELEASE() { mutex_.Unlock(); }
  UpdaterLock(const UpdaterLock&) = delete;
  UpdaterLock& operator=(const UpdaterLock&) = delete;

 private:
  UpdaterMutex& mutex_;
};

}  // namespace heddle::kvstore
