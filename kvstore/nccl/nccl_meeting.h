// The meeting of processes that have nothing in common but an id of NCCL's: by NCCL itself, between
// one GPU of each.
#pragma once

#include <heddle/engine.h>

#include <memory>
#include <optional>
#include <string>

#include "base/mutex.h"
#include "base/unique_fd.h"
#include "engine/gpu/driver.h"
#include "kvstore/nccl/device_group.h"
#include "kvstore/nccl/meeting.h"
#include "kvstore/nccl/nccl_api.h"

namespace heddle::kvstore {

// What a process is told of the others.
struct NcclProcess {
  Nccl::Id id;
  int rank = 0;
  int processes = 1;

  // HEDDLE_NCCL_ID, HEDDLE_NCCL_RANK and HEDDLE_NCCL_PROCESSES; nothing if none of them is set.
  // InvalidArgument, naming the variable, for a value that cannot be and for one that is missing.
  static std::optional<NcclProcess> FromEnvironment();
};

// Are the processes of a store "nccl" that is made here the workers of a job? By the environment:
// it says where a job's scheduler is, and no NcclProcess.
bool NcclSpansJob();

// Keeps other processes of this host from using the same GPU with the same id, as long as it lives.
class DeviceClaim {
 public:
  DeviceClaim() = default;
  // InvalidArgument if another one has it. Where the system has no means for that nothing is kept:
  // NCCL may notice by itself.
  DeviceClaim(const Nccl::Id& id, int device, const std::string& unique_name);

 private:
  UniqueFd socket_;
};

// Errors: those of DeviceGroup.
class NcclMeeting final : public Meeting {
 public:
  NcclMeeting(Engine& engine, std::shared_ptr<Nccl> nccl,
              std::shared_ptr<internal::GpuDriver> driver, const NcclProcess& process,
              const DeviceGroupOptions& options);
  ~NcclMeeting() override;

  int rank() const override { return process_.rank; }
  int processes() const override { return process_.processes; }
  // The first one waits until all processes have come to theirs. InvalidArgument for a GPU that
  // another process of this host has used.
  void Use(int device) override EXCLUDES(mutex_);
  bool ready() const override { return group() != nullptr; }
  // What its own group has failed by.
  std::optional<std::string> failure() override;
  // Aborts that group: NCCL may so tell the others, who else wait until their deadline.
  void Fail(const std::string& why) override;

 protected:
  Bytes Add(const Bytes& bytes) override;

 private:
  std::shared_ptr<DeviceGroup> group() const EXCLUDES(mutex_);

  Engine& engine_;
  const std::shared_ptr<Nccl> nccl_;
  const std::shared_ptr<internal::GpuDriver> driver_;
  const NcclProcess process_;
  const DeviceGroupOptions options_;
  const std::shared_ptr<const NcclOrder> order_;
  DeviceClaim claim_;

  mutable Mutex mutex_;
  std::shared_ptr<DeviceGroup> group_ GUARDED_BY(mutex_);  // made by the first Use
};

}  // namespace heddle::kvstore
