#include "kvstore/dist/state_signal.h"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <exception>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>
#include <semaphore.h>

#include "base/log.h"
#include "base/mutex.h"

namespace heddle::kvstore::dist {

namespace {

sem_t signalled;  // what a signal handler may post

class Describers {
 public:
  void Add(const std::function<std::string()>* describe) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    all_.push_back(describe);
    StartLocked();
  }
  void Start() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    StartLocked();
  }
  void Remove(const std::function<std::string()>* describe) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    std::erase(all_, describe);
  }

 private:
  void StartLocked() REQUIRES(mutex_) {
    if (std::exchange(started_, true)) return;
    struct sigaction before {};
    sigaction(SIGUSR1, nullptr, &before);
    if (before.sa_handler != SIG_DFL) return;
    sem_init(&signalled, 0, 0);
    std::thread([this] { PrintOnSignals(); }).detach();
    struct sigaction ours {};
    ours.sa_handler = [](int) { sem_post(&signalled); };
    ours.sa_flags = SA_RESTART;
    sigaction(SIGUSR1, &ours, nullptr);
  }

  void PrintOnSignals() EXCLUDES(mutex_) {
    pthread_setname_np(pthread_self(), "heddle-state");
    for (;;) {
      if (sem_wait(&signalled) != 0) continue;  // interrupted
      MutexLock lock(mutex_);
      for (const auto* describe : all_) Print(*describe);
    }
  }

  // Nothing that goes wrong here, where stderr cannot be written for example, is worth the process.
  static void Print(const std::function<std::string()>& describe) noexcept {
    try {
      const std::string text = describe() + "\n";
      std::fwrite(text.data(), 1, text.size(), stderr);
      std::fflush(stderr);
    } catch (const std::exception& error) {
      Log(LogLevel::kError, "the state cannot be described: {}", error.what());
    }
  }

  Mutex mutex_;
  std::vector<const std::function<std::string()>*> all_ GUARDED_BY(mutex_);
  bool started_ GUARDED_BY(mutex_) = false;
};

Describers& TheDescribers() {
  static Describers* const describers = new Describers;  // never destroyed: its thread never ends
  return *describers;
}

}  // namespace

StateOnSignal::StateOnSignal(std::function<std::string()> describe)
    : describe_(std::move(describe)) {
  TheDescribers().Add(&describe_);
}

StateOnSignal::~StateOnSignal() { TheDescribers().Remove(&describe_); }

void ExpectStateSignal() { TheDescribers().Start(); }

}  // namespace heddle::kvstore::dist
