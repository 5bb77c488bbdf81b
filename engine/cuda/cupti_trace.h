// What CUDA's devices do, by CUPTI.
#pragma once

#include <memory>

#include "engine/gpu/device_trace.h"

namespace heddle::internal {

// Null if CUPTI is not there or refuses, because another profiler is attached, say; the log says
// why, once.
std::unique_ptr<DeviceTrace> TraceByCupti(DeviceWorkSink& sink) noexcept;

}  // namespace heddle::internal
