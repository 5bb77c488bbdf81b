#include "kvstore/nccl/device_group.h"

#include <heddle/error.h>

#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/env.h"
#include "base/log.h"
#include "storage/array_ops.h"

namespace heddle::kvstore {

using std::chrono::milliseconds;

namespace {

// How often the watchdog looks while calls are in flight, and at most a part of the deadline.
constexpr milliseconds kLookEvery{100};
// Between two questions whether NCCL has set something up.
constexpr std::chrono::microseconds kAskEvery{50};

std::size_t PlaceOf(int device, const std::vector<int>& devices) {
  return static_cast<std::size_t>(std::ranges::find(devices, device) - devices.begin());
}

}  // namespace

DeviceGroupOptions DeviceGroupOptions::FromEnvironment() {
  DeviceGroupOptions options;
  options.deadline =
      milliseconds(EnvInt("HEDDLE_NCCL_DEADLINE_MS", options.deadline.count(), /*min=*/0));
  return options;
}

std::shared_ptr<internal::GpuDriver> GpuDriverOf(const Engine& engine) {
  const std::shared_ptr<internal::GpuDriver>& driver = engine.options().gpu_driver;
  return driver != nullptr ? driver : internal::DefaultGpuDriver();
}

std::shared_ptr<const Var> NcclOrders::Of(Engine& engine) {
  // Takes the entry off the table, unless that is another one's by now.
  const auto give_back = [table = table_, key = &engine](const Var* order) {
    {
      const MutexLock lock(table->mutex);
      const auto known = table->orders.find(key);
      if (known != table->orders.end() && known->second.expired()) table->orders.erase(known);
    }
    delete order;
  };
  const MutexLock lock(table_->mutex);
  if (const auto known = table_->orders.find(&engine); known != table_->orders.end()) {
    if (std::shared_ptr<const Var> order = known->second.lock()) return order;
  }
  std::shared_ptr<const Var> order(new const Var(engine.NewVar("nccl.order")), give_back);
  table_->orders[&engine] = order;
  return order;
}

std::size_t NcclOrders::size() const {
  const MutexLock lock(table_->mutex);
  return table_->orders.size();
}

std::shared_ptr<const Var> NcclOrderOf(Engine& engine) {
  static auto* const orders = new NcclOrders;  // stores may be dropped late in a process's exit
  return orders->Of(engine);
}

// --- set-up --------------------------------------------------------------------------------------

DeviceGroup::DeviceGroup(std::shared_ptr<Nccl> nccl, std::shared_ptr<internal::GpuDriver> driver,
                         std::vector<int> devices, const DeviceGroupOptions& options,
                         std::optional<GroupPlace> place)
    : nccl_(std::move(nccl)),
      driver_(std::move(driver)),
      devices_(std::move(devices)),
      options_(options),
      place_(std::move(place)),
      comms_(nccl_, driver_) {
  CheckDevices();
  try {
    Open();
    phase_ = nullptr;
    watchdog_ = std::thread([this] { Watch(); });
  } catch (...) {
    TellOthers(WhatOf(std::current_exception()));
    throw;
  }
}

void DeviceGroup::CheckDevices() const {
  for (const int device : devices_) {
    if (device < 0 || device >= driver_->device_count()) {
      throw InvalidArgument(
          fmt::format("NCCL: expected devices that are there, got {}", driver_->WhyNoGpu(device)));
    }
    // NCCL itself would wait for ever.
    if (std::ranges::count(devices_, device) > 1) {
      throw InvalidArgument(
          fmt::format("NCCL: expected distinct devices, got gpu({}) twice", device));
    }
  }
}

void DeviceGroup::Open() {
  const MutexLock lock(issue_mutex_);
  const Nccl::Id id = place_ ? place_->id : nccl_->NewId();
  const int ranks = place_ ? place_->ranks : static_cast<int>(devices_.size());
  if (!comms_.Open(devices_, options_.stream_priority, id, ranks,
                   place_ ? place_->first_rank : 0)) {
    AwaitLocked(nullptr);
  }
}

DeviceGroup::~DeviceGroup() {
  if (watchdog_.joinable()) {
    {
      const MutexLock lock(mutex_);
      stop_ = true;
    }
    wake_.NotifyAll();
    watchdog_.join();
  }
  const MutexLock issue_lock(issue_mutex_);
  CloseLocked();
  const MutexLock lock(mutex_);
  for (const std::unique_ptr<Call>& call : spare_calls_) FreeCall(*call);
}

// In order, if all others come to it in time: without those that are gone it would not end.
void DeviceGroup::CloseLocked() noexcept {
  {
    const MutexLock lock(mutex_);
    if (failure_ != nullptr) return;  // they have been aborted
  }
  phase_ = "the shutdown";
  try {
    if (std::exception_ptr error = JobFailed(nullptr)) std::rethrow_exception(error);
    if (!comms_.Finalize()) AwaitLocked(nullptr);
    comms_.Destroy();
  } catch (...) {
    Log(LogLevel::kWarning, "NCCL's communicators are aborted: {}",
        WhatOf(std::current_exception()));
    comms_.Abort();
  }
}

// --- issuing -------------------------------------------------------------------------------------

// The body of the engine's op.
struct DeviceGroup::CollectiveOp {
  std::shared_ptr<DeviceGroup> group;
  OpName name;
  std::vector<Collective> collectives;
  CallPtr call = nullptr;
  std::unique_ptr<DeviceGroup, GiveUpCall> open = nullptr;  // the group, if of several processes

