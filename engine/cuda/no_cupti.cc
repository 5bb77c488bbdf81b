// CUPTI's place in a build without its header.
#include <mutex>

#include "base/log.h"
#include "engine/cuda/cupti_trace.h"

namespace heddle::internal {

std::unique_ptr<DeviceTrace> TraceByCupti(DeviceWorkSink& /*sink*/) noexcept {
  static std::once_flag once;
  std::call_once(once, [] {
    Log(LogLevel::kWarning, "traces have no times of devices: built without CUPTI");
  });
  return nullptr;
}

}  // namespace heddle::internal
