// Collectives between the GPUs of this process, or of all processes of a job: a communicator of
// NCCL and a stream a device.
//
// DESIGN. All that several devices do together is one GPU op of the engine, on the comm stream of
// one of them, the carrier: what it has waited for there, the group's own streams wait for by an
// event (the fork); NCCL's calls go to these streams, in one group; and the carrier's stream waits
// for an event of each (the joins). So the engine orders collectives as it orders every op, no
// device waits for the host, and NCCL sees one order on all devices: that in which the ops are
// issued. Of all groups of an engine, that is: a group's streams wait for what another one has
// issued there before (NcclTurns). Else two groups might come to two devices in two orders, and
// each would wait on one of them for what is behind the other.
//
// What the host waits for: NCCL launches by a thread of its own, and whoever issues a group of
// calls waits for that, as the events come behind the kernels. A collective of each group, the
// first, is issued by the set-up: it has NCCL connect the devices.
//
// NCCL has no deadline. A thread, the watchdog, asks for errors while calls are in flight, and how
// long the first of them has been running; calls that wait for their inputs, or for another group,
// do not count as running. On an error, or beyond the deadline, or if a device fails, the group
// fails: every communicator is aborted, which ends what runs on its device, and only after all of
// them anything is freed. Calls in flight fail then at their end, later ones at once, with the same
// error. Set-up and end have the same deadline: each may wait for ranks that do not come.
//
// A device that fails. Its join never happens, nor its fork if it is the carrier. The engine ends
// ops of a failed carrier at once, by threads that must not wait for NCCL: the op leaves its
// arrays, which kernels on the other devices may still use, with the group, and the watchdog fails
// that. An op with another carrier would wait for the join for ever: once the communicators are
// aborted, the engine hears that it may never end (engine/gpu/given_up.h). A call of another group
// may have been waiting for its turn behind such a join: that group fails, too, if its turn has not
// come within the driver's patience, and so does one that is to wait there later.
//
// Several processes. NCCL knows the collectives of different ranks to belong together by nothing
// but their order. Engines issue ops in an order of their own, by priorities and as inputs come; so
// these ops are chained here, by a variable of the engine that each of them writes:
//   (P1) They are issued in the order of the calls of Queue, whatever their priorities; with those
//        of all other groups between processes, as collectives of several communicators on one GPU
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
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "engine/gpu/driver.h"
#include "engine/gpu/given_up.h"
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

class DeviceGroup;

// Who has issued the last collectives on each device. That orders groups when they issue, as their
// inputs come; one variable for all, as between processes, would order them when they are queued,
// and a push whose gradient comes last would hold up all that are queued behind it.
struct NcclTurns {
  struct Turn {
    const DeviceGroup* group;
    internal::GpuDriver::Event ended;                 // on the group's stream of the device
    std::shared_ptr<const engine::GivenUp> given_up;  // says that it may never happen
  };
  Mutex mutex;  // held while collectives are issued: one group at a time
  std::map<int, Turn> last GUARDED_BY(mutex);  // by device
};

// What the groups of an engine have in common.
struct NcclOrder {
  explicit NcclOrder(Var its_var) : var(std::move(its_var)) {}

  const Var var;  // all collectives between processes are chained by it
  const std::shared_ptr<NcclTurns> turns = std::make_shared<NcclTurns>();
};

// One an engine, as long as somebody has it. Threads: all methods, any thread.
class NcclOrders {
 public:
  std::shared_ptr<const NcclOrder> Of(Engine& engine);
  std::size_t size() const;  // engines with one

 private:
  struct Table {
    mutable Mutex mutex;
    std::map<const Engine*, std::weak_ptr<const NcclOrder>> orders GUARDED_BY(mutex);
  };
  // Also of those that it gives out, which take themselves off it.
  const std::shared_ptr<Table> table_ = std::make_shared<Table>();
};

// That of this process.
std::shared_ptr<const NcclOrder> NcclOrderOf(Engine& engine);

// Where the devices of this process are among those of all. The processes make a group with the
// same id, and then queue the same collectives in the same order.
struct GroupPlace {
  Nccl::Id id{};
  int ranks = 0;       // devices of all processes
  int first_rank = 0;  // that of this process's first device
  int process = 0;
  int processes = 1;
  std::shared_ptr<Meeting> meeting = nullptr;  // null: nobody to tell
};

