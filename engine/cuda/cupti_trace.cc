// CUPTI as it is installed, found when a trace first wants it: programs start where there is none.
//
// DESIGN. CUPTI has one set of callbacks a process, so one CuptiTracer serves the traces of all
// engines. What an op's body calls is marked with an external correlation id: the trace's number
// and the op. CUPTI writes records of calls, of these marks and of work into buffers, and hands
// them over when they are full or flushed; a thread flushes, so that little is missing where the
// process is killed. Times: CUPTI converts those of a device to the clock that it is given, which
// is ours.
#include "engine/cuda/cupti_trace.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>

#include <cupti.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mutex.h"
#include "engine/gpu/work_matcher.h"

namespace heddle::internal {
namespace {

// Where the loader looks, LD_LIBRARY_PATH included, then the file that heddle was built with. The
// libraries of one major version begin their records alike.
constexpr const char* kFiles[] = {HEDDLE_CUPTI_NAME, HEDDLE_CUPTI_FILE};

constexpr std::size_t kBufferBytes = std::size_t{64} * 1024;
constexpr std::chrono::milliseconds kFlushEvery{100};
// An external correlation id: the number of the trace above, the op below.
constexpr int kOpBits = 48;
constexpr std::uint64_t kOpMask = (std::uint64_t{1} << kOpBits) - 1;

constexpr CUpti_ActivityKind kKinds[] = {CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION,
                                         CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                         CUPTI_ACTIVITY_KIND_MEMCPY,
                                         CUPTI_ACTIVITY_KIND_MEMCPY2,
                                         CUPTI_ACTIVITY_KIND_MEMSET,
                                         CUPTI_ACTIVITY_KIND_RUNTIME,
                                         CUPTI_ACTIVITY_KIND_DRIVER};

void* OpenLibrary() {
  std::string why;
  for (const char* file : kFiles) {
    if (void* library = dlopen(file, RTLD_NOW | RTLD_LOCAL)) return library;  // never closed
    why += fmt::format("{}{}", why.empty() ? "" : "; ", dlerror());
  }
  throw std::runtime_error(fmt::format("CUPTI is not there: {}", why));
}

std::uint64_t SteadyClock() { return static_cast<std::uint64_t>(SteadyNowNs()); }

// The functions of the library. Errors: std::runtime_error.
class Cupti {
 public:
  void Check(CUptiResult result, const char* call) const {
    if (result == CUPTI_SUCCESS) return;
    const char* text = nullptr;
    get_result_string_(result, &text);
    throw std::runtime_error(fmt::format("{}: {}", call, text != nullptr ? text : "unknown error"));
  }

 private:
  template <class Function>
  Function* Find(const char* name) {
    void* const symbol = dlsym(library_, name);
    if (symbol != nullptr) return reinterpret_cast<Function*>(symbol);
    throw std::runtime_error(fmt::format("CUPTI is too old: it has no {}", name));
  }

  void* const library_ = OpenLibrary();

 public:
  // With the types of cupti.h.
#define HEDDLE_CUPTI(function) Find<decltype(function)>(#function)
  decltype(&cuptiGetResultString) get_result_string_ = HEDDLE_CUPTI(cuptiGetResultString);
  decltype(&cuptiSubscribe) subscribe = HEDDLE_CUPTI(cuptiSubscribe);
  decltype(&cuptiUnsubscribe) unsubscribe = HEDDLE_CUPTI(cuptiUnsubscribe);
  decltype(&cuptiActivityRegisterCallbacks) register_callbacks =
      HEDDLE_CUPTI(cuptiActivityRegisterCallbacks);
  decltype(&cuptiActivityRegisterTimestampCallback) register_clock =
      HEDDLE_CUPTI(cuptiActivityRegisterTimestampCallback);
  decltype(&cuptiActivityEnable) enable = HEDDLE_CUPTI(cuptiActivityEnable);
  decltype(&cuptiActivityDisable) disable = HEDDLE_CUPTI(cuptiActivityDisable);
  decltype(&cuptiActivityEnableRuntimeApi) enable_runtime_call =
      HEDDLE_CUPTI(cuptiActivityEnableRuntimeApi);
  decltype(&cuptiActivityEnableDriverApi) enable_driver_call =
      HEDDLE_CUPTI(cuptiActivityEnableDriverApi);
  decltype(&cuptiActivityFlushAll) flush = HEDDLE_CUPTI(cuptiActivityFlushAll);
  decltype(&cuptiActivityGetNextRecord) next_record = HEDDLE_CUPTI(cuptiActivityGetNextRecord);
  decltype(&cuptiActivityPushExternalCorrelationId) push =
      HEDDLE_CUPTI(cuptiActivityPushExternalCorrelationId);
  decltype(&cuptiActivityPopExternalCorrelationId) pop =
      HEDDLE_CUPTI(cuptiActivityPopExternalCorrelationId);
#undef HEDDLE_CUPTI
};

class CuptiTracer {
 public:
  // Throws std::runtime_error if CUPTI is not there. Never deleted: engines may be static objects.
  static CuptiTracer& One() {
    static auto* const tracer = new CuptiTracer;
    return *tracer;
  }

