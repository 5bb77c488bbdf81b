#include "kvstore/nccl/device_group.h"

#include <heddle/error.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/check.h"
#include "base/env.h"
#include "base/log.h"
#include "engine/fail_write.h"
#include "storage/array_ops.h"

namespace heddle::kvstore {

using std::chrono::milliseconds;

namespace {

// How often the watchdog looks while calls are in flight, and at most a part of the deadline.
constexpr milliseconds kLookEvery{100};
// Between two questions whether NCCL is done with a call, after so many without a pause: to launch
// takes it some ten microseconds.
constexpr std::chrono::microseconds kAskEvery{50};
constexpr int kAsksAtOnce = 100;
// What the sum that connects the devices reads and writes, beside each other.
constexpr std::int64_t kConnectBytes = 256;

std::size_t PlaceOf(int device, const std::vector<int>& devices) {
  return static_cast<std::size_t>(std::ranges::find(devices, device) - devices.begin());
}

// Calls visit(array) for what it writes.
template <class Visit>
void ForEachOutput(const Collective& collective, const Visit& visit) {
  if (!collective.sum.empty()) visit(collective.sum);
  for (const NDArray& sum : collective.sums) visit(sum);
  for (std::size_t i = 0; collective.is_broadcast() && i < collective.arrays.size(); ++i) {
    if (i != collective.root) visit(collective.arrays[i]);
  }
}

// Arrays take theirs when they are first used. Not between NCCL's calls of a group: what there is
// none for must not reach it. Throws OutOfMemory.
void TakeMemory(const Collective& collective) {
  if (collective.arrays[0].size() == 0) return;
  ForEachOutput(collective, [](const NDArray& out) { storage::At(out, 0); });
  for (std::size_t i = 0; i < collective.arrays.size(); ++i) {
    if (collective.is_broadcast() && i != collective.root) continue;
    storage::ConstAt(collective.arrays[i], 0);
  }
}

}  // namespace

DeviceGroupOptions DeviceGroupOptions::FromEnvironment() {
  DeviceGroupOptions options;
  constexpr std::int64_t kDayMs = 86'400'000;
  options.deadline =
      milliseconds(EnvInt("HEDDLE_NCCL_DEADLINE_MS", options.deadline.count(), /*min=*/0, kDayMs));
  return options;
}

std::shared_ptr<const NcclOrder> NcclOrders::Of(Engine& engine) {
  // Takes the entry off the table, unless that is another one's by now.
  const auto give_back = [table = table_, key = &engine](const NcclOrder* order) {
    {
      const MutexLock lock(table->mutex);
      const auto known = table->orders.find(key);
      if (known != table->orders.end() && known->second.expired()) table->orders.erase(known);
    }
    delete order;
  };
  const MutexLock lock(table_->mutex);
  if (const auto known = table_->orders.find(&engine); known != table_->orders.end()) {
    if (std::shared_ptr<const NcclOrder> order = known->second.lock()) return order;
  }
  std::shared_ptr<const NcclOrder> order(new const NcclOrder(engine.NewVar("nccl.order")),
                                         give_back);
  table_->orders[&engine] = order;
  return order;
}

std::size_t NcclOrders::size() const {
  const MutexLock lock(table_->mutex);
  return table_->orders.size();
}

std::shared_ptr<const NcclOrder> NcclOrderOf(Engine& engine) {
  static auto* const orders = new NcclOrders;  // stores may be dropped late in a process's exit
  return orders->Of(engine);
}

// --- set-up --------------------------------------------------------------------------------------

std::shared_ptr<DeviceGroup> DeviceGroup::Make(std::shared_ptr<Nccl> nccl,
                                               std::shared_ptr<internal::GpuDriver> driver,
                                               std::vector<int> devices,
                                               std::shared_ptr<const NcclOrder> order,
                                               const DeviceGroupOptions& options,
                                               std::optional<GroupPlace> place) {
  auto* const group = new DeviceGroup(std::move(nccl), std::move(driver), std::move(devices), order,
                                      options, std::move(place));
  return {group, [order = std::move(order)](DeviceGroup* own) { own->Drop(); }};
}

DeviceGroup::DeviceGroup(std::shared_ptr<Nccl> nccl, std::shared_ptr<internal::GpuDriver> driver,
                         std::vector<int> devices, const std::shared_ptr<const NcclOrder>& order,
                         const DeviceGroupOptions& options, std::optional<GroupPlace> place)
    : nccl_(std::move(nccl)),
      driver_(std::move(driver)),
      devices_(std::move(devices)),
      options_(options),
      place_(std::move(place)),
      order_(order),
      turns_(order->turns),
      comms_(nccl_, driver_, options_.abort_patience) {
  CheckDevices();
  try {
    Open();
    phase_ = nullptr;
    watchdog_ = std::thread([this] { Watch(); });
  } catch (...) {
    TellOthers(WhatOf(std::current_exception()));
    LeaveTurns();
    const MutexLock lock(issue_mutex_);
    comms_.Abort();
    FreeLocked();
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
  {
    const MutexLock lock(issue_mutex_);
    const Nccl::Id id = place_ ? place_->id : nccl_->NewId();
    const int ranks = place_ ? place_->ranks : static_cast<int>(devices_.size());
    if (!comms_.Open(devices_, options_.stream_priority, id, ranks,
                     place_ ? place_->first_rank : 0)) {
      AwaitLocked(nullptr);
    }
    if (place_) {
      // Without a turn: other processes may come to theirs only when this is over.
      ConnectLocked();
      return;
    }
  }
  const MutexLock turn(turns_->mutex);
  const MutexLock lock(issue_mutex_);
  connecting_ = NewCall(/*carrier=*/0);
  AwaitTurnLocked(*connecting_);
  ConnectLocked();
  EndTurnLocked(*connecting_);
}

// NCCL connects devices when it first needs to, which takes long. A sum of one element has it do
// that now: otherwise the first push would, on a worker of the engine. It ends by itself.
void DeviceGroup::ConnectLocked() {
  std::vector<std::byte*> memory;
  for (const int device : devices_) {
    void* const block = driver_->AllocateDevice(device, 2 * kConnectBytes);
    if (block == nullptr) {
      throw OutOfMemory(fmt::format("{}: gpu({}) has no {} bytes left", Describe(nullptr), device,
                                    2 * kConnectBytes));
    }
    comms_.Keep(
        {block, [driver = driver_, device](void* own) { driver->FreeDevice(device, own); }});
    memory.push_back(static_cast<std::byte*>(block));
  }
  // NCCL brings back whatever device is current where the group ends.
  const EnteredDevice entered(*driver_, devices_.front());
  RunGroupLocked(nullptr, [&] {
    issue_mutex_.AssertHeld();
    for (std::size_t i = 0; i < devices_.size(); ++i) {
      const Member& member = comms_.members()[i];
      std::byte* const in = memory[i];
      std::byte* const out = in + kConnectBytes;
      if (place_) {
        nccl_->AllReduce(in, out, 1, DType::kFloat32, member.comm, member.stream);
      } else {
        nccl_->Reduce(in, out, 1, DType::kFloat32, /*root=*/0, member.comm, member.stream);
      }
    }
  });
}

// --- the end -------------------------------------------------------------------------------------

void DeviceGroup::Drop() noexcept {
  {
    const MutexLock lock(mutex_);
    orphaned_ = ops_ > 0;
    if (orphaned_) return;  // the watchdog's from here on
  }
  delete this;
}

void DeviceGroup::OnOpMade() {
  const MutexLock lock(mutex_);
  ++ops_;
}

void DeviceGroup::OnOpGone() noexcept {
  const MutexLock lock(mutex_);
  // Under the lock: the watchdog takes the group down with it.
  if (--ops_ == 0 && orphaned_) wake_.NotifyAll();
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
  LeaveTurns();
  const MutexLock issue_lock(issue_mutex_);
  CloseLocked();
  FreeLocked();
}

void DeviceGroup::LeaveTurns() noexcept {
  const MutexLock turn(turns_->mutex);
  std::erase_if(turns_->last, [this](const auto& last) { return last.second.group == this; });
}

// What is left once the communicators are taken down.
void DeviceGroup::FreeLocked() noexcept {
  const MutexLock lock(mutex_);
  // If NCCL goes on, so do these.
  if (!abandoned_.empty()) {
    comms_.Keep(std::make_shared<decltype(abandoned_)>(std::move(abandoned_)));
  }
  comms_.Drop();  // the streams before the events that they record
  if (connecting_ != nullptr) FreeCall(*connecting_);
  for (const auto* calls : {&spare_calls_, &lost_calls_}) {
    for (const std::unique_ptr<Call>& call : *calls) FreeCall(*call);
  }
}

// In order, if all others come to it in time: without those that are gone it would not end.
void DeviceGroup::CloseLocked() noexcept {
  phase_ = "the shutdown";
  if (std::exception_ptr error = doomed()) FailLocked(error);
  if (failure() != nullptr) return;  // they have been aborted
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
  struct Leave {
    void operator()(DeviceGroup* group) const { group->OnOpGone(); }
  };

  CollectiveOp(DeviceGroup* its_group, std::shared_ptr<const NcclOrder> its_order,
               const OpName& its_name, std::vector<Collective> its_collectives)
      : order(std::move(its_order)), name(its_name), collectives(std::move(its_collectives)) {
    its_group->OnOpMade();
    group.reset(its_group);
  }
  CollectiveOp(CollectiveOp&&) noexcept = default;
  ~CollectiveOp() {
    if (group == nullptr || has_ended) return;
    // What is not even issued the other devices of this process do not miss; other processes do.
    if (call != nullptr || group->place_) {
      group->GiveUp(std::move(call), std::move(collectives));
    }
  }

  void operator()(GpuStream stream) { group->Issue(stream, name.c_str(), collectives, &call); }
  // What an aborted communicator has left in the arrays is no result.
  void Finish() {
    group->ThrowIfFailed();
    has_ended = true;
  }

  // With it the turns, for groups that come when nobody has this one but its ops.
  std::shared_ptr<const NcclOrder> order;
  std::unique_ptr<DeviceGroup, Leave> group;
  OpName name;
  std::vector<Collective> collectives;
  CallPtr call = nullptr;
  bool has_ended = false;
};

void DeviceGroup::Queue(const std::shared_ptr<DeviceGroup>& group, OpName name,
                        std::vector<Collective> collectives, int priority) {
  for (std::span<Collective> rest = collectives; !rest.empty();) {
    const std::span<Collective> call = rest.first(std::min(rest.size(), kCallMax));
    QueueCall(group, name, {std::move_iterator(call.begin()), std::move_iterator(call.end())},
              priority);
    rest = rest.subspan(call.size());
  }
}

void DeviceGroup::QueueCall(const std::shared_ptr<DeviceGroup>& group, OpName name,
                            std::vector<Collective> collectives, int priority) {
  std::vector<VarRef> reads, writes;
  for (const Collective& collective : collectives) {
    const NDArray& root = collective.arrays[collective.root];
    if (collective.is_broadcast()) {
      reads.emplace_back(root.var());
    } else {
      for (const NDArray& array : collective.arrays) reads.emplace_back(array.var());
    }
    ForEachOutput(collective, [&](const NDArray& out) {
      writes.emplace_back(out.var());
      if (out.is_partial()) reads.emplace_back(out.var());
    });
  }
  Engine& engine = collectives[0].arrays[0].engine();
  const bool between_processes = group->place_.has_value();
  const bool several = collectives.size() > 1;
  const std::shared_ptr<const NcclOrder> order = group->order_.lock();
  CHECK(order != nullptr);
  if (between_processes) writes.emplace_back(order->var);
  const OpOptions options{.name = name,
                          .reads = reads,
                          .writes = writes,
                          .device = collectives[0].arrays[collectives[0].root].device(),
                          .lane = Lane::kComm,
                          .priority = priority,
                          .run_when_poisoned = several || between_processes};
  engine.PushGpu(options, CollectiveOp(group.get(), order, name, std::move(collectives)));
}

std::unique_ptr<DeviceGroup::Call> DeviceGroup::NewCall(std::size_t carrier) {
  auto call = std::make_unique<Call>(Call{.group = *this, .carrier = carrier});
  const auto new_event = [this](int device) {
    const EnteredDevice entered(*driver_, device);
    return driver_->NewEvent();
  };
  try {
    call->fork = new_event(devices_[carrier]);
    for (const int device : devices_) {
      call->turns.push_back(new_event(device));
      call->joins.push_back(new_event(device));
    }
  } catch (...) {
    FreeCall(*call);
    throw;
  }
  return call;
}

void DeviceGroup::FreeCall(const Call& call) noexcept {
  if (call.fork != nullptr) driver_->FreeEvent(devices_[call.carrier], call.fork);
  for (const std::vector<Event>* events : {&call.turns, &call.joins}) {
    for (std::size_t i = 0; i < events->size(); ++i) driver_->FreeEvent(devices_[i], (*events)[i]);
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
  call->awaited.clear();
  call->running_since.reset();
  call->doubtful_since.reset();
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
  ThrowIfFailed();  // before it waits for whoever aborts the communicators
  const MutexLock turn(turns_->mutex);
  const MutexLock issue_lock(issue_mutex_);
  if (std::exception_ptr error = doomed()) FailLocked(error);
  ThrowIfFailed();
  std::vector<const Collective*> able;
  if (place_) {
    FailIfPoisonedLocked(name, collectives);
    for (const Collective& collective : collectives) able.push_back(&collective);
  } else {
    able = LeaveOutFailed(collectives);
    if (able.empty()) return;
  }
  *call = Begin(stream.device, name, collectives);
  engine::EndsOrIsGivenUp(given_up_);
  try {
    AwaitTurnLocked(**call);
  } catch (...) {
    FailLocked(std::current_exception());
    throw;
  }
  driver_->Record((*call)->fork, stream.handle);
  for (const Member& member : comms_.members()) driver_->Wait(member.stream, (*call)->fork);
  {
    const MutexLock lock(mutex_);
    calls_.push_back(call->get());
    if (watchdog_sleeps_) wake_.NotifyAll();
  }
  std::exception_ptr error;
  try {
    RunGroupLocked(call->get(), [&] {
      issue_mutex_.AssertHeld();
      for (const Collective* collective : able) IssueLocked(*collective);
    });
  } catch (...) {
    error = std::current_exception();
    FailLocked(error);
  }
  // Also of a group that failed: parts of it may run.
  EndTurnLocked(**call);
  for (const Event join : (*call)->joins) driver_->Wait(stream.handle, join);
  if (error != nullptr) std::rethrow_exception(error);
}

void DeviceGroup::RunGroupLocked(const Call* call, const std::function<void()>& calls) {
  nccl_->GroupStart();
  std::exception_ptr error;
  try {
    calls();
  } catch (...) {
    error = std::current_exception();
  }
  try {
    if (!nccl_->GroupEnd() && error == nullptr) AwaitLocked(call);
  } catch (...) {
    if (error == nullptr) error = std::current_exception();
  }
  if (error != nullptr) std::rethrow_exception(error);
}

void DeviceGroup::AwaitTurnLocked(Call& call) {
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    const auto last = turns_->last.find(devices_[i]);
    if (last == turns_->last.end()) continue;
    const NcclTurns::Turn& other = last->second;
    if (other.group == this) continue;
    const std::exception_ptr error = other.given_up->error();
    if (error != nullptr && Clock::now() - other.given_up->since() >= driver_->patience() &&
        !driver_->Query(other.ended).happened) {
      std::rethrow_exception(TurnNeverComes(call, error));
    }
    const internal::GpuDriver::Stream stream = comms_.members()[i].stream;
    driver_->Wait(stream, other.ended);
    driver_->Record(call.turns[i], stream);
    call.awaited.emplace_back(i, other.given_up);
  }
}

void DeviceGroup::EndTurnLocked(const Call& call) {
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    driver_->Record(call.joins[i], comms_.members()[i].stream);
    turns_->last.insert_or_assign(devices_[i], NcclTurns::Turn{this, call.joins[i], given_up_});
  }
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

std::exception_ptr DeviceGroup::TurnNeverComes(const Call& call,
                                               const std::exception_ptr& why) const {
  return std::make_exception_ptr(
      InvalidState(fmt::format("{} waits for a turn that never comes: {}",
                               Describe(call.collectives.empty() ? nullptr : &call), WhatOf(why))));
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
  for (int asked = 0;; ++asked) {
    const Nccl::State state = comms_.Ask();
    if (state.error != nullptr) std::rethrow_exception(state.error);
    if (!state.in_progress) return;
    if (options_.deadline.count() > 0 && options_.now() - since > options_.deadline) {
      std::rethrow_exception(TimedOut(call));
    }
    if (std::exception_ptr error = JobFailed(call)) std::rethrow_exception(error);
    if (std::exception_ptr error = doomed()) std::rethrow_exception(error);
    if (asked < kAsksAtOnce) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kAskEvery);
    }
  }
}

