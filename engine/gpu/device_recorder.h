// Puts what devices did into the traces of an engine.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "engine/gpu/device_trace.h"
#include "engine/gpu/driver.h"
#include "engine/trace.h"

namespace heddle::engine {

// Threads: all methods, any thread.
class DeviceRecorder {
 public:
  explicit DeviceRecorder(std::shared_ptr<internal::GpuDriver> driver)
      : driver_(std::move(driver)) {}
  ~DeviceRecorder();  // before the writers

  // Watches the devices for `writer`, from the first call for it on. Null: the driver cannot, which
  // it has logged, or Stop came first. What is returned lives as long as the recorder.
  internal::DeviceTrace* For(TraceWriter& writer) noexcept;
  // Nothing more comes to `writer` after this.
  void Stop(TraceWriter& writer) noexcept;

 private:
  struct Session final : internal::DeviceWorkSink {
    explicit Session(TraceWriter& to) : writer(to) {}
    void OnWork(const internal::DeviceWork& work) noexcept override { writer.OnWork(work); }

    TraceWriter& writer;
    std::unique_ptr<internal::DeviceTrace> trace;  // constant once the session is in the list
  };

  Session* FindLocked(const TraceWriter& writer) REQUIRES(mutex_);

  const std::shared_ptr<internal::GpuDriver> driver_;
  Mutex mutex_;
  std::vector<std::unique_ptr<Session>> sessions_ GUARDED_BY(mutex_);
  // The newest. release; pairs with the acquire in For
  std::atomic<Session*> last_{nullptr};
};

}  // namespace heddle::engine