  // Returns the trace's number. Throws std::runtime_error if CUPTI refuses.
  std::uint64_t Start(DeviceWorkSink& sink) {
    const MutexLock control(control_mutex_);
    if (running_ == 0) Enable();
    ++running_;
    const MutexLock lock(mutex_);
    const std::uint64_t number = ++last_number_ & (~std::uint64_t{0} >> kOpBits);
    sinks_[number] = &sink;
    return number;
  }

  void Stop(std::uint64_t number) noexcept {
    const MutexLock control(control_mutex_);
    // With the records of what is not done yet in the buffers, unless others still want them.
    cupti_.flush(running_ == 1 ? CUPTI_ACTIVITY_FLAG_FLUSH_FORCED : 0);
    {
      const MutexLock lock(mutex_);
      sinks_.erase(number);
    }
    if (--running_ == 0) Disable();
  }

  const Cupti& cupti() const { return cupti_; }

 private:
  void Enable() REQUIRES(control_mutex_) {
    // One subscriber at a time: this finds other profilers, and keeps them away.
    cupti_.Check(cupti_.subscribe(&subscriber_, &OnCall, nullptr), "cuptiSubscribe");
    try {
      cupti_.Check(cupti_.register_callbacks(&OnBufferWanted, &OnBufferFull),
                   "cuptiActivityRegisterCallbacks");
      cupti_.Check(cupti_.register_clock(&SteadyClock), "cuptiActivityRegisterTimestampCallback");
      for (const CUpti_ActivityKind kind : kKinds) {
        cupti_.Check(cupti_.enable(kind), "cuptiActivityEnable");
      }
      // Calls are recorded for their marks only. The reaper asks for events all the time, and every
      // op enters a device and asks what its launches have reported.
      for (const CUpti_CallbackId call : {CUPTI_RUNTIME_TRACE_CBID_cudaEventQuery_v3020,
                                          CUPTI_RUNTIME_TRACE_CBID_cudaGetLastError_v3020,
                                          CUPTI_RUNTIME_TRACE_CBID_cudaGetDevice_v3020}) {
        cupti_.Check(cupti_.enable_runtime_call(call, 0), "cuptiActivityEnableRuntimeApi");
      }
      for (const CUpti_CallbackId call :
           {CUPTI_DRIVER_TRACE_CBID_cuEventQuery, CUPTI_DRIVER_TRACE_CBID_cuCtxGetCurrent,
            CUPTI_DRIVER_TRACE_CBID_cuCtxSetCurrent,
            CUPTI_DRIVER_TRACE_CBID_cuThreadExchangeStreamCaptureMode}) {
        cupti_.Check(cupti_.enable_driver_call(call, 0), "cuptiActivityEnableDriverApi");
      }
      {
        const MutexLock lock(mutex_);
        flusher_stop_ = false;
      }
      flusher_ = std::thread([this] { Flush(); });
    } catch (...) {
      DisableKinds();
      throw;
    }
  }
  void Disable() noexcept REQUIRES(control_mutex_) {
    {
      const MutexLock lock(mutex_);
      flusher_stop_ = true;
    }
    flusher_wake_.NotifyAll();
    flusher_.join();
    DisableKinds();
  }
  void DisableKinds() noexcept REQUIRES(control_mutex_) {
    for (const CUpti_ActivityKind kind : kKinds) cupti_.disable(kind);
    cupti_.unsubscribe(subscriber_);
  }

  void Flush() {
    while (true) {
      {
        const MutexLock lock(mutex_);
        if (!flusher_stop_) {
          flusher_wake_.WaitUntil(mutex_, std::chrono::steady_clock::now() + kFlushEvery);
        }
        if (flusher_stop_) return;
      }
      cupti_.flush(0);
    }
  }

  static void OnCall(void*, CUpti_CallbackDomain, CUpti_CallbackId, const void*) {}
  static void OnBufferWanted(std::uint8_t** buffer, std::size_t* bytes, std::size_t* records_max) {
    *buffer = static_cast<std::uint8_t*>(std::malloc(kBufferBytes));
    *bytes = *buffer != nullptr ? kBufferBytes : 0;
    *records_max = 0;  // as many as fit
  }
  static void OnBufferFull(CUcontext, std::uint32_t, std::uint8_t* buffer, std::size_t,
                           std::size_t bytes) {
    if (bytes > 0) One().TakeRecords(buffer, bytes);
    std::free(buffer);
  }

  void TakeRecords(std::uint8_t* buffer, std::size_t bytes) {
    const MutexLock lock(mutex_);
    CUpti_Activity* record = nullptr;
    while (cupti_.next_record(buffer, bytes, &record) == CUPTI_SUCCESS) {
      try {
        TakeLocked(*record);
      } catch (const std::bad_alloc&) {
        return;  // the trace lacks what is left
      }
    }
  }

