#include "storage/gpus.h"

#include <heddle/error.h>

#include <algorithm>

#include <fmt/format.h>

#include "storage/device_pool.h"

namespace heddle::storage {

using internal::GpuDriver;

namespace {

class DeviceSource final : public BlockSource {
 public:
  DeviceSource(GpuDriver& driver, int device) : driver_(driver), device_(device) {}
  void* Take(std::int64_t bytes) override { return driver_.AllocateDevice(device_, bytes); }
  void Return(void* block) noexcept override { driver_.FreeDevice(device_, block); }
  void Trim() noexcept override { driver_.TrimDevice(device_); }

 private:
  GpuDriver& driver_;
  const int device_;
};

class PinnedSource final : public BlockSource {
 public:
  PinnedSource(GpuDriver& driver, int near) : driver_(driver), near_(near) {}
  void* Take(std::int64_t bytes) override { return driver_.AllocatePinned(near_, bytes); }
  void Return(void* block) noexcept override { driver_.FreePinned(near_, block); }
  void Trim() noexcept override {}

 private:
  GpuDriver& driver_;
  const int near_;
};

// The drivers of tests, which come and go. Entries whose driver is gone go with the next newcomer.
struct OtherGpus {
  std::weak_ptr<GpuDriver> driver;
  std::unique_ptr<Gpus> gpus;
};
struct Others {
  Mutex mutex;
  std::vector<OtherGpus> list GUARDED_BY(mutex);
};

Gpus& GpusOf(const std::shared_ptr<GpuDriver>& driver) {
  static auto* const others = new Others;  // never deleted: arrays may be dropped at the very end
  const MutexLock lock(others->mutex);
  for (const OtherGpus& other : others->list) {
    if (other.driver.lock() == driver) return *other.gpus;
  }
  std::erase_if(others->list, [](const OtherGpus& other) { return other.driver.expired(); });
  others->list.push_back({driver, std::make_unique<Gpus>(*driver)});
  return *others->list.back().gpus;
}

}  // namespace

Gpus::Gpus(GpuDriver& driver)
    : driver_(driver),
      own_kernels_(dynamic_cast<const ops::GpuKernels*>(&driver)),
      own_row_kernels_(dynamic_cast<const ops::GpuRowKernels*>(&driver)) {
  for (auto& pools : pools_) pools.resize(static_cast<std::size_t>(driver.device_count()));
}

Gpus& Gpus::Default() {
  static auto* const gpus = new Gpus(*internal::DefaultGpuDriver());  // never deleted, as above
  return *gpus;
}

Gpus& Gpus::Of(const Engine& engine) {
  const std::shared_ptr<GpuDriver>& driver = engine.options().gpu_driver;
  return driver == nullptr ? Default() : GpusOf(driver);
}

const ops::GpuKernels& Gpus::kernels() const {
  return own_kernels_ != nullptr ? *own_kernels_ : ops::CudaKernels();
}

const ops::GpuRowKernels& Gpus::row_kernels() const {
  return own_row_kernels_ != nullptr ? *own_row_kernels_ : ops::CudaRowKernels();
}

void Gpus::Check(Device device) const {
  if (device.id >= 0 && device.id < driver_.device_count()) return;
  const std::string why = driver_.WhyNoGpu(device.id);
  throw InvalidArgument(device.type == DeviceType::kGpu
                            ? fmt::format("expected a device that is there, got {}", why)
                            : fmt::format("expected a device that is there, got {}, pinned memory "
                                          "for copies to a GPU: {}",
                                          ToString(device), why));
}

Allocator& Gpus::Pool(Device device) {
  const auto type = static_cast<std::size_t>(device.type);
  const MutexLock lock(mutex_);
  std::unique_ptr<Allocator>& pool = pools_[type][static_cast<std::size_t>(device.id)];
  if (pool == nullptr) {
    const MemoryOptions options =
        options_[type] != nullptr ? *options_[type] : MemoryOptions::FromEnvironment(device.type);
    std::unique_ptr<BlockSource> source;
    if (device.type == DeviceType::kGpu) {
      source = std::make_unique<DeviceSource>(driver_, device.id);
    } else {
      source = std::make_unique<PinnedSource>(driver_, device.id);
    }
    pool = MakeDevicePool(options, ToString(device) + " memory", std::move(source));
    if (options_[type] == nullptr) options_[type] = std::make_unique<const MemoryOptions>(options);
  }
  return *pool;
}

std::vector<Allocator*> Gpus::PoolsOf(DeviceType type) {
  Check({type, 0});
  const MutexLock lock(mutex_);
  return PoolsOfLocked(type);
}

std::vector<Allocator*> Gpus::PoolsOfLocked(DeviceType type) {
  std::vector<Allocator*> made;
  for (const auto& pool : pools_[static_cast<std::size_t>(type)]) {
    if (pool != nullptr) made.push_back(pool.get());
  }
  return made;
}

void Gpus::Configure(DeviceType type, const MemoryOptions& options) {
  CheckMemoryOptions(options);
  Check({type, 0});
  const MutexLock lock(mutex_);
  const std::vector<Allocator*> made = PoolsOfLocked(type);
  std::unique_ptr<const MemoryOptions>& known = options_[static_cast<std::size_t>(type)];
  if (!made.empty() && known->allocator != options.allocator) {
    throw InvalidState(fmt::format("{} memory already comes from allocator '{}', got '{}'",
                                   ToString({type, 0}), known->allocator, options.allocator));
  }
  known = std::make_unique<const MemoryOptions>(options);
  for (Allocator* pool : made) pool->set_bytes_max(options.bytes_max);
}

MemoryStats Gpus::Stats(DeviceType type) {
  Check({type, 0});
  MemoryStats sum{.bytes_max = Pool({type, 0}).stats().bytes_max};
  for (const Allocator* pool : PoolsOf(type)) {
    const MemoryStats stats = pool->stats();
    sum.used += stats.used;
    sum.cached += stats.cached;
    sum.peak += stats.peak;
  }
  return sum;
}

std::int64_t Gpus::Trim(DeviceType type) {
  std::int64_t bytes = 0;
  for (Allocator* pool : PoolsOf(type)) bytes += pool->Trim();
  return bytes;
}

bool Gpus::Linked(int device, int peer) {
  const MutexLock lock(mutex_);
  const auto [link, fresh] = linked_.try_emplace({device, peer}, false);
  if (!fresh) return link->second;
  try {
    return link->second = driver_.EnablePeer(device, peer);
  } catch (...) {
    linked_.erase(link);  // asked again
    throw;
  }
}

internal::GpuLink Gpus::Link(int device, int peer) {
  const MutexLock lock(mutex_);
  const auto [link, fresh] = links_.try_emplace({device, peer});
  if (fresh) link->second = driver_.LinkOf(device, peer);
  return link->second;
}

void CheckDeviceType(DeviceType type) {
  switch (type) {
    case DeviceType::kCpu:
    case DeviceType::kCpuPinned:
    case DeviceType::kGpu:
      return;
  }
  throw InvalidArgument(fmt::format("expected a type of device, cpu, cpu_pinned or gpu, got {}",
                                    static_cast<int>(type)));
}

void CheckDevice(Device device, const Engine& engine) {
  CheckDeviceType(device.type);
  if (device.type != DeviceType::kCpu) {
    Gpus::Of(engine).Check(device);
  } else if (device.id < 0) {
    throw InvalidArgument(fmt::format("expected a device number of at least 0, got {}", device.id));
  }
}

std::shared_ptr<GpuDriver> GpuDriverOf(const Engine& engine) {
  const std::shared_ptr<GpuDriver>& driver = engine.options().gpu_driver;
  return driver != nullptr ? driver : internal::DefaultGpuDriver();
}

ArrayMemory MemoryOf(Device device, const Engine& engine) {
  if (device.type == DeviceType::kCpu) return {CpuAllocator(), nullptr};
  return {Gpus::Of(engine).Pool(device), engine.options().gpu_driver};
}

}  // namespace heddle::storage
