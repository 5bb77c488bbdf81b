// The store "nccl" among others of its job: what its processes have to agree on.
#include <heddle/error.h>

#include <array>
#include <exception>
#include <map>
#include <sstream>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include "engine/may_wait.h"
#include "kvstore/checks.h"
#include "kvstore/nccl/nccl_id.h"
#include "kvstore/nccl/nccl_kvstore.h"
#include "kvstore/near_arrays.h"

namespace heddle::kvstore {

std::vector<std::string> NcclKVStore::Agree(std::string_view call,
                                            const std::function<std::string()>& say) {
  engine::CheckMayWait(call);
  const MutexLock lock(meeting_mutex_);
  if (const GroupPtr group = this->group()) group->ThrowIfFailed();
  // A first byte says whether this process refuses the call.
  std::exception_ptr refused;
  std::string text;
  try {
    text = "+" + say();
  } catch (...) {
    refused = std::current_exception();
    text = "-" + WhatOf(refused);
  }
  if (refused != nullptr && !meeting_->ready()) std::rethrow_exception(refused);
  std::vector<std::string> all = meeting_->Exchange(text);
  if (refused != nullptr) std::rethrow_exception(refused);
  const std::string first_line = text.substr(1, text.find('\n') - 1);
  for (std::size_t process = 0; process < all.size(); ++process) {
    std::string& theirs = all[process];
    const bool refuses = theirs[0] == '-';
    theirs.erase(0, 1);
    if (refuses) {
      throw InvalidArgument(
          fmt::format("{}: process {} has refused it: {}", call, process, theirs));
    }
    if (const std::string line = theirs.substr(0, theirs.find('\n')); line != first_line) {
      throw InvalidArgument(
          fmt::format("{}: expected the same calls in all processes, got '{}' in process {} and "
                      "'{}' in process {}",
                      call, first_line, rank(), line, process));
    }
  }
  return all;
}

void NcclKVStore::AgreeOnAll(std::string_view call, const std::function<std::string()>& say) {
  const std::vector<std::string> all = Agree(call, say);
  const auto own = static_cast<std::size_t>(rank());
  for (std::size_t process = 0; process < all.size(); ++process) {
    if (all[process] == all[own]) continue;
    std::istringstream ours(all[own]), theirs(all[process]);
    std::string our_line, their_line;
    while (our_line == their_line && std::getline(ours, our_line)) std::getline(theirs, their_line);
    throw InvalidArgument(
        fmt::format("{}: expected the same in all processes, got '{}' in process {} and '{}' in "
                    "process {}",
                    call, our_line, own, their_line, process));
  }
}

void NcclKVStore::SetOptimizer(std::shared_ptr<Optimizer> optimizer) {
  if (meeting_ != nullptr && meeting_->ready()) {
    AgreeOnAll("SetOptimizer", [&] {
      if (optimizer == nullptr) throw InvalidArgument("SetOptimizer: expected one, got null");
      std::string text = fmt::format("SetOptimizer of {}", optimizer->name());
      for (const auto& [name, value] : optimizer->Parameters()) {
        text += fmt::format("\n{} {}", name, value);
      }
      return text;
    });
  }
  values_->SetOptimizer(std::move(optimizer));
}

void NcclKVStore::Barrier() {
  if (meeting_ == nullptr) return;
  engine().WaitForVar(*order_);
  AgreeOnAll("Barrier", [] { return std::string("Barrier"); });
}

int NcclKVStore::NumDeadNodes() const { return meeting_ != nullptr && meeting_->failure() ? 1 : 0; }

namespace {

// What processes say to each other of the devices that they push from: the host, the id that
// process 0 has made, and the unique names of the devices.
struct DevicesOfProcess {
  std::string host{};
  std::string id{};  // hexadecimal; of process 0 alone
  std::vector<std::string> names{};
};

std::string TextOf(const DevicesOfProcess& devices) {
  return fmt::format("{}\n{}\n{}", devices.host, devices.id, fmt::join(devices.names, "\n"));
}

DevicesOfProcess ReadDevices(const std::string& text) {
  std::istringstream lines(text);
  DevicesOfProcess devices;
  std::string line;
  std::getline(lines, line);  // that of the call
  std::getline(lines, devices.host);
  std::getline(lines, devices.id);
  while (std::getline(lines, line)) devices.names.push_back(line);
  return devices;
}

// NCCL itself may wait for ever.
void CheckDistinctGpus(std::string_view call, std::span<const DevicesOfProcess> processes) {
  std::map<std::string_view, std::size_t> process_of;
  for (std::size_t process = 0; process < processes.size(); ++process) {
    for (const std::string& name : processes[process].names) {
      const auto [first, is_new] = process_of.emplace(name, process);
      if (is_new) continue;
      throw InvalidArgument(
          fmt::format("{}: expected each GPU in one process alone, got {} of host {} in process {} "
                      "and of host {} in process {}: CUDA_VISIBLE_DEVICES, or the number i of "
                      "gpu(i), has to be another one in each",
                      call, name, processes[first->second].host, first->second,
                      processes[process].host, process));
    }
  }
}

std::string HostName() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return "unknown";
  return name.data();
}

}  // namespace

