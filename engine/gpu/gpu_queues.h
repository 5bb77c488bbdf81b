// The streams of one engine: what is issued on them, and the thread that sees it finish.
//
// DESIGN. A GPU op is an asynchronous op: its body issues work on a stream, and its completion is
// called when an event recorded behind that work has happened. Between the two the tracker lets GPU
// ops that follow on the same variables be issued too (Tracker::Issued); they wait for the events
// of their predecessors on the device.
//
//   issue:  the executor that picked the op makes the stream wait for its marks, runs the body,
//           records an event and leaves the op in the stream's GpuQueue.
//   ask:    one thread, the reaper, asks now and then how far each stream has come. A question may
//           take the driver more than a microsecond, and lines of its memory from the core that
//           launches. So there is a pause between two looks, and a look does not ask every event:
//           when one has happened, so have all before it, and those of the same device that they
//           waited for. While nothing happens the looks are the rarer the longer that has lasted.
//           A thread that waits for an op asks, too. The driver could signal it, but by a stream of
//           its own for each of ours, which would be parked behind an event: streams share a few
//           hardware connections, so it would hold up others. A word in pinned memory, written by
//           the stream, costs each op about a microsecond.
//   finish: whoever issues on a stream finishes what has happened there: it has the ops, and their
//           places, in its cache. What it does not get to, the reaper finishes.
//   fail:   on a device that has failed nothing happens any more, and its ops end at once. Streams
//           of other devices may wait for its events; nobody can tell which had happened before.
//           An op that may wait for one is given the driver's patience. Then its stream is lost:
//           that op and all behind it fail, its device takes no more ops, and what waits for these
//           on other streams is lost with them. What goes on elsewhere on that device ends as ever:
//           it uses its memory until then.
//
// Invariants:
//   (G1) A queue's numbers rise in the order in which its events were recorded. The event of a
//        number is that of its place in the ring, which is free when the op has finished.
//   (G2) An op finishes after all that were issued before it on its stream, and after all marks
//        that it waited for, whatever order the events are seen in.
//   (G3) At most issued_ahead ops of a stream are ready or issued; the others are held back.
//   (G4) Every op finishes if what runs on devices that have not failed ends: an op whose stream
//        waits for events that may never happen says so by its marks, or by a GivenUp.
//   (G5) On a threaded engine one op of a stream at a time is ready or being issued: two threads
//        that call the driver for one stream only wait for each other, which takes them a multiple
//        of the calls' own time, and in what order they come is chance.
//   (G6) Who finishes a stream's ops waits for nothing meanwhile, since nobody else does: what an
//        op captured, and its Finish(), run in the context of the op, where pushes do not wait for
//        room and waits throw.
#pragma once

#include <heddle/engine.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "engine/gpu/driver.h"
#include "engine/gpu/given_up.h"
#include "engine/gpu/gpu_var.h"
#include "engine/op.h"
#include "engine/ready_queue.h"

namespace heddle::engine {

using internal::GpuDriver;

class GpuQueues;

// Whether an executor has entered a device, which it stays in from one GPU op to the next: for the
// runtime it is as much work to find its way on a thread that has just been given a context as a
// launch is. Until it runs anything else, waits or ends.
struct EnteredDevice {
  bool is = false;
  GpuDriver::Context outer = {};
};

// One stream.
class GpuQueue {
 public:
  GpuQueue(int device, bool urgent, int priority, const EngineOptions& options)
      : device_(device),
        urgent_(urgent),
        priority_(priority),
        held(options.ageing),
        issued_(static_cast<std::size_t>(options.gpu.issued_ahead)) {}

  int device() const { return device_; }
  // Made by the first Issue.
  GpuStream stream() const { return {device_, stream_.load(std::memory_order_relaxed)}; }
  // Have the ops up to `number` finished, and told the engine so?
  bool HasFinished(std::uint64_t number) const {
    return finished_.load(std::memory_order_acquire) >= number;
  }

 private:
  friend class GpuQueues;

  struct Issued {
    internal::AsyncState* async = nullptr;
    void* body = nullptr;      // the op's: its header changes under the tracker's lock meanwhile
    bool has_event = false;    // else there is nothing to wait for: recording it failed
    std::exception_ptr error;  // of the launch
    std::vector<GpuMark> waits;
    std::shared_ptr<const GivenUp> given_up;  // null: its body has said nothing of the kind
  };

  Issued& At(std::uint64_t number) REQUIRES(mutex_) { return issued_[number % issued_.size()]; }
  GpuDriver::Event EventOf(std::uint64_t number) const { return events_[number % events_.size()]; }

  const int device_;
  const bool urgent_;
  const int priority_;

