// Collectives between the GPUs of this process, or of all processes of a job: a communicator of
// NCCL and a stream a device.
//
// DESIGN. All that several devices do together is one GPU op of the engine, on the comm stream of
// one of them, the carrier: what it has waited for there, the group's own streams wait for by an
// event (the fork); NCCL's calls go to these streams, in one group; and the carrier's stream waits
// for an event of each (the joins). So the engine orders collectives as it orders every op, the
// host waits for nothing, and NCCL sees one order on all devices: that in which the ops are issued.
//
// NCCL has no deadline. A thread, the watchdog, asks for errors while calls are in flight, and how
// long the first of them has been running; calls that wait for their inputs do not count as
// running. On an error, or beyond the deadline, the group fails: every communicator is aborted,
// which ends what runs on its device, and only after all of them anything is freed. Calls in flight
// fail then at their end, later ones at once, with the same error. Set-up and end have the same
// deadline: each may wait for ranks that do not come.
//
// Several processes. NCCL knows the collectives of different ranks to belong together by nothing
// but their order. Engines issue ops in an order of their own, by priorities and as inputs come; so
// these ops are chained here, by a variable of the engine that each of them writes:
//   (P1) They are issued in the order of the calls of Queue, whatever their priorities; with those
//   of
//        all other groups between processes, as collectives of several communicators on one GPU
//        wait for each other, too.
//   (P2) Each of them issues its collectives, or the group fails. An op whose input is poisoned is
//        not skipped, as others would wait for it: the group fails with the input's error.
//   (P3) A group that has failed here tells the other processes, by the meeting, if that can; and
//        one that hears of it, or of a process that is gone, fails itself, also while no call of it
//        is in flight. So what a process does not come to, because its group has failed, no other
//        waits for.
// Where the meeting cannot tell, the others' deadlines do.
#pragma once

#include <heddle/engine.h>
#include <heddle/key.h>
#include <heddle/ndarray.h>

#include <chrono>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "engine/gpu/driver.h"
#include "kvstore/nccl/communicators.h"
#include "kvstore/nccl/meeting.h"
#include "kvstore/nccl/nccl_api.h"

namespace heddle::kvstore {

// What happens to one array on each device of a group. Equal shapes and dtypes.
struct Collective {
  std::vector<NDArray> arrays = {};  // in the order of the group's devices
  std::size_t root = 0;              // a place among them
  // On the root's device, becomes their sum. Empty: the root's array is copied to the others.
  NDArray sum = {};
  // On each device, becomes the sum over the devices of all processes. Not empty if there are
  // several processes: they have this kind alone. `root` is a device of this process, then.
  std::vector<NDArray> sums = {};
  Key key = {};  // for messages

  bool is_broadcast() const { return sum.empty() && sums.empty(); }
};

// What all collectives between processes are chained by: one an engine, as long as somebody has it.
// Threads: all methods, any thread.
class NcclOrders {
 public:
  std::shared_ptr<const Var> Of(Engine& engine);
  std::size_t size() const;  // engines with one

 private:
  struct Table {
    mutable Mutex mutex;
    std::map<const Engine*, std::weak_ptr<const Var>> orders GUARDED_BY(mutex);
  };
  // Also of those that it gives out, which take themselves off it.
  const std::shared_ptr<Table> table_ = std::make_shared<Table>();
};

// That of this process.
std::shared_ptr<const Var> NcclOrderOf(Engine& engine);

// Where the devices of this process are among those of all. The processes make a group with the
// same id, and then queue the same collectives in the same order.
struct GroupPlace {
  Nccl::Id id{};
  int ranks = 0;       // devices of all processes
  int first_rank = 0;  // that of this process's first device
  Var order;           // NcclOrderOf the engine
  int process = 0;
  int processes = 1;
  std::shared_ptr<Meeting> meeting = nullptr;  // null: nobody to tell
};

struct DeviceGroupOptions {
  std::chrono::milliseconds deadline{600'000};  // of one collective, and of the set-up; 0: none
  int stream_priority = 0;
  std::function<std::chrono::steady_clock::time_point()> now = &std::chrono::steady_clock::now;

  // The defaults, changed by HEDDLE_NCCL_DEADLINE_MS.
  static DeviceGroupOptions FromEnvironment();
};

std::shared_ptr<internal::GpuDriver> GpuDriverOf(const Engine& engine);

// Threads: all methods, any thread. Lives until the last op that was queued on it is done.
class DeviceGroup {
 public:
  using Clock = std::chrono::steady_clock;

  // Waits until NCCL has set up all devices. InvalidArgument for a device that is not there, or is
  // named twice, before NCCL is called; TimeoutError; NcclError.
  // Several processes: NetworkError, too, where one of them is gone.
  DeviceGroup(std::shared_ptr<Nccl> nccl, std::shared_ptr<internal::GpuDriver> driver,
              std::vector<int> devices, const DeviceGroupOptions& options,
              std::optional<GroupPlace> place = std::nullopt);
  ~DeviceGroup();
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;

  const std::vector<int>& devices() const { return devices_; }