NcclKVStore::GroupPtr NcclKVStore::MeetForGroup(std::string_view call,
                                                std::span<const Pushed> pushes) {
  std::vector<int> devices;
  const std::vector<std::string> texts = Agree(call, [&] {
    devices = pushes[0].devices();
    for (const Pushed& pushed : pushes) CheckList(call, pushed, devices);
    meeting_->Use(devices[0]);
    DevicesOfProcess own{.host = HostName()};
    if (rank() == 0) own.id = TextOf(nccl_->NewId());
    for (const int device : devices) own.names.push_back(GpuDriverOf(engine())->UniqueName(device));
    return fmt::format("the first Push, of {} keys, {} the first\n{}", pushes.size(),
                       ToString(pushes[0].key), TextOf(own));
  });
  std::vector<DevicesOfProcess> processes;
  GroupPlace place{.ranks = 0,
                   .first_rank = 0,
                   .order = *order_,
                   .process = rank(),
                   .processes = num_workers(),
                   .meeting = meeting_};
  for (const std::string& text : texts) {
    if (processes.size() == static_cast<std::size_t>(rank())) place.first_rank = place.ranks;
    processes.push_back(ReadDevices(text));
    place.ranks += static_cast<int>(processes.back().names.size());
  }
  place.id = IdOf("NCCL: the id of process 0", processes[0].id);
  CheckDistinctGpus(call, processes);
  return NewGroup(devices, std::move(place));
}

void NcclKVStore::PutIn(std::string_view call, std::span<const KeyArrays> pairs,
                        const std::function<void()>& check,
                        const std::function<void(const ArrayLists&)>& put) {
  if (meeting_ == nullptr) {
    check();
    std::vector<ArrayList> lists;
    for (const KeyArrays& pair : pairs) lists.emplace_back(pair.arrays);
    put(ArrayLists(std::move(lists)));
  } else {
    AgreeOnAll(call, [&] {
      check();
      std::string text = fmt::format("{} of {} keys, {} the first", call, pairs.size(),
                                     pairs.empty() ? "none" : ToString(pairs[0].key));
      for (const KeyArrays& pair : pairs) {
        const NDArray& value = pair.arrays[0];
        value.WaitToRead();
        if (IsOnGpu(value.device())) meeting_->Use(value.device().id);
        text += fmt::format("\n{} of key {} with shape {} and dtype {}", call, ToString(pair.key),
                            ToString(value.shape()), Name(value.dtype()));
      }
      return text;
    });
    std::vector<NDArray> values;
    for (const KeyArrays& pair : pairs) values.push_back(pair.arrays[0]);
    const MutexLock lock(meeting_mutex_);
    put(ArrayLists(meeting_->Share(values)));
  }
}

}  // namespace heddle::kvstore
