#include "kvstore/nccl/communicators.h"

#include <heddle/error.h>

#include <thread>

#include "base/log.h"

namespace heddle::kvstore {

Communicators::~Communicators() {
  Abort();
  for (const Member& member : members_) {
    if (member.stream != nullptr) driver_->Free(member.device, member.stream);
  }
}

bool Communicators::Open(std::span<const int> devices, int stream_priority, const Nccl::Id& id,
                         int ranks, int first_rank) {
  for (const int device : devices) members_.push_back({.device = device});
  for (Member& member : members_) {
    const EnteredDevice entered(*driver_, member.device);
    member.stream = driver_->NewStream(/*urgent=*/false, stream_priority);
  }
  // For NCCL too, which brings back whatever device is current where the group ends.
  const EnteredDevice first(*driver_, devices.front());
  nccl_->GroupStart();
  std::exception_ptr error;
  int rank = first_rank;
  for (Member& member : members_) {
    try {
      const EnteredDevice entered(*driver_, member.device);
      nccl_->Init(&member.comm, ranks, id, rank++);
    } catch (...) {
      error = std::current_exception();
      break;
    }
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

// Of all communicators at a time: each may wait for the others.
void Communicators::TakeDown(void (Nccl::*how)(Nccl::Comm comm) noexcept) noexcept {
  std::vector<std::thread> threads;
  for (Member& member : members_) {
    if (member.comm == nullptr) continue;
    threads.emplace_back([this, how, device = member.device, comm = member.comm] {
      try {
        driver_->Enter(device);  // for good: no context is made on the thread's first device
      } catch (const CudaError& error) {
        Log(LogLevel::kError, "gpu({}): {}", device, error.what());
      }
      (*nccl_.*how)(comm);
    });
    member.comm = nullptr;
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace heddle::kvstore
