// The communicators of NCCL that a process has in a group of devices: one, and a stream, a device.
//
// Whatever ends its life, an exception in the middle of its set-up included: what is left of the
// communicators is aborted, all of them at a time, and only then the streams are freed.
#pragma once

#include <exception>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "engine/gpu/driver.h"
#include "kvstore/nccl/nccl_api.h"

namespace heddle::kvstore {

// The device is the thread's current one for a scope.
class EnteredDevice {
 public:
  EnteredDevice(internal::GpuDriver& driver, int device)
      : driver_(driver), outer_(driver.Enter(device)) {}
  ~EnteredDevice() { driver_.Leave(outer_); }
  EnteredDevice(const EnteredDevice&) = delete;
  EnteredDevice& operator=(const EnteredDevice&) = delete;

 private:
  internal::GpuDriver& driver_;
  const internal::GpuDriver::Context outer_;
};

// Threads: as of Nccl, one call at a time.
class Communicators {
 public:
  struct Member {  // of a device
    int device;
    internal::GpuDriver::Stream stream = nullptr;
    Nccl::Comm comm = nullptr;
  };

  Communicators(std::shared_ptr<Nccl> nccl, std::shared_ptr<internal::GpuDriver> driver)
      : nccl_(std::move(nccl)), driver_(std::move(driver)) {}
  ~Communicators();
  Communicators(const Communicators&) = delete;
  Communicators& operator=(const Communicators&) = delete;

  // Makes a rank, first_rank and up, of each device. False: it goes on, and Ask says when it is
  // over.
  [[nodiscard]] bool Open(std::span<const int> devices, int stream_priority, const Nccl::Id& id,
                          int ranks, int first_rank);
  // Of all of them: something goes on in one; the first error.
  Nccl::State Ask() noexcept;
  // The orderly end; what is said of Nccl's counts here, too.
  [[nodiscard]] bool Finalize();
  void Destroy() noexcept { TakeDown(&Nccl::Destroy); }
  void Abort() noexcept { TakeDown(&Nccl::Abort); }

  std::span<const Member> members() const { return members_; }

 private:
  void TakeDown(void (Nccl::*how)(Nccl::Comm comm) noexcept) noexcept;

  const std::shared_ptr<Nccl> nccl_;
  const std::shared_ptr<internal::GpuDriver> driver_;
  std::vector<Member> members_;
};

}  // namespace heddle::kvstore
