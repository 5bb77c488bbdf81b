// The store "nccl" among others of its job: what its processes have to agree on.
#include <heddle/error.h>

#include <algorithm>
#include <array>
#include <exception>
#include <map>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include "engine/fork.h"
#include "engine/may_wait.h"
#include "kvstore/checks.h"
#include "kvstore/nccl/nccl_id.h"
#include "kvstore/nccl/nccl_kvstore.h"
#include "kvstore/near_arrays.h"
#include "storage/gpus.h"

namespace heddle::kvstore {

namespace {

// The first word that a process says.
constexpr std::string_view kMakesIt = "makes it";
constexpr std::string_view kRefuses = "refuses";  // the second one: why

}  // namespace

std::vector<Words> NcclKVStore::Agree(std::string_view call, const std::function<Words()>& say) {
  engine::CheckMayWait(call);
  const MutexLock lock(meeting_mutex_);
  ThrowIfFailed();
  std::exception_ptr refused;
  Words own;
  try {
    own = say();
    own.emplace(own.begin(), kMakesIt);
  } catch (...) {
    refused = std::current_exception();
    own = {std::string(kRefuses), WhatOf(refused)};
  }
  if (!meeting_->ready()) {
    if (refused != nullptr) std::rethrow_exception(refused);
    throw InvalidState(
        fmt::format("{}: the processes of HEDDLE_NCCL_ID have not met: expected a call with an "
                    "array on a gpu(i) before, such as Init",
                    call));
  }
  std::vector<Words> all;
  Together(call, [&] {
    for (const std::string& text : meeting_->Exchange(PackWords(own))) {
      all.push_back(UnpackWords(text));
    }
  });
  if (refused != nullptr) std::rethrow_exception(refused);
  for (std::size_t process = 0; process < all.size(); ++process) {
    Words& theirs = all[process];
    theirs.resize(std::max<std::size_t>(theirs.size(), 2));
    if (theirs[0] == kRefuses) {
      throw InvalidArgument(
          fmt::format("{}: process {} has refused it: {}", call, process, theirs[1]));
    }
    if (theirs[1] != own[1]) {
      throw InvalidArgument(
          fmt::format("{}: expected the same calls in all processes, got '{}' in process {} and "
                      "'{}' in process {}",
                      call, own[1], rank(), theirs[1], process));
    }
    theirs.erase(theirs.begin());
  }
  return all;
}

void NcclKVStore::AgreeOnAll(std::string_view call, const std::function<Words()>& say) {
  const std::vector<Words> all = Agree(call, say);
  const auto self = static_cast<std::size_t>(rank());
  const Words& own = all[self];
  for (std::size_t process = 0; process < all.size(); ++process) {
    const Words& theirs = all[process];
    if (theirs == own) continue;
    const auto [ours, other] = std::ranges::mismatch(own, theirs);
    throw InvalidArgument(
        fmt::format("{}: expected the same in all processes, got '{}' in process {} and '{}' in "
                    "process {}",
                    call, ours != own.end() ? *ours : "nothing", self,
                    other != theirs.end() ? *other : "nothing", process));
  }
}

// --- failing -------------------------------------------------------------------------------------

// Of several processes; one that is alone is in step with itself.
void NcclKVStore::Fail(std::string_view call, const std::exception_ptr& error) {
  if (meeting_ == nullptr) return;
  const std::string who = fmt::format("{}: process {} of {}", call, rank(), num_workers());
  const std::string why =
      fmt::format("{} has left it midway, out of step with the others: {}", who, WhatOf(error));
  // If that is the cause, it is what later calls name.
  const std::optional<std::string> others = meeting_->failure();
  const std::exception_ptr failure =
      others
          ? std::make_exception_ptr(NetworkError(fmt::format("{} cannot go on: {}", who, *others)))
          : std::make_exception_ptr(InvalidState(why));
  GroupPtr group;
  {
    const engine::CallLock lock(mutex_, "a store");
    if (failure_ == nullptr) failure_ = failure;
    group = group_;
  }
  meeting_->Fail(why);  // first: what NCCL holds up in the group looks there
  if (group != nullptr) group->Fail(failure);
}

void NcclKVStore::ThrowIfFailed() const {
  GroupPtr group;
  {
    const engine::CallLock lock(mutex_, "a store");
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    group = group_;
  }
  if (group != nullptr) group->ThrowIfFailed();
}

// --- calls of all processes ----------------------------------------------------------------------

// A value that one process has not updated is another one from then on.
void NcclKVStore::SetUpdaters(Updaters updaters) {
  if (meeting_ != nullptr && updaters.dense != nullptr) {
    updaters.dense = [this, own = std::move(updaters.dense)](KeyRef key, const NDArray& input,
                                                             const NDArray& stored) {
      try {
        own(key, input, stored);
      } catch (...) {
        Fail(fmt::format("the updater of key {}", ToString(key)), std::current_exception());
        throw;
      }
    };
  }
  values_->SetUpdaters(std::move(updaters));
}

void NcclKVStore::SetOptimizer(std::shared_ptr<Optimizer> optimizer) {
  if (meeting_ != nullptr && meeting_->ready()) {
    AgreeOnAll("SetOptimizer", [&] {
      if (optimizer == nullptr) throw InvalidArgument("SetOptimizer: expected one, got null");
      Words words = {fmt::format("SetOptimizer of {}", optimizer->name())};
      for (const auto& [name, value] : optimizer->Parameters()) {
        words.push_back(fmt::format("{} {}", name, value));
      }
      return words;
    });
  }
  Alike("SetOptimizer", [&] { values_->SetOptimizer(std::move(optimizer)); });
}

void NcclKVStore::Barrier() {
  if (meeting_ == nullptr) return;
  // A wait that is left is a refusal, of which the others hear.
  AgreeOnAll("Barrier", [&] {
    engine().WaitForVar(order_->var);
    return Words{"Barrier"};
  });
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

// `call` is what the call is about.
Words WordsOf(std::string call, const DevicesOfProcess& devices) {
  Words words = {std::move(call), devices.host, devices.id};
  words.insert(words.end(), devices.names.begin(), devices.names.end());
  return words;
}

DevicesOfProcess ReadDevices(Words words) {
  words.resize(std::max<std::size_t>(words.size(), 3));
  return {.host = words[1], .id = words[2], .names = {words.begin() + 3, words.end()}};
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
  std::vector<Words> all = Agree(call, [&] {
    devices = pushes[0].devices();
    for (const Pushed& pushed : pushes) CheckList(call, pushed, devices);
    meeting_->Use(devices[0]);
    DevicesOfProcess own{.host = HostName()};
    if (rank() == 0) own.id = TextOf(nccl_->NewId());
    for (const int device : devices)
      own.names.push_back(storage::GpuDriverOf(engine())->UniqueName(device));
    return WordsOf(fmt::format("the first Push, of {} keys, {} the first", pushes.size(),
                               ToString(pushes[0].key)),
                   own);
  });
  std::vector<DevicesOfProcess> processes;
  GroupPlace place{.ranks = 0,
                   .first_rank = 0,
                   .process = rank(),
                   .processes = num_workers(),
                   .meeting = meeting_};
  for (Words& words : all) {
    if (processes.size() == static_cast<std::size_t>(rank())) place.first_rank = place.ranks;
    processes.push_back(ReadDevices(std::move(words)));
    place.ranks += static_cast<int>(processes.back().names.size());
  }
  place.id = IdOf("NCCL: the id of process 0", processes[0].id);
  CheckDistinctGpus(call, processes);
  GroupPtr group;
  Together(call, [&] { group = NewGroup(devices, std::move(place)); });
  return group;
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
      Words words = {fmt::format("{} of {} keys, {} the first", call, pairs.size(),
                                 pairs.empty() ? "none" : ToString(pairs[0].key))};
      for (const KeyArrays& pair : pairs) {
        const NDArray& value = pair.arrays[0];
        value.WaitToRead();
        if (IsOnGpu(value.device())) meeting_->Use(value.device().id);
        words.push_back(fmt::format("{} of key {} with shape {} and dtype {}", call,
                                    ToString(pair.key), ToString(value.shape()),
                                    Name(value.dtype())));
      }
      return words;
    });
    std::vector<NDArray> values;
    for (const KeyArrays& pair : pairs) values.push_back(pair.arrays[0]);
    const MutexLock lock(meeting_mutex_);
    std::vector<NDArray> shared;
    Together(call, [&] { shared = meeting_->Share(values); });
    Alike(call, [&] { put(shared); });
  }
}

}  // namespace heddle::kvstore