 public:
  // Guarded by the tracker's lock; see G3 and G5.
  int assigned = 0;              // ops that are to go through it and have not finished
  int ahead = 0;                 // of them those that are ready or issued
  internal::Op* next = nullptr;  // the one that is ready
  bool next_is_aged = false;     // it has waited for so long that what is more urgent comes later
  bool issuing = false;          // one is being issued
  ReadyQueue held;

 private:
  // Written once, before the first body runs; stream_ last.
  std::vector<GpuDriver::Event> events_;
  std::atomic<GpuDriver::Stream> stream_{nullptr};

  Mutex mutex_;  // held while an event is recorded or waited for, not while a body runs
  std::vector<Issued> issued_ GUARDED_BY(mutex_);  // by number, a ring
  bool finishing_ GUARDED_BY(mutex_) = false;      // a thread is, of which there is one at a time
  std::uint64_t last_ GUARDED_BY(mutex_) = 0;      // the number of the op issued last
  // Ops up to this number have left the ring. Written under mutex_.
  std::atomic<std::uint64_t> taken_{0};
  // And they have finished. Written by the thread that finishes, release; pairs with the acquire in
  // HasFinished.
  std::atomic<std::uint64_t> finished_{0};
  // The stream is lost: nothing happens any more from this number on. 0: it is not. Written by the
  // reaper under mutex_, relaxed: read under it, or by the reaper.
  std::atomic<std::uint64_t> lost_from_{0};

  // The events up to this number have happened, or their ops have left the ring; see RaiseTo.
  // Written by those who ask, not by those who issue: a line of its own.
  alignas(kNoSharing) std::atomic<std::uint64_t> happened_{0};

  // The reaper's, from here on: what it sees in this look, and saw in the one before.
  std::uint64_t last_now_ = 0;
  std::uint64_t last_seen_ = 0;
  std::uint64_t happened_seen_ = 0;
  // So many of the last ops had not happened yet, as a rule, when it asked.
  std::uint64_t lag_ = 0;
  // What had happened when it saw that the device has failed.
  std::uint64_t happened_alive_ = 0;
  // The oldest op, if it may never end, and since when that is known.
  std::uint64_t doubtful_ = 0;
  std::chrono::steady_clock::time_point doubtful_since_;
};

class GpuQueues {
 public:
  explicit GpuQueues(const EngineOptions& options);
  ~GpuQueues() { End(); }
  GpuQueues(const GpuQueues&) = delete;
  GpuQueues& operator=(const GpuQueues&) = delete;

  int device_count() const { return static_cast<int>(devices_.size()); }
  std::string WhyNoGpu(int id) const { return driver_->WhyNoGpu(id); }
  const std::shared_ptr<GpuDriver>& driver() const { return driver_; }

  // Before an op of `device` is pushed, on the thread that pushes it: where there is no thread to
  // be had, that push throws std::system_error, and nothing has changed. Threads: any, before End.
  void StartReaper(int device);

  // Nothing is issued any more: gives back what it has of the driver. device_count and WhyNoGpu go
  // on, for those who push too late. QueueOf ends the process.
  void End();

  // The stream for `op`: of those of its lane and urgency the one with the fewest ops ahead. Under
  // the tracker's lock.
  GpuQueue& QueueOf(const internal::Op& op);
  // Visits every queue of the devices that were ever named.
  template <class Visit>
  void ForEach(Visit&& visit) {
    for (const auto& device : devices_) {
      // acquire; pairs with the release in Open
      if (!device->opened.load(std::memory_order_acquire)) continue;
      for (const auto& queue : device->queues) visit(*queue);
    }
  }

  // Issues an op: the stream waits for `waits`, `body` runs unless `skipped` says why not. Its
  // completion will be called. Returns its place and why it failed, so far. Takes off `waits` what
  // has finished. Leaves the thread in the device.
  struct Result {
    GpuMark mark;
    std::exception_ptr error;
  };
  template <class Body>
  Result Issue(GpuQueue& queue, std::vector<GpuMark>& waits, internal::AsyncState* async,
               std::exception_ptr skipped, EnteredDevice* device, Body&& body) {
    bool entered = false;
    std::exception_ptr error = Begin(queue, waits, device, &entered);
    if (error == nullptr) error = skipped;
    error = body(error);
    // Always asked, so that what a body has left is not found by the next op of this thread.
    const std::exception_ptr launch = entered ? LaunchError() : nullptr;
    if (error == nullptr) error = launch;
    return {End(queue, waits, async, entered, error), error};
  }
  void Leave(EnteredDevice* device) noexcept {
    if (!std::exchange(device->is, false)) return;
    issuers_.fetch_sub(1, std::memory_order_relaxed);
    driver_->Leave(device->outer);
  }

