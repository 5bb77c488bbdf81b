// The one list of allocators, sorted by name, and the process-wide allocators made from it.
#include <heddle/error.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/env.h"
#include "base/mutex.h"
#include "engine/fork.h"
#include "storage/allocator.h"
#include "storage/gpus.h"

namespace heddle::storage {

std::unique_ptr<Allocator> MakePoolAllocator(std::int64_t bytes_max);    // pool_allocator.cc
std::unique_ptr<Allocator> MakeSystemAllocator(std::int64_t bytes_max);  // system_allocator.cc

namespace {

struct AllocatorEntry {
  std::string_view name;
  std::unique_ptr<Allocator> (*make)(std::int64_t bytes_max);
};
constexpr std::array kAllocators = {AllocatorEntry{"pool", &MakePoolAllocator},
                                    AllocatorEntry{"system", &MakeSystemAllocator}};

const AllocatorEntry& CheckOptions(const MemoryOptions& options) {
  if (options.bytes_max < 1) {
    throw InvalidArgument(
        fmt::format("expected a memory cap of at least 1 byte, got {}", options.bytes_max));
  }
  for (const AllocatorEntry& entry : kAllocators) {
    if (entry.name == options.allocator) return entry;
  }
  throw InvalidArgument(fmt::format("expected an allocator (one of {}), got '{}'",
                                    fmt::join(AllocatorNames(), ", "), options.allocator));
}

// Refuses what is no type, and children of fork(), in which a lock may be held for ever.
void CheckCall(const char* call, DeviceType type) {
  engine::CheckNotForked(call);
  CheckDeviceType(type);
}

// The allocator of the CPUs: made once, by the first array that needs memory or by ConfigureMemory.
struct CpuMemory {
  Mutex mutex;
  std::atomic<Allocator*> allocator{nullptr};  // written under mutex, once; never deleted
  std::string name GUARDED_BY(mutex);

  void MakeLocked(const MemoryOptions& options) REQUIRES(mutex) {
    Allocator* const made = MakeAllocator(options).release();
    name = options.allocator;
    allocator.store(made, std::memory_order_release);  // pairs with the acquire in CpuAllocator
  }
};

CpuMemory& TheCpuMemory() {
  static auto* const memory = new CpuMemory;  // never deleted, see CpuAllocator
  return *memory;
}

}  // namespace

std::vector<std::string> AllocatorNames() {
  std::vector<std::string> names;
  for (const AllocatorEntry& entry : kAllocators) names.emplace_back(entry.name);
  return names;
}

std::unique_ptr<Allocator> MakeAllocator(const MemoryOptions& options) {
  return CheckOptions(options).make(options.bytes_max);
}

void CheckMemoryOptions(const MemoryOptions& options) { CheckOptions(options); }

Allocator& CpuAllocator() {
  CpuMemory& memory = TheCpuMemory();
  Allocator* const made = memory.allocator.load(std::memory_order_acquire);
  if (made != nullptr) return *made;
  MutexLock lock(memory.mutex);
  if (memory.allocator.load(std::memory_order_relaxed) == nullptr) {
    memory.MakeLocked(MemoryOptions::FromEnvironment(DeviceType::kCpu));
  }
  return *memory.allocator.load(std::memory_order_relaxed);
}

}  // namespace heddle::storage

namespace heddle {

MemoryOptions MemoryOptions::FromEnvironment(DeviceType type) {
  static constexpr std::array<std::array<const char*, 2>, 3> kVariables = {
      {{"HEDDLE_CPU_ALLOCATOR", "HEDDLE_CPU_MEMORY_MAX"},
       {"HEDDLE_PINNED_ALLOCATOR", "HEDDLE_PINNED_MEMORY_MAX"},
       {"HEDDLE_GPU_ALLOCATOR", "HEDDLE_GPU_MEMORY_MAX"}}};
  const auto& [allocator, bytes_max] = kVariables[static_cast<std::size_t>(type)];
  MemoryOptions options;
  EnvReader env;
  env.Read([&, name = allocator] {
    options.allocator = EnvString(name, options.allocator);
    const std::vector<std::string> names = storage::AllocatorNames();
    if (std::find(names.begin(), names.end(), options.allocator) == names.end()) {
      throw InvalidArgument(fmt::format("environment variable {}: expected one of {}, given '{}'",
                                        name, fmt::join(names, ", "), options.allocator));
    }
  });
  env.Read([&, name = bytes_max] { options.bytes_max = EnvInt(name, options.bytes_max, 1); });
  env.ThrowIfAnyIsWrong();
  return options;
}

void ConfigureMemory(DeviceType type, const MemoryOptions& options) {
  storage::CheckCall("ConfigureMemory", type);
  if (type != DeviceType::kCpu) {
    storage::Gpus::Default().Configure(type, options);
    return;
  }
  storage::CpuMemory& memory = storage::TheCpuMemory();
  MutexLock lock(memory.mutex);
  storage::Allocator* const made = memory.allocator.load(std::memory_order_relaxed);
  if (made == nullptr) {
    memory.MakeLocked(options);
    return;
  }
  storage::CheckOptions(options);
  if (options.allocator != memory.name) {
    throw InvalidState(fmt::format("array memory already comes from allocator '{}', got '{}'",
                                   memory.name, options.allocator));
  }
  made->set_bytes_max(options.bytes_max);
}

MemoryStats GetMemoryStats(DeviceType type) {
  storage::CheckCall("GetMemoryStats", type);
  return type == DeviceType::kCpu ? storage::CpuAllocator().stats()
                                  : storage::Gpus::Default().Stats(type);
}

MemoryStats GetMemoryStats(Device device) {
  storage::CheckCall("GetMemoryStats", device.type);
  if (device.type == DeviceType::kCpu) return storage::CpuAllocator().stats();
  storage::Gpus& gpus = storage::Gpus::Default();
  gpus.Check(device);
  return gpus.Pool(device).stats();
}

std::int64_t TrimMemory(DeviceType type) {
  storage::CheckCall("TrimMemory", type);
  return type == DeviceType::kCpu ? storage::CpuAllocator().Trim()
                                  : storage::Gpus::Default().Trim(type);
}

}  // namespace heddle