// --- failing -------------------------------------------------------------------------------------

std::exception_ptr DeviceGroup::doomed() const {
  const MutexLock lock(mutex_);
  return doomed_;
}

void DeviceGroup::FailLocked(const std::exception_ptr& error) {
  {
    const MutexLock lock(mutex_);
    if (failure_ != nullptr) return;
    failure_ = error;
  }
  const std::string why = WhatOf(error);
  Log(LogLevel::kError, "NCCL's communicators are aborted: {}", why);
  TellOthers(why);
  std::vector<std::vector<Collective>> unused;
  if (comms_.Abort()) {
    const MutexLock lock(mutex_);
    aborted_ = true;
    unused.swap(abandoned_);
  }
  given_up_->Set(error);
}

void DeviceGroup::Fail(const std::exception_ptr& error) {
  {
    // Whoever waits for NCCL meanwhile stops that.
    const MutexLock lock(mutex_);
    if (doomed_ == nullptr) doomed_ = error;
  }
  const MutexLock issue_lock(issue_mutex_);
  FailLocked(error);
}

void DeviceGroup::GiveUp(CallPtr call, std::vector<Collective> collectives) noexcept {
  const MutexLock lock(mutex_);
  std::exception_ptr cause;
  if (call != nullptr) {
    cause = ErrorOfDevices(*call);
    std::erase(calls_, call.get());
    lost_calls_.emplace_back(call.release());
  }
  if (!aborted_) abandoned_.push_back(std::move(collectives));
  if (cause == nullptr) {
    cause = std::make_exception_ptr(InvalidState(Who() + ": a call has failed on its device"));
  }
  if (doomed_ == nullptr) doomed_ = cause;
  wake_.NotifyAll();
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

// Of one process: each of `collectives` that has its inputs and its memory. What the others write
// fails, on all devices alike, and nothing else does.
std::vector<const Collective*> DeviceGroup::LeaveOutFailed(
    std::span<const Collective> collectives) {
  std::vector<const Collective*> able;
  for (const Collective& collective : collectives) {
    std::exception_ptr error;
    try {
      TakeMemory(collective);
      for (std::size_t i = 0; i < collective.arrays.size() && error == nullptr; ++i) {
        if (collective.is_broadcast() && i != collective.root) continue;
        error = collective.arrays[i].engine().ErrorOf(collective.arrays[i].var());
      }
    } catch (...) {
      error = std::current_exception();
    }
    if (error == nullptr) able.push_back(&collective);
    if (error != nullptr && collectives.size() == 1) std::rethrow_exception(error);
    ForEachOutput(collective, [&](const NDArray& out) {
      const std::exception_ptr why =
          error == nullptr && out.is_partial() ? out.engine().ErrorOf(out.var()) : error;
      if (why != nullptr) engine::FailWrite(out.var(), why);
    });
  }
  return able;
}

void DeviceGroup::Watch() {
  try {
    driver_->Enter(devices_[0]);  // for good: on no device its calls would make a context on gpu(0)
  } catch (const Error& error) {
    Log(LogLevel::kWarning, "{}: the thread that watches over it: {}", Who(), error.what());
  }
  while (true) {
    switch (AwaitNext()) {
      case Next::kLook:
        Look();
        break;
      case Next::kStop:
        return;
      case Next::kTakeDown:
        watchdog_.detach();
        delete this;
        return;
    }
  }
}

// Is there something that cannot wait until the next look?
bool DeviceGroup::HasNewsLocked() const {
  return stop_ || (orphaned_ && ops_ == 0) || (doomed_ != nullptr && failure_ == nullptr);
}

// Returns when it is time to look: at the calls in flight, and between processes also at the
// others, for whom this one would be the last to know.
DeviceGroup::Next DeviceGroup::AwaitNext() {
  milliseconds every = kLookEvery;
  if (options_.deadline.count() > 0) {
    every = std::clamp(options_.deadline / 4, milliseconds(1), kLookEvery);
  }
  const MutexLock lock(mutex_);
  watchdog_sleeps_ = true;
  while (!HasNewsLocked() && (failure_ != nullptr || (calls_.empty() && !place_))) {
    wake_.Wait(mutex_);
  }
  watchdog_sleeps_ = false;
  const Clock::time_point next = Clock::now() + every;
  while (!HasNewsLocked() && wake_.WaitUntil(mutex_, next)) continue;
  if (stop_) return Next::kStop;
  return orphaned_ && ops_ == 0 ? Next::kTakeDown : Next::kLook;
}

std::exception_ptr DeviceGroup::ErrorOfDevices(const Call& call) const {
  if (std::exception_ptr error = driver_->Query(call.fork).error) return error;
  for (const Event join : call.joins) {
    if (std::exception_ptr error = driver_->Query(join).error) return error;
  }
  return nullptr;
}

// Of the first call in flight, as far as its devices and the clock say.
std::exception_ptr DeviceGroup::ErrorOfLocked(Call& first, Clock::time_point now) {
  if (std::exception_ptr error = ErrorOfDevices(first)) return error;
  if (!first.running_since) {
    std::exception_ptr error;
    if (HasTurnLocked(first, now, &error) && driver_->Query(first.fork).happened) {
      first.running_since = now;
    }
    if (error != nullptr) return error;
  }
  if (options_.deadline.count() > 0 && first.running_since &&
      now - *first.running_since > options_.deadline) {
    return TimedOut(&first);
  }
  return nullptr;
}

bool DeviceGroup::HasTurnLocked(Call& first, Clock::time_point now, std::exception_ptr* error) {
  bool waits = false;
  std::exception_ptr given_up;
  for (const auto& [place, other] : first.awaited) {
    if (driver_->Query(first.turns[place]).happened) continue;
    waits = true;
    if (given_up == nullptr) given_up = other->error();
  }
  if (given_up != nullptr) {
    // Where no device has failed the other one's kernels end, but not at once.
    if (!first.doubtful_since) first.doubtful_since = now;
    if (now - *first.doubtful_since >= driver_->patience()) {
      *error = TurnNeverComes(first, given_up);
    }
  }
  return !waits;
}

void DeviceGroup::Look() {
  const MutexLock issue_lock(issue_mutex_);
  const Clock::time_point now = options_.now();
  std::exception_ptr error;
  {
    const MutexLock lock(mutex_);
    if (failure_ != nullptr) return;
    error = doomed_;
    Call* const first = calls_.empty() ? nullptr : calls_.front();
    if (first != nullptr) {
      if (std::exception_ptr failed = ErrorOfLocked(*first, now)) error = failed;
    }
    if (std::exception_ptr failed = JobFailed(first)) error = failed;
  }
  if (std::exception_ptr reported = comms_.Ask().error) error = reported;
  if (error != nullptr) FailLocked(error);
}

}  // namespace heddle::kvstore
