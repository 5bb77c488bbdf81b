// Devices that ops run on and arrays live on.
#pragma once

#include <cstdint>
#include <string>

namespace heddle {

enum class DeviceType : std::uint8_t { kCpu, kCpuPinned, kGpu };

// A place for values and ops. cpu(i) are logical devices of one machine: any i up to 32767 is
// valid, all of them share its memory and the engine's workers.
struct Device {
  DeviceType type = DeviceType::kCpu;
  std::int16_t id = 0;

  friend bool operator==(const Device&, const Device&) = default;
};

namespace internal {

[[noreturn]] void ThrowDeviceId(int id);

// Negative ids are refused by whatever takes a device, which has more to say about it.
constexpr std::int16_t DeviceId(int id) {
  if (id < INT16_MIN || id > INT16_MAX) ThrowDeviceId(id);
  return static_cast<std::int16_t>(id);
}

}  // namespace internal

// Throw InvalidArgument beyond that.
constexpr Device Cpu(int id = 0) { return {DeviceType::kCpu, internal::DeviceId(id)}; }
constexpr Device CpuPinned(int id = 0) { return {DeviceType::kCpuPinned, internal::DeviceId(id)}; }
constexpr Device Gpu(int id = 0) { return {DeviceType::kGpu, internal::DeviceId(id)}; }

// "cpu(0)", "cpu_pinned(0)", "gpu(1)".
std::string ToString(Device device);

}  // namespace heddle
