// Devices that ops run on and arrays live on.
#pragma once

#include <cstdint>
#include <string>

namespace heddle {

enum class DeviceType : std::uint8_t { kCpu, kCpuPinned, kGpu };

// A place for values and ops. cpu(i) are logical devices of one machine: any i >= 0 is valid, all
// of them share its memory and the engine's workers.
struct Device {
  DeviceType type = DeviceType::kCpu;
  std::int16_t id = 0;

  friend bool operator==(const Device&, const Device&) = default;
};

constexpr Device Cpu(int id = 0) { return {DeviceType::kCpu, static_cast<std::int16_t>(id)}; }
constexpr Device CpuPinned(int id = 0) {
  return {DeviceType::kCpuPinned, static_cast<std::int16_t>(id)};
}
constexpr Device Gpu(int id = 0) { return {DeviceType::kGpu, static_cast<std::int16_t>(id)}; }

// "cpu(0)", "cpu_pinned(0)", "gpu(1)".
std::string ToString(Device device);

}  // namespace heddle