  // Finishes the ops of `queue` that have happened, as far as that is known. Threads: whoever
  // issues, without the tracker's lock.
  void FinishHappened(GpuQueue& queue) {
    if (queue.happened_.load(std::memory_order_acquire) >
        queue.taken_.load(std::memory_order_relaxed)) {
      Finish(queue, /*closely=*/false);
    }
  }
  // Looks how far `queue` has come, and finishes what has happened. False: nothing. For threads
  // that wait for an op of it, without the tracker's lock.
  bool Look(GpuQueue& queue);

 private:
  using Stream = GpuDriver::Stream;
  using Event = GpuDriver::Event;
  static constexpr std::size_t kLanes = 4;
  enum class Looker : std::uint8_t { kReaper, kOther };  // a thread in a wait, or one that issues

  struct DeviceQueues {
    // Made once, under the tracker's lock, when an op first names the device; the reaper reads them
    // once `opened` says so.
    std::vector<std::unique_ptr<GpuQueue>> queues;
    std::size_t first[kLanes + 1] = {};  // of each lane: its streams, then its urgent ones
    std::atomic<bool> opened{false};
    Mutex mutex;
    std::exception_ptr error GUARDED_BY(mutex);  // why it takes no more ops
    std::atomic<bool> failed{false};             // it takes none
    std::atomic<bool> dead{false};  // that is since the device has failed: nothing happens on it
  };

  void Open(int id);
  std::exception_ptr Begin(GpuQueue& queue, std::vector<GpuMark>& waits, EnteredDevice* device,
                           bool* entered);
  void MakeStream(GpuQueue& queue);
  std::exception_ptr LaunchError() noexcept;
  GpuMark End(GpuQueue& queue, const std::vector<GpuMark>& waits, internal::AsyncState* async,
              bool entered, std::exception_ptr& error) noexcept;
  DeviceQueues& DeviceOf(const GpuQueue& queue) {
    return *devices_[static_cast<std::size_t>(queue.device_)];
  }
  std::exception_ptr ErrorOf(DeviceQueues& device);
  static bool Fail(DeviceQueues& device, std::exception_ptr error, bool dead);
  static void LogFailure(int id, bool dead);
  void Die(DeviceQueues& device, int id, std::exception_ptr error);
  std::exception_ptr DoubtOf(GpuQueue& queue, std::uint64_t number, bool* certain)
      REQUIRES(queue.mutex_);
  bool Loses(GpuQueue& queue, std::uint64_t number, bool* fails) REQUIRES(queue.mutex_);

  void Reap(int device);
  bool LookAtAll(bool closely, std::uint64_t* issued);
  void Ask(GpuQueue& queue, Looker looker);
  static std::uint64_t LastToAsk(GpuQueue& queue, std::uint64_t number) REQUIRES(queue.mutex_);
  void FindFailed(GpuQueue& queue);
  static void NoteHappened(GpuQueue& queue, std::uint64_t number);
  static void RaiseTo(std::uint64_t number, std::atomic<std::uint64_t>* happened) noexcept;
  static void TakeDown(internal::AsyncState* async, void* body, std::exception_ptr* error);
  bool Finish(GpuQueue& queue, bool closely);
  bool FinishThoseOver(GpuQueue& queue, bool closely, bool* fails);
  bool IsOver(GpuQueue& queue, std::uint64_t number, bool closely, bool* fails)
      REQUIRES(queue.mutex_);
  bool NeverHappens(const GpuQueue& queue) {
    return DeviceOf(queue).dead.load(std::memory_order_relaxed) ||
           queue.lost_from_.load(std::memory_order_relaxed) != 0;
  }
  void Wake();

  const EngineOptions& options_;
  const std::shared_ptr<GpuDriver> driver_;
  std::vector<std::unique_ptr<DeviceQueues>> devices_;

  std::atomic<bool> ended_{false};
  std::atomic<int> issuers_{0};  // threads in a device
  alignas(kNoSharing) std::atomic<std::int64_t> unfinished_{0};
  enum class ReaperState : std::uint8_t {
    kAwake,
    kDozing,  // ops are unfinished: it looks again soon
    kAsleep,  // there are none: it wakes for Wake alone
  };
  alignas(kNoSharing) std::atomic<ReaperState> reaper_state_{ReaperState::kAwake};
  Mutex reaper_mutex_;
  CondVar reaper_wake_;
  bool woken_ GUARDED_BY(reaper_mutex_) = false;
  bool stop_ GUARDED_BY(reaper_mutex_) = false;
  std::atomic<bool> reaper_started_{false};
  std::thread reaper_;  // written once, under reaper_mutex_, before reaper_started_
};

}  // namespace heddle::engine