  // Queues all of `collectives` as one group of NCCL's. What one of them writes, no other touches.
  // If an input of one is poisoned, what that one writes will be, and nothing else; of several
  // processes, all of this group.
  // Errors, at the waits: NcclError; TimeoutError with the name of the op and its devices; of
  // several processes NetworkError, if one is gone or has failed.
  static void Queue(const std::shared_ptr<DeviceGroup>& group, OpName name,
                    std::vector<Collective> collectives, int priority);

  // The first time: fails the group, all of whose calls fail by `error`.
  void Fail(const std::exception_ptr& error) EXCLUDES(issue_mutex_, mutex_);
  std::exception_ptr failure() const EXCLUDES(mutex_);  // null: it has not failed
  // Throws what the group has failed by.
  void ThrowIfFailed() const {
    if (std::exception_ptr error = failure()) std::rethrow_exception(error);
  }

 private:
  using Event = internal::GpuDriver::Event;
  using Member = Communicators::Member;
  struct CollectiveOp;

  // A group of NCCL's from its issue to its end. Used again, and its events with it.
  struct Call {
    DeviceGroup& group;
    const std::size_t carrier;   // a place among the devices
    Event fork = nullptr;        // of the carrier
    std::vector<Event> joins{};  // one a device
    const char* name = "";       // of the op
    std::span<const Collective> collectives{};
    std::optional<Clock::time_point> running_since{};  // the watchdog's
  };
  struct EndCall {
    void operator()(Call* call) const { call->group.End(call); }
  };
  using CallPtr = std::unique_ptr<Call, EndCall>;
  // Of a call between processes that has not come to its end.
  struct GiveUpCall {
    void operator()(DeviceGroup* group) const { group->GiveUp(); }
  };

  void CheckDevices() const;
  void Open();
  void CloseLocked() noexcept REQUIRES(issue_mutex_) EXCLUDES(mutex_);
  void AwaitLocked(const Call* call) REQUIRES(issue_mutex_);
  // Sets *call first, which has to live until the device is done, also when this throws.
  void Issue(GpuStream stream, const char* name, std::span<const Collective> collectives,
             CallPtr* call) EXCLUDES(issue_mutex_, mutex_);
  void IssueLocked(const Collective& collective) REQUIRES(issue_mutex_);
  CallPtr Begin(int carrier, const char* name, std::span<const Collective> collectives)
      EXCLUDES(mutex_);
  std::unique_ptr<Call> NewCall(std::size_t carrier);
  void FreeCall(const Call& call) noexcept;
  void End(Call* call) noexcept EXCLUDES(mutex_);
  void FailIfPoisonedLocked(const char* name, std::span<const Collective> collectives)
      REQUIRES(issue_mutex_) EXCLUDES(mutex_);
  void FailLocked(const std::exception_ptr& error) REQUIRES(issue_mutex_) EXCLUDES(mutex_);
  void TellOthers(const std::string& why);
  void GiveUp() noexcept EXCLUDES(issue_mutex_, mutex_);
  std::string Who() const;  // "NCCL between gpu(0), gpu(1)"
  // "NCCL between gpu(0), gpu(1): kvstore.nccl.reduce of key 'w'"; no call: "... the set-up", or
  // "... gpu(1)" alone.
  std::string Describe(const char* name, std::span<const Collective> collectives) const;
  std::string Describe(const Call* call) const {
    return call == nullptr ? Describe(nullptr, {}) : Describe(call->name, call->collectives);
  }
  std::exception_ptr TimedOut(const Call* call) const;
  std::exception_ptr JobFailed(const Call* call) const;  // null: it has not

  void Watch() EXCLUDES(issue_mutex_, mutex_);
  bool AwaitCalls() EXCLUDES(mutex_);
  std::exception_ptr ErrorOfLocked(Call& first, Clock::time_point now)
      REQUIRES(issue_mutex_, mutex_);
  void Look() EXCLUDES(issue_mutex_, mutex_);

  const std::shared_ptr<Nccl> nccl_;
  const std::shared_ptr<internal::GpuDriver> driver_;
  const std::vector<int> devices_;
  const DeviceGroupOptions options_;
  const std::optional<GroupPlace> place_;  // none: this process is alone

  // One thread at a time is in NCCL. Taken before mutex_.
  Mutex issue_mutex_;
  Communicators comms_ GUARDED_BY(issue_mutex_);
  // What goes on while no call does; null: nothing. Written by the constructor, before there is a
  // watchdog, and by the destructor.
  const char* phase_ = "the set-up";
  mutable Mutex mutex_;
  CondVar wake_;
  bool stop_ GUARDED_BY(mutex_) = false;
  bool watchdog_sleeps_ GUARDED_BY(mutex_) = false;  // until there is something to look at
  std::exception_ptr failure_ GUARDED_BY(mutex_);
  std::deque<Call*> calls_ GUARDED_BY(mutex_);  // in flight, in the order of their issue
  std::vector<std::unique_ptr<Call>> spare_calls_ GUARDED_BY(mutex_);
  std::thread watchdog_;
};

}  // namespace heddle::kvstore
