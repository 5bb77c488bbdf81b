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
#include "engine/thread_context.h"
#include "engine/tracker_lock.h"

namespace heddle::engine {

using internal::AsyncState;

namespace {

using Clock = std::chrono::steady_clock;

// The reaper's pauses between two looks. While ops are issued, whose issuer a question holds up: as
// long as it takes to issue a part of what a stream may be ahead, but not longer. Else the least.
constexpr std::chrono::microseconds kPauseMin{5};
constexpr std::chrono::microseconds kPauseMax{20};
// For so long after the last news it stays awake in them.
constexpr std::chrono::microseconds kAwakeFor{50};
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
    if (const Stream stream = queue.stream_.exchange(nullptr, std::memory_order_relaxed)) {
      driver_->Free(queue.device_, stream);
    }
  });
  // After all streams: those that are lost may still wait for events.
  ForEach([this](GpuQueue& queue) {
    for (const Event event : queue.events_) driver_->FreeEvent(queue.device_, event);
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
  device.opened.store(true, std::memory_order_release);  // pairs with the acquire in ForEach
}

void GpuQueues::StartReaper(int device) {
  // acquire; pairs with the release below
  if (reaper_started_.load(std::memory_order_acquire)) return;
  const MutexLock lock(reaper_mutex_);
  if (reaper_started_.load(std::memory_order_relaxed)) return;
  reaper_ = std::thread([this, device] { Reap(device); });
  reaper_started_.store(true, std::memory_order_release);
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
    if (device.queues[i]->assigned < best->assigned) best = device.queues[i].get();
  }
  return *best;
}

// --- issuing -------------------------------------------------------------------------------------

// One thread at a time; the tracker's lock is between two.
void GpuQueues::MakeStream(GpuQueue& queue) {
  if (queue.stream_.load(std::memory_order_relaxed) != nullptr) return;
  const auto places = static_cast<std::size_t>(options_.gpu.issued_ahead);
  while (queue.events_.size() < places) queue.events_.push_back(driver_->NewEvent());
  queue.stream_.store(driver_->NewStream(queue.urgent_, queue.priority_),
                      std::memory_order_relaxed);
}

