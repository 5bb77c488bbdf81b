// The communicators of NCCL that a process has in a group of devices: one, and a stream, a device.
//
// Whatever ends its life, an exception in the middle of its set-up included: what is left of the
// communicators is aborted, all of them at a time, and only then the streams are freed. NCCL may
// never come to the end of that: it waits for its own streams, and these perhaps for an event of a
// device that has failed. So there is a patience; then threads stay behind, and keep what NCCL may
// use until they end.
#pragma once

#include <chrono>
#include <exception>
#include <memory>
#include <optional>
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

  // `patience`: with Abort.
  Communicators(std::shared_ptr<Nccl> nccl, std::shared_ptr<internal::GpuDriver> driver,
                std::chrono::milliseconds patience);
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
  void Destroy() noexcept { TakeDown(&Nccl::Destroy, std::nullopt); }
  // False: the patience is over, and NCCL may still use what it was given.
  bool Abort() noexcept { return TakeDown(&Nccl::Abort, patience_); }

  // Something that NCCL may use as long as there are communicators, and whoever takes them down.
  void Keep(std::shared_ptr<void> what);
  // Lets go of the streams, and of what it keeps. After Destroy or Abort; nothing else comes then.
  void Drop() noexcept { held_ = nullptr; }

  std::span<const Member> members() const { return members_; }

 private:
  struct Held;  // shared with the threads that take communicators down

  bool TakeDown(void (Nccl::*how)(Nccl::Comm comm) noexcept,
                std::optional<std::chrono::milliseconds> patience) noexcept;

  const std::shared_ptr<Nccl> nccl_;
  const std::shared_ptr<internal::GpuDriver> driver_;
  const std::chrono::milliseconds patience_;
  std::shared_ptr<Held> held_;
  std::vector<Member> members_;
};

}  // namespace heddle::kvstore
