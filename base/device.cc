#include <heddle/device.h>
#include <heddle/error.h>

#include <cstdint>
#include <string>

#include <fmt/format.h>

#include "base/check.h"

namespace heddle {
namespace {

const char* TypeName(DeviceType type) {
  switch (type) {
    case DeviceType::kCpu:
      return "cpu";
    case DeviceType::kCpuPinned:
      return "cpu_pinned";
    case DeviceType::kGpu:
      return "gpu";
  }
  CHECK(false, "device type {}", static_cast<int>(type));
}

}  // namespace

void internal::ThrowDeviceId(int id) {
  throw InvalidArgument(fmt::format("device id: expected 0 to {}, got {}", INT16_MAX, id));
}

std::string ToString(Device device) {
  return std::string(TypeName(device.type)) + "(" + std::to_string(device.id) + ")";
}

}  // namespace heddle