// Enters the device and makes the stream wait for `waits`. Why it could not; null: done.
std::exception_ptr GpuQueues::Begin(GpuQueue& queue, std::vector<GpuMark>& waits,
                                    EnteredDevice* device, bool* entered) {
  issuing_given_up = nullptr;
  DeviceQueues& queues = DeviceOf(queue);
  if (queues.failed.load(std::memory_order_acquire)) return ErrorOf(queues);
  try {
    const GpuDriver::Context outer = driver_->Enter(queue.device_);
    if (!device->is) {
      *device = {.is = true, .outer = outer};
      issuers_.fetch_add(1, std::memory_order_relaxed);
    }
    MakeStream(queue);
  } catch (...) {
    return std::current_exception();
  }
  *entered = true;
  // From here on the stream may wait, so the op needs its event, also if it fails.
  try {
    std::size_t kept = 0;
    for (const GpuMark mark : waits) {
      GpuQueue& other = *mark.queue;
      if (other.HasFinished(mark.number)) continue;
      GpuMark& wait = waits[kept++] = mark;
      if (other.happened_.load(std::memory_order_acquire) >= mark.number) continue;
      // Under its queue's lock: the event is not used again meanwhile.
      const MutexLock lock(other.mutex_);
      const bool happened = other.happened_.load(std::memory_order_relaxed) >= mark.number;
      if (happened || !other.At(mark.number).has_event) continue;
      driver_->Wait(queue.stream().handle, other.EventOf(mark.number));
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
    const std::uint64_t unfinished = queue.last_ - queue.taken_.load(std::memory_order_relaxed);
    DCHECK(unfinished <= queue.issued_.size());  // G3
    alone = unfinished == 1;
    GpuQueue::Issued& issued = queue.At(mark.number);
    issued.async = async;
    issued.body = async->op->body();
    issued.waits = waits;
    issued.given_up = std::move(issuing_given_up);
    issued.has_event = false;
    if (queue.lost_from_.load(std::memory_order_relaxed) != 0) {
      if (error == nullptr) error = ErrorOf(DeviceOf(queue));
    } else if (entered) {
      try {
        driver_->Record(queue.EventOf(mark.number), queue.stream().handle);
        issued.has_event = true;
      } catch (...) {
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

// `dead`: the device itself has failed; else a stream of it is lost. True: it is the first failure
// of the device, for LogFailure.
bool GpuQueues::Fail(DeviceQueues& device, std::exception_ptr error, bool dead) {
  bool first = false;
  {
    const MutexLock lock(device.mutex);
    first = device.error == nullptr;
    if (first) device.error = std::move(error);
  }
  // Stored before anybody sees that an op of it has failed.
  if (dead) device.dead.store(true, std::memory_order_release);
  device.failed.store(true, std::memory_order_release);
  return first;
}

// Without any lock: a log sink may take its time, and wait for others.
void GpuQueues::LogFailure(int id, bool dead) {
  if (dead) {
    Log(LogLevel::kError, "gpu({}) has failed; all its ops fail from now on", id);
  } else {
    Log(LogLevel::kError, "gpu({}) waits for what never comes; it takes no more ops", id);
  }
}

// Nothing happens any more on the device; what the reaper knows of until now has happened.
void GpuQueues::Die(DeviceQueues& device, int id, std::exception_ptr error) {
  for (const auto& queue : device.queues) {
    queue->happened_alive_ = queue->happened_.load(std::memory_order_relaxed);
  }
  if (Fail(device, std::move(error), /*dead=*/true)) LogFailure(id, /*dead=*/true);
}

// Why the op `number` of `queue`, the oldest, may never end; null: it does.
std::exception_ptr GpuQueues::DoubtOf(GpuQueue& queue, std::uint64_t number, bool* certain) {
  const GpuQueue::Issued& issued = queue.At(number);
  if (issued.given_up != nullptr) {
    if (std::exception_ptr error = issued.given_up->error()) return error;
  }
  std::exception_ptr doubt;
  for (const GpuMark& mark : issued.waits) {
    if (!mark.on_device) continue;
    DeviceQueues& device = DeviceOf(*mark.queue);
    const std::uint64_t lost_from = mark.queue->lost_from_.load(std::memory_order_relaxed);
    const bool lost = lost_from != 0 && lost_from <= mark.number;
    if (lost) *certain = true;
    const bool died =
        device.dead.load(std::memory_order_relaxed) && mark.queue->happened_alive_ < mark.number;
    if (doubt == nullptr && (lost || died)) doubt = ErrorOf(device);
  }
  return doubt;
}

// The oldest op of `queue`, whose event has not happened, is not going to end: the stream is lost.
// False: it may end. *fails: that is the first failure of its device.
bool GpuQueues::Loses(GpuQueue& queue, std::uint64_t number, bool* fails) {
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
  *fails = Fail(DeviceOf(queue), ErrorOfWaiter(queue.device_, doubt), /*dead=*/false);
  return true;
}

// --- asking --------------------------------------------------------------------------------------

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
  Clock::time_point news = Clock::now();  // an op was issued or has happened, as far as was seen
  Clock::time_point looked_closely{};
  Clock::duration pause = kPauseMin;
  bool dozed = false;
  while (true) {
    while (true) {
      if (!dozed) {
        const Clock::time_point ends = Clock::now() + pause;
        while (Clock::now() < ends) {
          for (int i = 0; i < pauses; ++i) Pause();
        }
      }
      // By the clock: while some device always has news, others may have none to come.
      const Clock::time_point now = Clock::now();
      std::uint64_t issued = 0;
      if (unfinished_.load(std::memory_order_acquire) > 0) {
        const bool closely = now - looked_closely >= kLookCloselyEvery;
        if (closely) looked_closely = now;
        if (LookAtAll(closely, &issued) || issued > 0) {
          news = now;
          dozed = false;
        }
      }
      const auto places = static_cast<std::uint64_t>(options_.gpu.issued_ahead);
      if (issued == 0 || 2 * issued > places) {
        pause = std::max<Clock::duration>(issued == 0 ? kPauseMin : pause / 2, kPauseMin);
      } else if (4 * issued < places) {
        pause = std::min<Clock::duration>(2 * pause, kPauseMax);
      }
      if (dozed || now - news >= kAwakeFor) break;
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
    dozed = !woken;
    if (woken) news = Clock::now();
  }
}

// The reaper's look. True: something has happened or was finished. `*issued`: what was issued on
// one stream since the last one.
bool GpuQueues::LookAtAll(bool closely, std::uint64_t* issued) {
  const bool is_issued = issuers_.load(std::memory_order_relaxed) > 0;
  bool any = false;
  ForEach([&](GpuQueue& queue) {
    const std::uint64_t happened = queue.happened_.load(std::memory_order_relaxed);
    Ask(queue, Looker::kReaper);
    any = any || queue.happened_.load(std::memory_order_relaxed) != happened;
  });
  // Again, since an op may have waited for ops of a queue behind its own.
  for (bool more = true; more;) {
    more = false;
    ForEach([&](GpuQueue& queue) {
      // Who issues on it has only been told now.
      const bool is_busy = is_issued && queue.last_now_ != queue.last_seen_;
      const bool was_told = queue.happened_seen_ > queue.finished_.load(std::memory_order_relaxed);
      if (is_busy && !was_told && !closely) return;
      more = Finish(queue, closely) || more;
    });
    any = any || more;
  }
  ForEach([&](GpuQueue& queue) {
    if (is_issued) *issued = std::max(*issued, queue.last_now_ - queue.last_seen_);
    queue.last_seen_ = queue.last_now_;
    queue.happened_seen_ = queue.happened_.load(std::memory_order_relaxed);
  });
  return any;
}

bool GpuQueues::Look(GpuQueue& queue) {
  const std::uint64_t taken = queue.taken_.load(std::memory_order_relaxed);
  try {
    // Else the question would make a context on the thread's own device.
    const GpuDriver::Context outer = driver_->Enter(queue.device_);
    Ask(queue, Looker::kOther);
    driver_->Leave(outer);
  } catch (const Error&) {
    return false;  // the reaper finds out
  }
  FinishHappened(queue);
  return queue.taken_.load(std::memory_order_relaxed) != taken;
}

// The last op up to `number` that has an event, or 0: all up to there have none, and so are over.
std::uint64_t GpuQueues::LastToAsk(GpuQueue& queue, std::uint64_t number) {
  const std::uint64_t happened = queue.happened_.load(std::memory_order_relaxed);
  for (std::uint64_t i = number; i > happened; --i) {
    if (queue.At(i).has_event) return i;
  }
  RaiseTo(number, &queue.happened_);
  return 0;
}

// Finds out how far `queue` has come, by two questions at most. When they are answered by no, the
// reaper's next look goes farther back: to the oldest op after some looks.
void GpuQueues::Ask(GpuQueue& queue, Looker looker) {
  const bool is_reaper = looker == Looker::kReaper;
  std::uint64_t last = 0;
  std::uint64_t number = 0;
  bool by_lag = false;  // while ops are issued; else it may well have done all
  {
    const MutexLock lock(queue.mutex_);
    last = queue.last_;
    if (is_reaper) queue.last_now_ = last;
    const std::uint64_t happened = queue.happened_.load(std::memory_order_relaxed);
    if (last == happened || DeviceOf(queue).dead.load(std::memory_order_relaxed)) return;
    by_lag = is_reaper && last != queue.last_seen_;
    number = LastToAsk(queue, last - (by_lag ? std::min(queue.lag_, last - happened - 1) : 0));
  }
  if (number == 0) return;
  // Without the lock, which issuing takes. Should the op finish meanwhile, and its event be
  // recorded again, the answer is no, and another one is not needed.
  GpuDriver::State state = driver_->Query(queue.EventOf(number));
  if (state.error == nullptr && !state.happened) {
    std::uint64_t first = 0;
    {
      const MutexLock lock(queue.mutex_);
      first = queue.happened_.load(std::memory_order_relaxed) + 1;
      if (first >= number) return;
      std::uint64_t earlier = is_reaper ? first + (number - first) / 2 : first;
      if (is_reaper && !by_lag)
        earlier = std::min(earlier, last - std::min(queue.lag_, last - first));
      number = LastToAsk(queue, earlier);
    }
    if (number == 0) return;
    state = driver_->Query(queue.EventOf(number));
    if (is_reaper && state.error == nullptr && !state.happened) {
      queue.lag_ = last - (first + (number - first) / 2);
    }
  } else if (by_lag && queue.lag_ > 0) {
    --queue.lag_;
  }
  if (state.error != nullptr) {
    if (is_reaper) FindFailed(queue);
  } else if (state.happened) {
    NoteHappened(queue, number);
  }
}

// The device of `queue` has failed: what has it done before?
void GpuQueues::FindFailed(GpuQueue& queue) {
  while (true) {
    std::uint64_t number = 0;
    {
      const MutexLock lock(queue.mutex_);
      const std::uint64_t happened = queue.happened_.load(std::memory_order_relaxed);
      if (happened == queue.last_) return;
      number = happened + 1;
      if (LastToAsk(queue, number) == 0) continue;
    }
    const GpuDriver::State state = driver_->Query(queue.EventOf(number));
    if (state.error != nullptr) return Die(DeviceOf(queue), queue.device_, state.error);
    if (!state.happened) return;
    NoteHappened(queue, number);
  }
}

// The events up to `number` have happened, and those of their device that they waited for. Those of
// another one that has failed since may be taken for happened by the driver.
void GpuQueues::NoteHappened(GpuQueue& queue, std::uint64_t number) {
  const MutexLock lock(queue.mutex_);
  for (std::uint64_t i = queue.happened_.load(std::memory_order_relaxed) + 1; i <= number; ++i) {
    for (const GpuMark& mark : queue.At(i).waits) {
      GpuQueue& other = *mark.queue;
      if (mark.on_device && other.device_ == queue.device_) RaiseTo(mark.number, &other.happened_);
    }
  }
  RaiseTo(number, &queue.happened_);
}

// Several threads may know of some at a time, and one of them of more.
void GpuQueues::RaiseTo(std::uint64_t number, std::atomic<std::uint64_t>* happened) noexcept {
  std::uint64_t known = happened->load(std::memory_order_relaxed);
  while (known < number &&
         !happened->compare_exchange_weak(known, number, std::memory_order_release,
                                          std::memory_order_relaxed)) {
  }
}

// --- finishing -----------------------------------------------------------------------------------

// Is the oldest op of `queue` over? `closely`, the reaper alone: or can it never be, see Loses?
bool GpuQueues::IsOver(GpuQueue& queue, std::uint64_t number, bool closely, bool* fails) {
  GpuQueue::Issued& front = queue.At(number);
  for (const GpuMark& mark : front.waits) {
    if (!mark.queue->HasFinished(mark.number)) return false;  // G2
  }
  return !front.has_event || queue.happened_.load(std::memory_order_acquire) >= number ||
         NeverHappens(queue) || (closely && Loses(queue, number, fails));
}

// Takes down what the body of an op captured: memory that the device may have been using until now.
// As a part of the op, whatever thread this is (G6): what it pushes are the op's children, which
// keeps Stop and WaitForAll, and waits for no room, which the ops behind this one may have taken;
// nor does it run here. Waits throw.
void GpuQueues::TakeDown(AsyncState* async, void* body, std::exception_ptr* error) {
  internal::Op* const op = async->op;
  ThreadContext& context = tls_context;
  const ThreadContext outer = context;
  context.core = async->core;
  context.op = op;
  context.children = 0;
  context.after_body = true;
  const bool finishes = *error == nullptr;
  try {
    op->function(body, finishes ? internal::BodyAction::kFinish : internal::BodyAction::kDrop,
                 async);
  } catch (...) {
    *error = std::current_exception();
  }
  async->children = static_cast<std::uint32_t>(context.children);
  context = outer;
}

// Finishes the ops of `queue` that are over, from the oldest on. False: there is none, or another
// thread is at it.
bool GpuQueues::Finish(GpuQueue& queue, bool closely) {
  bool fails = false;
  const bool any = FinishThoseOver(queue, closely, &fails);
  if (fails) LogFailure(queue.device_, /*dead=*/false);
  return any;
}

bool GpuQueues::FinishThoseOver(GpuQueue& queue, bool closely, bool* fails) {
  DeviceQueues& device = DeviceOf(queue);
  bool any = false;
  while (true) {
    std::uint64_t number = 0;
    AsyncState* async = nullptr;
    void* body = nullptr;
    std::exception_ptr error;
    std::shared_ptr<const GivenUp> given_up;  // goes when the lock is free
    {
      const MutexLock lock(queue.mutex_);
      if (queue.finishing_ && !any) return false;
      number = queue.taken_.load(std::memory_order_relaxed) + 1;
      queue.finishing_ = number <= queue.last_ && IsOver(queue, number, closely, fails);
      if (!queue.finishing_) return any;
      GpuQueue::Issued& front = queue.At(number);
      error = std::exchange(front.error, nullptr);
      const bool happened = queue.happened_.load(std::memory_order_relaxed) >= number;
      if (error == nullptr && !happened && NeverHappens(queue)) error = ErrorOf(device);
      async = std::exchange(front.async, nullptr);
      body = front.body;
      given_up = std::move(front.given_up);
      RaiseTo(number, &queue.happened_);
      queue.taken_.store(number, std::memory_order_relaxed);
    }
    any = true;
    unfinished_.fetch_sub(1, std::memory_order_relaxed);
    TakeDown(async, body, &error);
    internal::CompleteAsync(async, std::move(error));
    queue.finished_.store(number, std::memory_order_release);
  }
}

}  // namespace heddle::engine
