// The store "nccl" as this process's environment says: alone, in a job, or with those that have the
// same id.
#include <heddle/dist.h>
#include <heddle/nccl.h>

#include <memory>
#include <utility>

#include "kvstore/dist/run.h"
#include "kvstore/nccl/job_meeting.h"
#include "kvstore/nccl/nccl_id.h"
#include "kvstore/nccl/nccl_kvstore.h"
#include "kvstore/nccl/nccl_meeting.h"
#include "storage/gpus.h"

namespace heddle::kvstore {

std::unique_ptr<KVStore> MakeDeviceStore(Engine&, const KVStoreOptions&);  // local_kvstore.cc

bool NcclSpansJob() {
  if (NcclProcess::FromEnvironment()) return false;
  const DistOptions job = DistOptions::FromEnvironment();
  return !job.root_host.empty() && job.num_workers > 1;
}

namespace {

// Null: this process is alone.
std::shared_ptr<Meeting> MeetingOfProcess(Engine& engine, const std::shared_ptr<Nccl>& nccl,
                                          const DeviceGroupOptions& options) {
  if (const std::optional<NcclProcess> process = NcclProcess::FromEnvironment()) {
    if (process->processes == 1) return nullptr;
    return std::make_shared<NcclMeeting>(engine, nccl, storage::GpuDriverOf(engine), *process,
                                         options);
  }
  if (!NcclSpansJob()) return nullptr;
  return std::make_shared<JobMeeting>(
      dist::MakeProcessStore("dist_sync", engine),
      JobMeeting::Job{&dist::FailProcessWorker, &dist::FailureOfProcessJob});
}

}  // namespace

std::unique_ptr<KVStore> MakeNcclStore(Engine& engine, const KVStoreOptions& options) {
  DeviceGroupOptions group = DeviceGroupOptions::FromEnvironment();
  group.stream_priority =
      engine.options().gpu.lanes[static_cast<std::size_t>(Lane::kComm)].priority;
  const std::shared_ptr<Nccl> nccl = LoadNccl();
  return std::make_unique<NcclKVStore>(engine, nccl, MakeDeviceStore(engine, options), group,
                                       MeetingOfProcess(engine, nccl, group));
}

}  // namespace heddle::kvstore

namespace heddle {

std::string NewNcclId() { return kvstore::TextOf(kvstore::LoadNccl()->NewId()); }

}  // namespace heddle
