#include <heddle/device.h>

#include <string>

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

std::string ToString(Device device) {
  return std::string(TypeName(device.type)) + "(" + std::to_string(device.id) + ")";
}

}  // namespace heddle
