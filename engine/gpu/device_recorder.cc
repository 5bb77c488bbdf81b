#include "engine/gpu/device_recorder.h"

namespace heddle::engine {

DeviceRecorder::~DeviceRecorder() {
  const MutexLock lock(mutex_);
  for (const auto& session : sessions_) {
    if (session->trace != nullptr) session->trace->Stop();
  }
}

DeviceRecorder::Session* DeviceRecorder::FindLocked(const TraceWriter& writer) {
  for (const auto& session : sessions_) {
    if (&session->writer == &writer) return session.get();
  }
  return nullptr;
}

internal::DeviceTrace* DeviceRecorder::For(TraceWriter& writer) noexcept {
  Session* session = last_.load(std::memory_order_acquire);
  if (session == nullptr || &session->writer != &writer) {
    const MutexLock lock(mutex_);
    session = FindLocked(writer);
    if (session == nullptr) {
      auto fresh = std::make_unique<Session>(writer);
      fresh->trace = driver_->TraceDevices(*fresh);
      session = sessions_.emplace_back(std::move(fresh)).get();
      last_.store(session, std::memory_order_release);
    }
  }
  return session->trace.get();
}

void DeviceRecorder::Stop(TraceWriter& writer) noexcept {
  const MutexLock lock(mutex_);
  if (const Session* session = FindLocked(writer)) {
    if (session->trace != nullptr) session->trace->Stop();
  } else {
    // Whoever still holds the writer and asks for it late finds this.
    sessions_.push_back(std::make_unique<Session>(writer));
  }
}

}  // namespace heddle::engine
