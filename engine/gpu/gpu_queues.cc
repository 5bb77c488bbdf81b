#include "engine/gpu/gpu_queues.h"

#include <chrono>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "engine/async_state.h"
#include "engine/scheduling.h"
#include "engine/tracker_lock.h"

namespace heddle::engine {

using internal::AsyncState;

namespace {

// How long the reaper polls before it asks for signals and sleeps.
constexpr int kPollMicroseconds = 30;
// A failed device signals nothing: the reaper looks again after so long.
constexpr std::chrono::milliseconds kLookAgain{5};

}  // namespace

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
  // Signals that were asked for and not awaited use the queues. They come soon, unless the device
  // has failed or the driver is gone.
  const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  ForEach([&](GpuQueue& queue) {
    while (SignalComes(queue) && std::chrono::steady_clock::now() < patience) {
      std::this_thread::yield();
    }
    for (Stream* const stream : {&queue.stream_, &queue.signal_stream_}) {
      if (*stream != nullptr) driver_->Free(queue.device_, std::exchange(*stream, nullptr));
    }
  });
  // After all streams: those of a device that has failed may still wait for events.
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
      device.queues.push_back(std::make_unique<GpuQueue>(*this, id, i >= lane_options.streams,
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
std::exception_ptr GpuQueues::Begin(GpuQueue& queue, const std::vector<GpuMark>& waits,
                                    GpuDriver::Context* outer) {
  DeviceQueues& device = *devices_[static_cast<std::size_t>(queue.device_)];
  if (device.failed.load(std::memory_order_acquire)) return ErrorOf(device);
  try {
    *outer = driver_->Enter(queue.device_);
  } catch (...) {
    return std::current_exception();
  }
  try {
    MakeStream(queue);
    for (const GpuMark& mark : waits) {
      // Under its queue's lock: the event is not used again meanwhile.
      const MutexLock lock(mark.queue->mutex_);
      if (mark.queue->HasFinished(mark.number)) continue;
      const Event event = mark.queue->At(mark.number).event;
      if (event != nullptr) driver_->Wait(queue.stream_, event);
    }
  } catch (...) {
    driver_->Leave(*outer);
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
  {
    const MutexLock lock(queue.mutex_);
    mark.number = ++queue.last_;
    DCHECK(queue.last_ - queue.finished_.load(std::memory_order_relaxed) <=
           queue.issued_.size());  // G3
    GpuQueue::Issued& issued = queue.At(mark.number);
    issued.async = async;
    issued.body = async->op->body();
    issued.waits = waits;
    issued.event = nullptr;
    if (entered) {
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
  // While it dozes, a signal that was asked for wakes it. On a device that has failed, or fails
  // now, that one may never come, so it does not do for a reaper that would sleep for ever.
  const ReaperState reaper = reaper_state_.load(std::memory_order_seq_cst);
  if (reaper == ReaperState::kAsleep ||
      (reaper == ReaperState::kDozing &&
       (!entered || !queue.signal_comes_.load(std::memory_order_seq_cst)))) {
    Wake();
  }
  return mark;
}

// --- devices that fail ---------------------------------------------------------------------------

std::exception_ptr GpuQueues::ErrorOf(DeviceQueues& device) {
  const MutexLock lock(device.mutex);
  return device.error;
}

void GpuQueues::Fail(int id, std::exception_ptr error) {
  DeviceQueues& device = *devices_[static_cast<std::size_t>(id)];
  {
    const MutexLock lock(device.mutex);
    if (device.error != nullptr) return;
    device.error = std::move(error);
  }
  device.failed.store(true, std::memory_order_release);
  Log(LogLevel::kError, "gpu({}) has failed; all its ops fail from now on", id);
}

// --- finishing -----------------------------------------------------------------------------------

void GpuQueues::Wake() {
  {
    const MutexLock lock(reaper_mutex_);
    woken_ = true;
  }
  reaper_wake_.NotifyOne();
}

void GpuQueues::OnSignal(void* context) {
  auto* queue = static_cast<GpuQueue*>(context);
  GpuQueues& owner = queue->owner_;
  // Under the lock, so that the destructor, which waits for signal_comes_, comes after it.
  const MutexLock lock(owner.reaper_mutex_);
  owner.woken_ = true;
  owner.reaper_wake_.NotifyOne();
  queue->signal_comes_.store(false, std::memory_order_seq_cst);
}

bool GpuQueues::SignalComes(const GpuQueue& queue) {
  const MutexLock lock(reaper_mutex_);
  return queue.signal_comes_.load(std::memory_order_relaxed);
}

// `device`: one that is in use. On none a thread's first call would make a context on gpu(0).
void GpuQueues::Reap(int device) {
  PreferPromptWakeups();
  try {
    driver_->Enter(device);  // for good
  } catch (const Error& error) {
    Log(LogLevel::kWarning, "the thread that finishes GPU ops: {}", error.what());
  }
  const int pauses = PausesPerMicrosecond();
  while (true) {
    int polls = kPollMicroseconds;
    while (unfinished_.load(std::memory_order_acquire) > 0 && polls > 0) {
      if (FinishSome()) {
        polls = kPollMicroseconds;
        continue;
      }
      --polls;
      for (int i = 0; i < pauses; ++i) Pause();
    }
    reaper_state_.store(ReaperState::kAsleep, std::memory_order_seq_cst);  // then look; see End
    const bool pending = unfinished_.load(std::memory_order_seq_cst) > 0;
    if (pending) {
      reaper_state_.store(ReaperState::kDozing, std::memory_order_seq_cst);
      AskForSignals();
    }
    {
      const MutexLock lock(reaper_mutex_);
      if (stop_) return;
      if (!woken_) {
        if (pending) {
          reaper_wake_.WaitUntil(reaper_mutex_, std::chrono::steady_clock::now() + kLookAgain);
        } else {
          while (!woken_ && !stop_) reaper_wake_.Wait(reaper_mutex_);
        }
      }
      woken_ = false;
    }
    reaper_state_.store(ReaperState::kAwake, std::memory_order_seq_cst);
  }
}

bool GpuQueues::FinishSome() {
  bool any = false;
  for (const auto& device : devices_) {
    if (!device->opened.load(std::memory_order_acquire)) continue;
    for (const auto& queue : device->queues) {
      while (FinishFront(*queue)) any = true;
    }
  }
  return any;
}

// Finishes the oldest op of `queue` if it is over. False: it is not, or there is none.
bool GpuQueues::FinishFront(GpuQueue& queue) {
  DeviceQueues& device = *devices_[static_cast<std::size_t>(queue.device_)];
  AsyncState* async = nullptr;
  void* body = nullptr;
  std::exception_ptr error;
  {
    const MutexLock lock(queue.mutex_);
    const std::uint64_t number = queue.finished_.load(std::memory_order_relaxed) + 1;
    if (number > queue.last_) return false;
    GpuQueue::Issued& front = queue.At(number);
    if (front.event != nullptr && !device.failed.load(std::memory_order_relaxed)) {
      GpuDriver::State state = driver_->Query(front.event);
      if (state.error != nullptr) Fail(queue.device_, state.error);
      if (state.error == nullptr && !state.happened) return false;
    }
    for (const GpuMark& mark : front.waits) {
      if (!mark.queue->HasFinished(mark.number)) return false;  // G2
    }
    error = std::exchange(front.error, nullptr);
    if (error == nullptr && device.failed.load(std::memory_order_relaxed)) error = ErrorOf(device);
    async = std::exchange(front.async, nullptr);
    body = front.body;
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

// Has the driver wake the reaper when the oldest event of each stream has happened.
void GpuQueues::AskForSignals() {
  ForEach([this](GpuQueue& queue) {
    if (queue.signal_comes_.load(std::memory_order_acquire)) return;
    const MutexLock lock(queue.mutex_);
    const std::uint64_t number = queue.finished_.load(std::memory_order_relaxed) + 1;
    if (number > queue.last_) return;
    const Event event = queue.At(number).event;
    if (event == nullptr) return;
    try {
      driver_->Enter(queue.device_);  // for good: this thread does nothing else
      if (queue.signal_stream_ == nullptr) {
        queue.signal_stream_ = driver_->NewStream(/*urgent=*/false, /*priority=*/0);
      }
      driver_->Wait(queue.signal_stream_, event);
      queue.signal_comes_.store(true, std::memory_order_seq_cst);
      driver_->Signal(queue.signal_stream_, &OnSignal, &queue);
    } catch (...) {
      // The device has failed, which the next look at its events shows.
      queue.signal_comes_.store(false, std::memory_order_seq_cst);
    }
  });
}

}  // namespace heddle::engine