  void TakeLocked(const CUpti_Activity& record) REQUIRES(mutex_) {
    const auto emit = [this](const DeviceWork& work) {
      mutex_.AssertHeld();
      Give(work);
    };
    switch (record.kind) {
      case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: {
        const auto& mark = reinterpret_cast<const CUpti_ActivityExternalCorrelation&>(record);
        if (mark.externalKind != CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0) return;
        return matcher_.OnCall(mark.correlationId, mark.externalId, emit);
      }
      case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
        const auto& kernel = reinterpret_cast<const CUpti_ActivityKernel8&>(record);
        DeviceWork work = WorkOf(kernel, DeviceWork::Kind::kKernel);
        work.name = kernel.name;  // one for all records of a kernel
        return matcher_.OnWork(kernel.correlationId, work, emit);
      }
      case CUPTI_ACTIVITY_KIND_MEMCPY:
        return Match(reinterpret_cast<const CUpti_ActivityMemcpy5&>(record),
                     DeviceWork::Kind::kCopy, emit);
      case CUPTI_ACTIVITY_KIND_MEMCPY2:
        return Match(reinterpret_cast<const CUpti_ActivityMemcpyPtoP4&>(record),
                     DeviceWork::Kind::kCopy, emit);
      case CUPTI_ACTIVITY_KIND_MEMSET:
        return Match(reinterpret_cast<const CUpti_ActivityMemset4&>(record),
                     DeviceWork::Kind::kFill, emit);
      default:
        return;
    }
  }

  template <class Record>
  static DeviceWork WorkOf(const Record& record, DeviceWork::Kind kind) {
    return {.started_ns = record.start,
            .ended_ns = record.end,
            .kind = kind,
            .device = static_cast<int>(record.deviceId),
            .stream = record.streamId};
  }
  template <class Record, class Emit>
  void Match(const Record& record, DeviceWork::Kind kind, const Emit& emit) REQUIRES(mutex_) {
    DeviceWork work = WorkOf(record, kind);
    work.bytes = record.bytes;
    matcher_.OnWork(record.correlationId, work, emit);
  }

  void Give(DeviceWork work) REQUIRES(mutex_) {
    if (work.started_ns == 0 || work.ended_ns == 0) return;  // it was not done when it was flushed
    const auto sink = sinks_.find(work.op >> kOpBits);
    if (sink == sinks_.end()) return;
    work.op &= kOpMask;
    sink->second->OnWork(work);
  }

  const Cupti cupti_{};
  Mutex control_mutex_;  // one Start or Stop at a time; taken before mutex_
  int running_ GUARDED_BY(control_mutex_) = 0;
  CUpti_SubscriberHandle subscriber_ GUARDED_BY(control_mutex_) = nullptr;
  std::thread flusher_ GUARDED_BY(control_mutex_);

  Mutex mutex_;  // CUPTI is not called under it, but for the records of a buffer
  std::map<std::uint64_t, DeviceWorkSink*> sinks_ GUARDED_BY(mutex_);
  std::uint64_t last_number_ GUARDED_BY(mutex_) = 0;
  engine::WorkMatcher matcher_ GUARDED_BY(mutex_);
  CondVar flusher_wake_;
  bool flusher_stop_ GUARDED_BY(mutex_) = false;
};

class CuptiTrace final : public DeviceTrace {
 public:
  explicit CuptiTrace(DeviceWorkSink& sink) : number_(CuptiTracer::One().Start(sink)) {}
  ~CuptiTrace() override { Stop(); }

  void Begin(std::uint64_t op) noexcept override {
    if (stopped_.load(std::memory_order_relaxed)) return;
    marked = CuptiTracer::One().cupti().push(CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0,
                                             number_ << kOpBits | (op & kOpMask)) == CUPTI_SUCCESS;
  }
  void End() noexcept override {
    if (!marked) return;
    std::uint64_t id = 0;
    CuptiTracer::One().cupti().pop(CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, &id);
    marked = false;
  }
  void Stop() noexcept override {
    if (!stopped_.exchange(true, std::memory_order_relaxed)) CuptiTracer::One().Stop(number_);
  }

 private:
  static thread_local bool marked;  // between Begin and End
  const std::uint64_t number_;
  std::atomic<bool> stopped_{false};
};

thread_local bool CuptiTrace::marked = false;

}  // namespace

std::unique_ptr<DeviceTrace> TraceByCupti(DeviceWorkSink& sink) noexcept {
  try {
    return std::make_unique<CuptiTrace>(sink);
  } catch (const std::exception& error) {
    static std::atomic<bool> said{false};
    if (!said.exchange(true, std::memory_order_relaxed)) {
      Log(LogLevel::kWarning, "traces have no times of devices: {}", error.what());
    }
    return nullptr;
  }
}

}  // namespace heddle::internal
