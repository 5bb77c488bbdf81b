#include "engine/gpu/gpu_queues.h"

#include <heddle/error.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "base/log.h"
#include "engine/async_state.h"
#include "engine/scheduling.h"
#include "engine/tracker_lock.h"

namespace heddle::engine {

using internal::AsyncState;

namespace {

using Clock = std::chrono::steady_clock;

// How long the reaper polls after the last news before it sleeps between two looks.
constexpr int kPollMicroseconds = 30;
// So long at a time: a part of the time for which there has been no news, by which it is late then.
constexpr int kDozePart = 8;
constexpr std::chrono::microseconds kDozeMin{20};
constexpr std::chrono::milliseconds kDozeMax{1};
// How often it asks, too, what can never end.
constexpr std::chrono::milliseconds kLookCloselyEvery{1};

// What the body that this thread runs has said.
thread_local std::shared_ptr<const GivenUp> issuing_given_up;

// What the ops of a device fail by when one of them waits for what has failed by `why`.
std::exception_ptr ErrorOfWaiter(int device, const std::exception_ptr& why) {
  try {
    std::rethrow_exception(why);
  } catch (const CudaError& error) {
    return std::make_exception_ptr(CudaError(
        fmt::format("gpu({}) waits for what never comes: {}", device, error.what()), error.code()));
  } catch (...) {
    return why;
  }
}

}  // namespace

void EndsOrIsGivenUp(std::shared_ptr<const GivenUp> given_up) noexcept {
  issuing_given_up = std::move(given_up);
}

GpuQueues::GpuQueues(const EngineOptions& options)
    : options_(options),
      driver_(options.gpu_driver != nullptr ? options.gpu_driver : internal::DefaultGpuDriver()) {
  for (int id = 0; id < driver_->device_count(); ++id) {
    devices_.push_back(std::make_unique<DeviceQueues>());
  }
}

void GpuQueues::End() {
  ended_.store(true, std::memory_order_relaxed);
  if (!reaper_.joinable()) return;
  {
    const MutexLock lock(reaper_mutex_);
    stop_ = true;
  }
  reaper_wake_.NotifyAll();
  reaper_.join();
  ForEach([this](GpuQueue& queue) {
    if (queue.stream_ != nullptr) {
      driver_->Free(queue.device_, std::exchange(queue.stream_, nullptr));
    }
  });
  // After all streams: those that are lost may still wait for events.
  ForEach([this](GpuQueue& queue) {
    const MutexLock lock(queue.mutex_);
    for (const Event event : queue.free_events_) driver_->FreeEvent(queue.device_, event);
  });
}

// The first op that names the device: makes its queues, but nothing on the device yet.
void GpuQueues::Open(int id) {
  DeviceQueues& device = *devices_[static_cast<std::size_t>(id)];
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    const GpuLaneOptions& lane_options = options_.gpu.lanes[lane];
    device.first[lane] = device.queues.size();
    for (int i = 0; i < lane_options.streams + lane_options.urgent_streams; ++i) {
      device.queues.push_back(std::make_unique<GpuQueue>(id, i >= lane_options.streams,
                                                         lane_options.priority, options_));
    }
  }
  device.first[kLanes] = device.queues.size();
  device.opened.store(true, std::memory_order_release);  // pairs with the acquire in FinishSome
  if (!reaper_.joinable()) reaper_ = std::thread([this, id] { Reap(id); });
}

GpuQueue& GpuQueues::QueueOf(const internal::Op& op) {
  CHECK(!ended_.load(std::memory_order_relaxed), "op '{}' of gpu({}), whose streams are gone",
        op.name, op.device_id);
  DeviceQueues& device = *devices_[static_cast<std::size_t>(op.device_id)];
  if (device.queues.empty()) Open(op.device_id);
  const auto lane = static_cast<std::size_t>(op.lane);
  const GpuLaneOptions& lane_options = options_.gpu.lanes[lane];
  const std::size_t usual = device.first[lane] + static_cast<std::size_t>(lane_options.streams);
  const bool urgent = op.priority > 0 && lane_options.urgent_streams > 0;
  const std::size_t begin = urgent ? usual : device.first[lane];
  const std::size_t end = urgent ? device.first[lane + 1] : usual;
  GpuQueue* best = device.queues[begin].get();
  for (std::size_t i = begin + 1; i < end; ++i) {
    if (device.queues[i]->ahead < best->ahead) best = device.queues[i].get();
  }
  return *best;
}

