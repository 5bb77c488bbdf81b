#include "kvstore/nccl/communicators.h"

#include <heddle/error.h>

#include <cstddef>
#include <thread>

#include "base/log.h"
#include "base/mutex.h"

namespace heddle::kvstore {

struct Communicators::Held {
  ~Held() {
    for (const Member& member : streams) driver->Free(member.device, member.stream);
  }

  std::shared_ptr<Nccl> nccl;
  std::shared_ptr<internal::GpuDriver> driver;
  std::vector<Member> streams = {};
  Mutex mutex = {};
  CondVar ended = {};
  std::size_t running GUARDED_BY(mutex) = 0;  // threads
  // After the streams, which may use it.
  std::vector<std::shared_ptr<void>> kept GUARDED_BY(mutex) = {};
};

Communicators::Communicators(std::shared_ptr<Nccl> nccl,
                             std::shared_ptr<internal::GpuDriver> driver,
                             std::chrono::milliseconds patience)
    : nccl_(std::move(nccl)),
      driver_(std::move(driver)),
      patience_(patience),
      held_(new Held{.nccl = nccl_, .driver = driver_}) {}

Communicators::~Communicators() { Abort(); }

bool Communicators::Open(std::span<const int> devices, int stream_priority, const Nccl::Id& id,
                         int ranks, int first_rank) {
  for (const int device : devices) members_.push_back({.device = device});
  // Where NCCL writes the communicators: once more when a set-up ends, also by an abort, when these
  // here have been taken down.
  const auto written = std::make_shared<std::vector<Nccl::Comm>>(devices.size());
  Keep(written);
  for (Member& member : members_) {
    const EnteredDevice entered(*driver_, member.device);
    member.stream = driver_->NewStream(/*urgent=*/false, stream_priority);
    held_->streams.push_back(member);
  }
  // For NCCL too, which brings back whatever device is current where the group ends.
  const EnteredDevice first(*driver_, devices.front());
  nccl_->GroupStart();
  std::exception_ptr error;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    try {
      const EnteredDevice entered(*driver_, members_[i].device);
      nccl_->Init(&(*written)[i], ranks, id, first_rank + static_cast<int>(i));
    } catch (...) {
      error = std::current_exception();
    }
    members_[i].comm = (*written)[i];
    if (error != nullptr) break;
  }
  const bool done = nccl_->GroupEnd();
  if (error != nullptr) std::rethrow_exception(error);
  return done;
}

Nccl::State Communicators::Ask() noexcept {
  Nccl::State all;
  for (const Member& member : members_) {
    if (member.comm == nullptr) continue;
    Nccl::State state = nccl_->Ask(member.comm);
    if (state.error != nullptr) return state;
    all.in_progress |= state.in_progress;
  }
  return all;
}

bool Communicators::Finalize() {
  bool done = true;
  for (const Member& member : members_) {
    if (member.comm == nullptr) continue;
    const EnteredDevice entered(*driver_, member.device);
    done &= nccl_->Finalize(member.comm);
  }
  return done;
}

void Communicators::Keep(std::shared_ptr<void> what) {
  const MutexLock lock(held_->mutex);
  held_->kept.push_back(std::move(what));
}

// Of all communicators at a time: each may wait for the others.
bool Communicators::TakeDown(void (Nccl::*how)(Nccl::Comm comm) noexcept,
                             std::optional<std::chrono::milliseconds> patience) noexcept {
  std::vector<std::thread> threads;
  for (Member& member : members_) {
    if (member.comm == nullptr) continue;
    {
      const MutexLock lock(held_->mutex);
      ++held_->running;
    }
    threads.emplace_back([held = held_, how, device = member.device, comm = member.comm] {
      try {
        held->driver->Enter(device);  // for good: no context is made on the thread's first device
      } catch (const CudaError& error) {
        Log(LogLevel::kError, "gpu({}): {}", device, error.what());
      }
      (*held->nccl.*how)(comm);
      const MutexLock lock(held->mutex);
      --held->running;
      held->ended.NotifyAll();
    });
    member.comm = nullptr;
  }
  if (threads.empty()) return true;
  bool over = false;
  {
    const auto since = std::chrono::steady_clock::now();
    const MutexLock lock(held_->mutex);
    while (held_->running > 0) {
      if (!patience) {
        held_->ended.Wait(held_->mutex);
      } else if (!held_->ended.WaitUntil(held_->mutex, since + *patience)) {
        break;
      }
    }
    over = held_->running == 0;
  }
  for (std::thread& thread : threads) {
    if (over) {
      thread.join();
    } else {
      thread.detach();
    }
  }
  if (!over) {
    Log(LogLevel::kError,
        "NCCL's communicators are still there after {} ms; what they may use is kept",
        patience->count());
  }
  return over;
}

}  // namespace heddle::kvstore