  void operator()(GpuStream stream) { group->Issue(stream, name.c_str(), collectives, &call); }
  // What an aborted communicator has left in the arrays is no result.
  void Finish() {
    group->ThrowIfFailed();
    static_cast<void>(open.release());
  }
};

void DeviceGroup::Queue(const std::shared_ptr<DeviceGroup>& group, OpName name,
                        std::vector<Collective> collectives, int priority) {
  // What each of them reads and writes.
  struct Accesses {
    Device device = {};
    std::vector<VarRef> reads = {}, writes = {};
  };
  std::vector<Accesses> each;
  Accesses all;
  for (const Collective& collective : collectives) {
    const NDArray& root = collective.arrays[collective.root];
    Accesses own{.device = root.device()};
    if (!collective.sums.empty()) {
      for (const NDArray& array : collective.arrays) own.reads.emplace_back(array.var());
      for (const NDArray& sum : collective.sums) own.writes.emplace_back(sum.var());
    } else if (collective.is_broadcast()) {
      own.reads.emplace_back(root.var());
      for (std::size_t i = 0; i < collective.arrays.size(); ++i) {
        if (i == collective.root) continue;
        const NDArray& out = collective.arrays[i];
        own.writes.emplace_back(out.var());
        if (out.is_partial()) own.reads.emplace_back(out.var());
      }
    } else {
      for (const NDArray& array : collective.arrays) own.reads.emplace_back(array.var());
      own.writes.emplace_back(collective.sum.var());
    }
    all.reads.insert(all.reads.end(), own.reads.begin(), own.reads.end());
    all.writes.insert(all.writes.end(), own.writes.begin(), own.writes.end());
    each.push_back(std::move(own));
  }
  Engine& engine = collectives[0].arrays[0].engine();
  const bool between_processes = group->place_.has_value();
  const bool several = collectives.size() > 1;
  if (between_processes) all.writes.emplace_back(group->place_->order);
  OpOptions options{.name = name,
                    .reads = all.reads,
                    .writes = all.writes,
                    .device = each[0].device,
                    .lane = Lane::kComm,
                    .priority = priority,
                    .run_when_poisoned = several || between_processes};
  if (between_processes) {
    CollectiveOp op{group, name, std::move(collectives)};
    op.open.reset(group.get());
    engine.PushGpu(options, std::move(op));
    return;
  }
  if (!several) {
    engine.PushGpu(options, CollectiveOp{group, name, std::move(collectives)});
    return;
  }
  // It may end, and let go of its arrays, at once: those of `collectives` keep the variables that
  // `each` refers to.
  engine.PushGpu(options, CollectiveOp{group, name, collectives});
  // The group has summed or copied whatever was there. These ops issue nothing: they tell those who
  // wait for the output of a poisoned input.
  for (Accesses& own : each) {
    own.reads.insert(own.reads.end(), own.writes.begin(), own.writes.end());
    engine.PushGpu({.name = name,
                    .reads = own.reads,
                    .writes = own.writes,
                    .device = own.device,
                    .lane = Lane::kComm,
                    .priority = priority},
                   [](GpuStream) {});
  }
}

std::unique_ptr<DeviceGroup::Call> DeviceGroup::NewCall(std::size_t carrier) {
  auto call = std::make_unique<Call>(Call{.group = *this, .carrier = carrier});
  const auto new_event = [this](int device) {
    const EnteredDevice entered(*driver_, device);
    return driver_->NewEvent();
  };
  try {
    call->fork = new_event(devices_[carrier]);
    for (const int device : devices_) call->joins.push_back(new_event(device));
  } catch (...) {
    FreeCall(*call);
    throw;
  }
  return call;
}

void DeviceGroup::FreeCall(const Call& call) noexcept {
  if (call.fork != nullptr) driver_->FreeEvent(devices_[call.carrier], call.fork);
  for (std::size_t i = 0; i < call.joins.size(); ++i) {
    driver_->FreeEvent(devices_[i], call.joins[i]);
  }
}

DeviceGroup::CallPtr DeviceGroup::Begin(int carrier, const char* name,
                                        std::span<const Collective> collectives) {
  const std::size_t place = PlaceOf(carrier, devices_);
  std::unique_ptr<Call> call;
  {
    const MutexLock lock(mutex_);
    const auto spare =
        std::ranges::find(spare_calls_, place, [](const auto& known) { return known->carrier; });
    if (spare != spare_calls_.end()) {
      std::swap(*spare, spare_calls_.back());
      call = std::move(spare_calls_.back());
      spare_calls_.pop_back();
    }
  }
  if (call == nullptr) call = NewCall(place);
  call->name = name;
  call->collectives = collectives;
  call->running_since.reset();
  return CallPtr(call.release());
}

void DeviceGroup::End(Call* call) noexcept {
  const MutexLock lock(mutex_);
  std::erase(calls_, call);
  spare_calls_.emplace_back(call);
}

std::exception_ptr DeviceGroup::failure() const {
  const MutexLock lock(mutex_);
  return failure_;
}

void DeviceGroup::Issue(GpuStream stream, const char* name, std::span<const Collective> collectives,
                        CallPtr* call) {
  const MutexLock issue_lock(issue_mutex_);
  ThrowIfFailed();
  if (place_) FailIfPoisonedLocked(name, collectives);
  *call = Begin(stream.device, name, collectives);
  driver_->Record((*call)->fork, stream.handle);
  for (const Member& member : comms_.members()) driver_->Wait(member.stream, (*call)->fork);
  {
    const MutexLock lock(mutex_);
    calls_.push_back(call->get());
    if (watchdog_sleeps_) wake_.NotifyAll();
  }
  std::exception_ptr error;
  try {
    nccl_->GroupStart();
    try {
      for (const Collective& collective : collectives) IssueLocked(collective);
    } catch (...) {
      error = std::current_exception();
    }
    if (!nccl_->GroupEnd() && error == nullptr) AwaitLocked(call->get());
  } catch (...) {
    if (error == nullptr) error = std::current_exception();
  }
  if (error != nullptr) FailLocked(error);
  // Also of a group that failed: parts of it may run.
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    driver_->Record((*call)->joins[i], comms_.members()[i].stream);
    driver_->Wait(stream.handle, (*call)->joins[i]);
  }
  if (error != nullptr) std::rethrow_exception(error);
}