struct DeviceGroupOptions {
  std::chrono::milliseconds deadline{600'000};  // of one collective, and of the set-up; 0: none
  int stream_priority = 0;
  std::function<std::chrono::steady_clock::time_point()> now = &std::chrono::steady_clock::now;
  std::chrono::milliseconds abort_patience{10'000};  // with NCCL, see communicators.h

  // The defaults, changed by HEDDLE_NCCL_DEADLINE_MS.
  static DeviceGroupOptions FromEnvironment();
};

// Threads: all methods, any thread. Lives until the last op that was queued on it is done.
class DeviceGroup {
 public:
  using Clock = std::chrono::steady_clock;

  // Waits until NCCL has set up all devices, and connected them. InvalidArgument for a device that
  // is not there, or is named twice, before NCCL is called; TimeoutError; NcclError; OutOfMemory.
  // Several processes: NetworkError, too, where one of them is gone.
  // Whoever drops the last handle takes the group down, and waits for that, as said above; if ops
  // are pending, the watchdog does it when they are done, and nobody waits.
  static std::shared_ptr<DeviceGroup> Make(std::shared_ptr<Nccl> nccl,
                                           std::shared_ptr<internal::GpuDriver> driver,
                                           std::vector<int> devices,
                                           std::shared_ptr<const NcclOrder> order,
                                           const DeviceGroupOptions& options,
                                           std::optional<GroupPlace> place = std::nullopt);
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;

  const std::vector<int>& devices() const { return devices_; }

  // So many collectives are one call, a list of more is several: an op names 65 535 variables at
  // most, two or three for each array. A number of its own, for all processes have to cut a list
  // alike, whatever devices they have.
  static constexpr std::size_t kCallMax = 1024;

  // Queues `collectives`, each call as one group of NCCL's. What one of them writes, no other
  // touches. If an input of one is poisoned, or there is no memory for it, what that one writes
  // will be, and nothing else; of several processes, all of this group.
  // Errors, at the waits: NcclError; TimeoutError with the name of the op and its devices; of
  // several processes NetworkError, if one is gone or has failed.
  static void Queue(const std::shared_ptr<DeviceGroup>& group, OpName name,
                    std::vector<Collective> collectives, int priority);

  // The first time: fails the group, all of whose calls fail by `error`. Waits for NCCL.
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
    std::vector<Event> turns{};  // one a device: recorded where it has waited for another group
    std::vector<Event> joins{};  // one a device
    // What it has waited for, and where, by places among the devices.
    std::vector<std::pair<std::size_t, std::shared_ptr<const engine::GivenUp>>> awaited{};
    const char* name = "";  // of the op
    std::span<const Collective> collectives{};
    // The watchdog's.
    std::optional<Clock::time_point> running_since{};
    std::optional<Clock::time_point> doubtful_since{};  // what it waits for may never end
  };
  struct EndCall {
    void operator()(Call* call) const { call->group.End(call); }
  };
  using CallPtr = std::unique_ptr<Call, EndCall>;

  DeviceGroup(std::shared_ptr<Nccl> nccl, std::shared_ptr<internal::GpuDriver> driver,
              std::vector<int> devices, const std::shared_ptr<const NcclOrder>& order,
              const DeviceGroupOptions& options, std::optional<GroupPlace> place);
  ~DeviceGroup();

  static void QueueCall(const std::shared_ptr<DeviceGroup>& group, OpName name,
                        std::vector<Collective> collectives, int priority);
  void CheckDevices() const;
  void Open() EXCLUDES(issue_mutex_, mutex_);
  void ConnectLocked() REQUIRES(issue_mutex_);
  void CloseLocked() noexcept REQUIRES(issue_mutex_) EXCLUDES(mutex_);
  void LeaveTurns() noexcept EXCLUDES(issue_mutex_, mutex_);
  void FreeLocked() noexcept REQUIRES(issue_mutex_) EXCLUDES(mutex_);
  // Whoever has the group lets go of it.
  void Drop() noexcept EXCLUDES(mutex_);
  void OnOpMade() EXCLUDES(mutex_);
  void OnOpGone() noexcept EXCLUDES(mutex_);
  void AwaitLocked(const Call* call) REQUIRES(issue_mutex_) EXCLUDES(mutex_);
  // Sets *call first, which has to live until the device is done, also when this throws.
  void Issue(GpuStream stream, const char* name, std::span<const Collective> collectives,
             CallPtr* call) EXCLUDES(issue_mutex_, mutex_);
  void IssueLocked(const Collective& collective) REQUIRES(issue_mutex_);
  // Has NCCL do what `calls` asks for, as one group.
  void RunGroupLocked(const Call* call, const std::function<void()>& calls) REQUIRES(issue_mutex_)
      EXCLUDES(mutex_);
  // The group's streams wait for what other groups have issued, and record the turns of `call`.
  // Throws if one of these is known not to come.
  void AwaitTurnLocked(Call& call) REQUIRES(turns_->mutex, issue_mutex_);
  // Records the joins of `call`, for which other groups' streams wait from now on.
  void EndTurnLocked(const Call& call) REQUIRES(turns_->mutex, issue_mutex_);
  CallPtr Begin(int carrier, const char* name, std::span<const Collective> collectives)
      EXCLUDES(mutex_);
  std::unique_ptr<Call> NewCall(std::size_t carrier);
  void FreeCall(const Call& call) noexcept;
  void End(Call* call) noexcept EXCLUDES(mutex_);
  // A call, or one that was not even issued, has not come to its end: its device has failed. The
  // group is going to. Waits for nobody.
  void GiveUp(CallPtr call, std::vector<Collective> collectives) noexcept EXCLUDES(mutex_);
  static std::vector<const Collective*> LeaveOutFailed(std::span<const Collective> collectives);
  void FailIfPoisonedLocked(const char* name, std::span<const Collective> collectives)
      REQUIRES(issue_mutex_) EXCLUDES(mutex_);
  void FailLocked(const std::exception_ptr& error) REQUIRES(issue_mutex_) EXCLUDES(mutex_);
  void TellOthers(const std::string& why);
  std::exception_ptr doomed() const EXCLUDES(mutex_);
  std::string Who() const;  // "NCCL between gpu(0), gpu(1)"
  // "NCCL between gpu(0), gpu(1): kvstore.nccl.reduce of key 'w'"; no call: "... the set-up", or
  // "... gpu(1)" alone.
  std::string Describe(const char* name, std::span<const Collective> collectives) const;
  std::string Describe(const Call* call) const {
    return call == nullptr ? Describe(nullptr, {}) : Describe(call->name, call->collectives);
  }
  std::exception_ptr TimedOut(const Call* call) const;
  std::exception_ptr TurnNeverComes(const Call& call, const std::exception_ptr& why) const;
  std::exception_ptr JobFailed(const Call* call) const;  // null: it has not

  void Watch() EXCLUDES(issue_mutex_, mutex_);
  enum class Next : std::uint8_t { kLook, kStop, kTakeDown };
  Next AwaitNext() EXCLUDES(mutex_);
  bool HasNewsLocked() const REQUIRES(mutex_);
  std::exception_ptr ErrorOfDevices(const Call& call) const;
  std::exception_ptr ErrorOfLocked(Call& first, Clock::time_point now)
      REQUIRES(issue_mutex_, mutex_);
  // Have the turns of the call come? `*error`: why one never will.
  bool HasTurnLocked(Call& first, Clock::time_point now, std::exception_ptr* error)
      REQUIRES(issue_mutex_, mutex_);
  void Look() EXCLUDES(issue_mutex_, mutex_);

  const std::shared_ptr<Nccl> nccl_;
  const std::shared_ptr<internal::GpuDriver> driver_;
  const std::vector<int> devices_;
  const DeviceGroupOptions options_;
  const std::optional<GroupPlace> place_;       // none: this process is alone
  const std::weak_ptr<const NcclOrder> order_;  // whoever has the group has it, and its ops
  const std::shared_ptr<NcclTurns> turns_;
  // Set once the group has failed, and its communicators are aborted.
  const std::shared_ptr<engine::GivenUp> given_up_ = std::make_shared<engine::GivenUp>();

  // One thread at a time is in NCCL. Taken after turns_->mutex and before mutex_.
  Mutex issue_mutex_;
  Communicators comms_ GUARDED_BY(issue_mutex_);
  std::unique_ptr<Call> connecting_ GUARDED_BY(issue_mutex_);  // the set-up's
  // What goes on while no call does; null: nothing. Written by the constructor, before there is a
  // watchdog, and by the destructor.
  const char* phase_ = "the set-up";
  mutable Mutex mutex_;
  CondVar wake_;
  bool stop_ GUARDED_BY(mutex_) = false;
  bool watchdog_sleeps_ GUARDED_BY(mutex_) = false;  // until there is something to look at
  std::size_t ops_ GUARDED_BY(mutex_) = 0;           // queued and not gone
  bool orphaned_ GUARDED_BY(mutex_) = false;         // nobody else has the group
  std::exception_ptr failure_ GUARDED_BY(mutex_);
  std::exception_ptr doomed_ GUARDED_BY(mutex_);  // why it is to fail: left by who cannot wait
  std::deque<Call*> calls_ GUARDED_BY(mutex_);    // in flight, in the order of their issue
  std::vector<std::unique_ptr<Call>> spare_calls_ GUARDED_BY(mutex_);
  // Of ops that have not come to their end: events that may never happen, and arrays that NCCL may
  // use until its communicators are aborted.
  std::vector<std::unique_ptr<Call>> lost_calls_ GUARDED_BY(mutex_);
  std::vector<std::vector<Collective>> abandoned_ GUARDED_BY(mutex_);
  bool aborted_ GUARDED_BY(mutex_) = false;
  std::thread watchdog_;
};

}  // namespace heddle::kvstore