// --- issuing -------------------------------------------------------------------------------------

void GpuQueues::MakeStream(GpuQueue& queue) {
  const MutexLock lock(queue.mutex_);
  if (queue.stream_ == nullptr) {
    queue.stream_ = driver_->NewStream(queue.urgent_, queue.priority_);
  }
}

// Enters the device and makes the stream wait for `waits`. Why it could not; null: done.
std::exception_ptr GpuQueues::Begin(GpuQueue& queue, std::vector<GpuMark>& waits,
                                    GpuDriver::Context* outer, bool* entered) {
  issuing_given_up = nullptr;
  DeviceQueues& device = DeviceOf(queue);
  if (device.failed.load(std::memory_order_acquire)) return ErrorOf(device);
  try {
    *outer = driver_->Enter(queue.device_);
  } catch (...) {
    return std::current_exception();
  }
  try {
    MakeStream(queue);
  } catch (...) {
    driver_->Leave(*outer);
    return std::current_exception();
  }
  *entered = true;
  // From here on the stream may wait, so the op needs its event, also if it fails.
  try {
    std::size_t kept = 0;
    for (const GpuMark mark : waits) {
      // Under its queue's lock: the event is not used again meanwhile.
      const MutexLock lock(mark.queue->mutex_);
      if (mark.queue->HasFinished(mark.number)) continue;
      GpuMark& wait = waits[kept++] = mark;
      const Event event = mark.queue->At(mark.number).event;
      if (event == nullptr) continue;
      driver_->Wait(queue.stream_, event);
      wait.on_device = true;
    }
    waits.resize(kept);
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

std::exception_ptr GpuQueues::LaunchError() noexcept {
  try {
    driver_->CheckLaunches();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

// Marks the end of what an op has issued, on the current device. Without an event, because there
// can be none, the op finishes once what it waited for has.
GpuMark GpuQueues::End(GpuQueue& queue, const std::vector<GpuMark>& waits, AsyncState* async,
                       bool entered, std::exception_ptr& error) noexcept {
  GpuMark mark{&queue, 0};
  bool alone = false;
  {
    const MutexLock lock(queue.mutex_);
    mark.number = ++queue.last_;
    const std::uint64_t unfinished = queue.last_ - queue.finished_.load(std::memory_order_relaxed);
    DCHECK(unfinished <= queue.issued_.size());  // G3
    alone = unfinished == 1;
    GpuQueue::Issued& issued = queue.At(mark.number);
    issued.async = async;
    issued.body = async->op->body();
    issued.waits = waits;
    issued.given_up = std::move(issuing_given_up);
    issued.event = nullptr;
    if (queue.lost_from_.load(std::memory_order_relaxed) != 0) {
      if (error == nullptr) error = ErrorOf(DeviceOf(queue));
    } else if (entered) {
      Event event = nullptr;
      try {
        if (queue.free_events_.empty()) {
          event = driver_->NewEvent();
        } else {
          event = queue.free_events_.back();
          queue.free_events_.pop_back();
        }
        driver_->Record(event, queue.stream_);
        issued.event = event;
      } catch (...) {
        if (event != nullptr) queue.free_events_.push_back(event);
        if (error == nullptr) error = std::current_exception();
      }
    }
    issued.error = error;
  }
  // seq_cst; pairs with the store of kAsleep in Reap: it sees the op, or this thread sees it asleep
  unfinished_.fetch_add(1, std::memory_order_seq_cst);
  // While it dozes, it looks at what has run long less and less often. Behind others an op is seen
  // to end when these are.
  const ReaperState reaper = reaper_state_.load(std::memory_order_seq_cst);
  if (reaper == ReaperState::kAsleep || (reaper == ReaperState::kDozing && alone)) Wake();
  return mark;
}

// --- devices that fail ---------------------------------------------------------------------------

std::exception_ptr GpuQueues::ErrorOf(DeviceQueues& device) {
  const MutexLock lock(device.mutex);
  return device.error;
}

// `dead`: the device itself has failed; else a stream of it is lost.
void GpuQueues::Fail(DeviceQueues& device, int id, std::exception_ptr error, bool dead) {
  bool first = false;
  {
    const MutexLock lock(device.mutex);
    first = device.error == nullptr;
    if (first) device.error = std::move(error);
  }
  // Stored before anybody sees that an op of it has failed.
  if (dead) device.dead.store(true, std::memory_order_release);
  device.failed.store(true, std::memory_order_release);
  if (!first) return;
  if (dead) {
    Log(LogLevel::kError, "gpu({}) has failed; all its ops fail from now on", id);
  } else {
    Log(LogLevel::kError, "gpu({}) waits for what never comes; it takes no more ops", id);
  }
}

// Nothing happens any more on the device; what the reaper has finished until now had happened.
void GpuQueues::Die(DeviceQueues& device, int id, std::exception_ptr error) {
  for (const auto& queue : device.queues) {
    queue->finished_alive_ = queue->finished_.load(std::memory_order_relaxed);
  }
  Fail(device, id, std::move(error), /*dead=*/true);
}

// Why the op `number` of `queue`, the oldest, and what is behind it may never end; null: all does.
std::exception_ptr GpuQueues::DoubtOf(GpuQueue& queue, std::uint64_t number, bool* certain) {
  std::exception_ptr doubt;
  // Also those behind it: two that were issued at a time may lie on the stream the other way round.
  for (std::uint64_t i = number; i <= queue.last_; ++i) {
    const GpuQueue::Issued& issued = queue.At(i);
    if (issued.event == nullptr) continue;  // it has not made the stream wait
    if (doubt == nullptr && issued.given_up != nullptr) doubt = issued.given_up->error();
    for (const GpuMark& mark : issued.waits) {
      if (!mark.on_device) continue;
      DeviceQueues& device = DeviceOf(*mark.queue);
      const std::uint64_t lost_from = mark.queue->lost_from_.load(std::memory_order_relaxed);
      const bool lost = lost_from != 0 && lost_from <= mark.number;
      if (lost && i == number) *certain = true;
      const bool died =
          device.dead.load(std::memory_order_relaxed) && mark.queue->finished_alive_ < mark.number;
      if (doubt == nullptr && (lost || died)) doubt = ErrorOf(device);
    }
  }
  return doubt;
}

// The oldest op of `queue`, whose event has not happened, is not going to end: the stream is lost.
// False: it may end.
bool GpuQueues::Loses(GpuQueue& queue, std::uint64_t number) {
  bool certain = false;
  const std::exception_ptr doubt = DoubtOf(queue, number, &certain);
  if (doubt == nullptr) {
    queue.doubtful_ = 0;
    return false;
  }
  const Clock::time_point now = Clock::now();
  if (queue.doubtful_ != number) {
    queue.doubtful_ = number;
    queue.doubtful_since_ = now;
  }
  if (!certain && now - queue.doubtful_since_ < driver_->patience()) return false;
  queue.lost_from_.store(number, std::memory_order_relaxed);
  Fail(DeviceOf(queue), queue.device_, ErrorOfWaiter(queue.device_, doubt), /*dead=*/false);
  return true;
}

// --- finishing -----------------------------------------------------------------------------------

void GpuQueues::Wake() {
  {
    const MutexLock lock(reaper_mutex_);
    woken_ = true;
  }
  reaper_wake_.NotifyOne();
}

// `device`: one that is in use. On none a thread's first call would make a context on gpu(0).
void GpuQueues::Reap(int device) {
  PreferPromptWakeups();
  PreferExactTimers();
  try {
    driver_->Enter(device);  // for good
  } catch (const Error& error) {
    Log(LogLevel::kWarning, "the thread that finishes GPU ops: {}", error.what());
  }
  const int pauses = PausesPerMicrosecond();
  Clock::time_point news = Clock::now();  // an op was issued, as far as is told, or has finished
  int polls = kPollMicroseconds;
  Clock::time_point looked_closely{};
  while (true) {
    while (unfinished_.load(std::memory_order_acquire) > 0 && polls > 0) {
      // By the clock: while some device always has news, others may have none to come.
      const Clock::time_point now = Clock::now();
      const bool closely = now - looked_closely >= kLookCloselyEvery;
      if (closely) looked_closely = now;
      if (FinishSome(closely)) {
        news = now;
        polls = kPollMicroseconds;
        continue;
      }
      --polls;
      for (int i = 0; i < pauses; ++i) Pause();
    }
    reaper_state_.store(ReaperState::kAsleep, std::memory_order_seq_cst);  // then look; see End
    const bool pending = unfinished_.load(std::memory_order_seq_cst) > 0;
    if (pending) reaper_state_.store(ReaperState::kDozing, std::memory_order_seq_cst);
    bool woken = false;
    {
      const MutexLock lock(reaper_mutex_);
      if (stop_) return;
      if (pending && !woken_) {
        const Clock::time_point now = Clock::now();
        const Clock::duration doze =
            std::clamp<Clock::duration>((now - news) / kDozePart, kDozeMin, kDozeMax);
        reaper_wake_.WaitUntil(reaper_mutex_, now + doze);
      } else {
        while (!woken_ && !stop_) reaper_wake_.Wait(reaper_mutex_);
      }
      woken = std::exchange(woken_, false);
    }
    reaper_state_.store(ReaperState::kAwake, std::memory_order_seq_cst);
    polls = 1;
    if (woken) {
      news = Clock::now();
      polls = kPollMicroseconds;
    }
  }
}

bool GpuQueues::FinishSome(bool closely) {
  bool any = false;
  for (const auto& device : devices_) {
    if (!device->opened.load(std::memory_order_acquire)) continue;
    for (const auto& queue : device->queues) {
      while (FinishFront(*queue, closely)) any = true;
    }
  }
  return any;
}

// Finishes the oldest op of `queue` if it is over. False: it is not, or there is none. `closely`:
// asks, too, whether it can ever be over.
bool GpuQueues::FinishFront(GpuQueue& queue, bool closely) {
  DeviceQueues& device = DeviceOf(queue);
  AsyncState* async = nullptr;
  void* body = nullptr;
  std::exception_ptr error;
  std::shared_ptr<const GivenUp> given_up;  // goes when the lock is free
  {
    const MutexLock lock(queue.mutex_);
    const std::uint64_t number = queue.finished_.load(std::memory_order_relaxed) + 1;
    if (number > queue.last_) return false;
    GpuQueue::Issued& front = queue.At(number);
    const auto never_happens = [&] {
      return device.dead.load(std::memory_order_relaxed) ||
             queue.lost_from_.load(std::memory_order_relaxed) != 0;
    };
    bool over = front.event == nullptr || never_happens();
    if (!over) {
      GpuDriver::State state = driver_->Query(front.event);
      if (state.error != nullptr) Die(device, queue.device_, state.error);
      over = state.error != nullptr || state.happened;
    }
    for (const GpuMark& mark : front.waits) {
      if (!mark.queue->HasFinished(mark.number)) return false;  // G2
    }
    if (!over && !(closely && Loses(queue, number))) return false;
    error = std::exchange(front.error, nullptr);
    if (error == nullptr && never_happens()) error = ErrorOf(device);
    async = std::exchange(front.async, nullptr);
    body = front.body;
    given_up = std::move(front.given_up);
    if (front.event != nullptr) queue.free_events_.push_back(std::exchange(front.event, nullptr));
    queue.finished_.store(number, std::memory_order_release);
  }
  unfinished_.fetch_sub(1, std::memory_order_relaxed);
  // Takes down what the body captured: memory that the device may have been using until now.
  try {
    async->op->function(
        body, error == nullptr ? internal::BodyAction::kFinish : internal::BodyAction::kDrop,
        async);
  } catch (...) {
    error = std::current_exception();
  }
  internal::CompleteAsync(async, std::move(error));
  return true;
}

}  // namespace heddle::engine