void DeviceGroup::IssueLocked(const Collective& collective) {
  const auto root = static_cast<int>(collective.root);
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    const NDArray& array = collective.arrays[i];
    const auto count = static_cast<std::size_t>(array.size());
    if (count == 0) continue;
    const Member& member = comms_.members()[i];
    if (!collective.sums.empty()) {
      nccl_->AllReduce(storage::ConstAt(array, 0), storage::At(collective.sums[i], 0), count,
                       array.dtype(), member.comm, member.stream);
    } else if (collective.is_broadcast()) {
      // The root is only read, but NCCL has one name for both.
      void* const data = i == collective.root ? const_cast<std::byte*>(storage::ConstAt(array, 0))
                                              : storage::At(array, 0);
      nccl_->Broadcast(data, count * SizeOf(array.dtype()), root, member.comm, member.stream);
    } else {
      void* const sum = i == collective.root ? storage::At(collective.sum, 0) : nullptr;
      nccl_->Reduce(storage::ConstAt(array, 0), sum, count, array.dtype(), root, member.comm,
                    member.stream);
    }
  }
}

std::string DeviceGroup::Who() const {
  std::string text = fmt::format("NCCL between gpu({})", fmt::join(devices_, "), gpu("));
  if (place_) text += fmt::format(" of process {} of {}", place_->process, place_->processes);
  return text;
}

std::string DeviceGroup::Describe(const char* name, std::span<const Collective> collectives) const {
  if (name == nullptr) return phase_ != nullptr ? fmt::format("{}: {}", Who(), phase_) : Who();
  std::string text = fmt::format("{}: {} of key {}", Who(), name, ToString(collectives[0].key));
  if (collectives.size() > 1) text += fmt::format(" and {} more", collectives.size() - 1);
  return text;
}

std::exception_ptr DeviceGroup::TimedOut(const Call* call) const {
  return std::make_exception_ptr(
      TimeoutError(fmt::format("{} was not over after {} ms (HEDDLE_NCCL_DEADLINE_MS)",
                               Describe(call), options_.deadline.count())));
}

