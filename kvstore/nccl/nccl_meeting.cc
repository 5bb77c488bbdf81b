#include "kvstore/nccl/nccl_meeting.h"

#include <heddle/error.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <limits>
#include <utility>

#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "base/check.h"
#include "base/env.h"
#include "kvstore/nccl/nccl_id.h"

namespace heddle::kvstore {

std::optional<NcclProcess> NcclProcess::FromEnvironment() {
  constexpr const char* kId = "HEDDLE_NCCL_ID";
  constexpr const char* kRank = "HEDDLE_NCCL_RANK";
  constexpr const char* kProcesses = "HEDDLE_NCCL_PROCESSES";
  const bool any = EnvString(kId) || EnvString(kRank) || EnvString(kProcesses);
  if (!any) return std::nullopt;
  for (const char* const name : {kId, kRank, kProcesses}) {
    if (!EnvString(name)) {
      throw InvalidArgument(fmt::format("expected {}, {} and {}, or none of them: {} is not set",
                                        kId, kRank, kProcesses, name));
    }
  }
  NcclProcess process{.id = IdOf(kId, *EnvString(kId))};
  constexpr std::int64_t kMax = std::numeric_limits<int>::max();
  process.processes = static_cast<int>(EnvInt(kProcesses, 1, /*min=*/1, kMax));
  process.rank = static_cast<int>(EnvInt(kRank, 0, /*min=*/0, process.processes - 1));
  return process;
}

// A name in the system's list of Unix sockets, which is gone with the process.
DeviceClaim::DeviceClaim(const Nccl::Id& id, int device, const std::string& unique_name) {
  UniqueFd socket_of_claim(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (socket_of_claim.get() < 0) return;
  std::uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const char byte : TextOf(id)) {
    hash = (hash ^ static_cast<unsigned char>(byte)) * 1099511628211u;
  }
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // Behind a first byte of 0: an abstract name.
  const std::string name = fmt::format("heddle-nccl-{:016x}-{}", hash, unique_name);
  const std::size_t length = std::min(name.size(), sizeof(address.sun_path) - 1);
  std::copy_n(name.begin(), length, address.sun_path + 1);
  const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  if (bind(socket_of_claim.get(), reinterpret_cast<const sockaddr*>(&address), bytes) == 0) {
    socket_ = std::move(socket_of_claim);
  } else if (errno == EADDRINUSE) {
    throw InvalidArgument(
        fmt::format("NCCL: expected each GPU in one process alone, got gpu({}), which is {} and "
                    "that of another process of this host, with the same HEDDLE_NCCL_ID",
                    device, unique_name));
  }
}

NcclMeeting::NcclMeeting(Engine& engine, std::shared_ptr<Nccl> nccl,
                         std::shared_ptr<internal::GpuDriver> driver, const NcclProcess& process,
                         const DeviceGroupOptions& options)
    : engine_(engine),
      nccl_(std::move(nccl)),
      driver_(std::move(driver)),
      process_(process),
      options_(options),
      order_(NcclOrderOf(engine)) {}

NcclMeeting::~NcclMeeting() = default;

void NcclMeeting::Use(int device) {
  if (ready()) return;
  DeviceClaim claim(process_.id, device, driver_->UniqueName(device));
  auto group = DeviceGroup::Make(nccl_, driver_, {device}, order_, options_,
                                 GroupPlace{.id = process_.id,
                                            .ranks = process_.processes,
                                            .first_rank = process_.rank,
                                            .process = process_.rank,
                                            .processes = process_.processes});
  claim_ = std::move(claim);
  const MutexLock lock(mutex_);
  group_ = std::move(group);
}

std::shared_ptr<DeviceGroup> NcclMeeting::group() const {
  const MutexLock lock(mutex_);
  return group_;
}

std::optional<std::string> NcclMeeting::failure() {
  const std::shared_ptr<DeviceGroup> group = this->group();
  const std::exception_ptr error = group != nullptr ? group->failure() : nullptr;
  if (error == nullptr) return std::nullopt;
  return WhatOf(error);
}

void NcclMeeting::Fail(const std::string& why) {
  const std::shared_ptr<DeviceGroup> group = this->group();
  if (group != nullptr) group->Fail(std::make_exception_ptr(InvalidState(why)));
}

NcclMeeting::Bytes NcclMeeting::Add(const Bytes& bytes) {
  const std::shared_ptr<DeviceGroup> group = this->group();
  CHECK(group != nullptr);
  const Device device = Gpu(group->devices()[0]);
  const NDArray own = NDArray::FromVector(bytes, {static_cast<std::int64_t>(bytes.size())},
                                          DType::kUInt8, device, engine_);
  const NDArray sum(own.shape(), own.dtype(), device, engine_);
  DeviceGroup::Queue(group, "kvstore.nccl.meet",
                     {{.arrays = {own}, .sums = {sum}, .key = "meeting"}}, /*priority=*/0);
  return sum.ToVector<std::uint8_t>();
}

}  // namespace heddle::kvstore