std::exception_ptr DeviceGroup::JobFailed(const Call* call) const {
  if (!place_ || place_->meeting == nullptr) return nullptr;
  const std::optional<std::string> why = place_->meeting->failure();
  if (!why) return nullptr;
  return std::make_exception_ptr(
      NetworkError(fmt::format("{} cannot {}: {}", Describe(call),
                               call != nullptr || phase_ != nullptr ? "end" : "go on", *why)));
}

// Until no communicator is busy with the call that has just been made.
void DeviceGroup::AwaitLocked(const Call* call) {
  const Clock::time_point since = options_.now();
  while (true) {
    const Nccl::State state = comms_.Ask();
    if (state.error != nullptr) std::rethrow_exception(state.error);
    if (!state.in_progress) return;
    if (options_.deadline.count() > 0 && options_.now() - since > options_.deadline) {
      std::rethrow_exception(TimedOut(call));
    }
    if (std::exception_ptr error = JobFailed(call)) std::rethrow_exception(error);
    std::this_thread::sleep_for(kAskEvery);
  }
}

// --- failing -------------------------------------------------------------------------------------

void DeviceGroup::FailLocked(const std::exception_ptr& error) {
  {
    const MutexLock lock(mutex_);
    if (failure_ != nullptr) return;
    failure_ = error;
  }
  const std::string why = WhatOf(error);
  Log(LogLevel::kError, "NCCL's communicators are aborted: {}", why);
  TellOthers(why);
  comms_.Abort();
}

void DeviceGroup::Fail(const std::exception_ptr& error) {
  const MutexLock issue_lock(issue_mutex_);
  FailLocked(error);
}

// Before this process aborts, which may have to wait until the others of its host do.
void DeviceGroup::TellOthers(const std::string& why) {
  if (place_ && place_->meeting != nullptr) place_->meeting->Fail(why);
}

// What this process does not issue the others would wait for.
void DeviceGroup::FailIfPoisonedLocked(const char* name, std::span<const Collective> collectives) {
  for (const Collective& collective : collectives) {
    for (const NDArray& array : collective.arrays) {
      const std::exception_ptr poison = array.engine().ErrorOf(array.var());
      if (poison == nullptr) continue;
      FailLocked(std::make_exception_ptr(InvalidState(fmt::format(
          "{}: what process {} gives for key {} has failed: {}", Describe(name, collectives),
          place_->process, ToString(collective.key), WhatOf(poison)))));
      std::rethrow_exception(poison);
    }
  }
}

// Of a call that has not come to its end: its device has failed, before or after it was issued.
void DeviceGroup::GiveUp() noexcept {
  Fail(std::make_exception_ptr(InvalidState(Who() + ": a call has failed on its device")));
}

void DeviceGroup::Watch() {
  try {
    driver_->Enter(devices_[0]);  // for good: on no device its calls would make a context on gpu(0)
  } catch (const Error& error) {
    Log(LogLevel::kWarning, "{}: the thread that watches over it: {}", Who(), error.what());
  }
  while (AwaitCalls()) Look();
}

// Returns when it is time to look: at the calls in flight, and between processes also at the
// others, for whom this one would be the last to know. False: to stop.
bool DeviceGroup::AwaitCalls() {
  milliseconds every = kLookEvery;
  if (options_.deadline.count() > 0) {
    every = std::clamp(options_.deadline / 4, milliseconds(1), kLookEvery);
  }
  const MutexLock lock(mutex_);
  watchdog_sleeps_ = true;
  while (!stop_ && (failure_ != nullptr || (calls_.empty() && !place_))) wake_.Wait(mutex_);
  watchdog_sleeps_ = false;
  const Clock::time_point next = Clock::now() + every;
  while (!stop_ && wake_.WaitUntil(mutex_, next)) continue;
  return !stop_;
}

// Of the first call in flight, as far as its device and the clock say.
std::exception_ptr DeviceGroup::ErrorOfLocked(Call& first, Clock::time_point now) {
  const internal::GpuDriver::State inputs = driver_->Query(first.fork);
  if (inputs.happened && !first.running_since) first.running_since = now;
  if (options_.deadline.count() > 0 && first.running_since &&
      now - *first.running_since > options_.deadline) {
    return TimedOut(&first);
  }
  return inputs.error;
}

void DeviceGroup::Look() {
  const MutexLock issue_lock(issue_mutex_);
  const Clock::time_point now = options_.now();
  std::exception_ptr error;
  {
    const MutexLock lock(mutex_);
    if (failure_ != nullptr) return;
    Call* const first = calls_.empty() ? nullptr : calls_.front();
    if (first != nullptr) error = ErrorOfLocked(*first, now);
    if (std::exception_ptr failed = JobFailed(first)) error = failed;
  }
  if (std::exception_ptr reported = comms_.Ask().error) error = reported;
  if (error != nullptr) FailLocked(error);
}

}  // namespace heddle::kvstore
