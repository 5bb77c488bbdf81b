// GPUs as arrays see them: their pools and those of pinned memory, their kernels, their links.
#pragma once

#include <heddle/engine.h>
#include <heddle/memory.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "engine/gpu/driver.h"
#include "ops/gpu_kernels.h"
#include "ops/gpu_row_kernels.h"
#include "storage/allocator.h"

namespace heddle::storage {

// The devices of one driver. That of CUDA lives until the process ends; those of other drivers,
// which engines are given in their options, as long as these.
//
// Threads: all methods, any thread.
class Gpus {
 public:
  // `driver` outlives this but for the destructor.
  explicit Gpus(internal::GpuDriver& driver);

  static Gpus& Of(const Engine& engine);
  static Gpus& Default();  // CUDA's

  internal::GpuDriver& driver() const { return driver_; }
  const ops::GpuKernels& kernels() const;
  const ops::GpuRowKernels& row_kernels() const;

  // InvalidArgument, saying why, unless arrays can lie on `device`, a gpu(i) or cpu_pinned(i).
  void Check(Device device) const;

  // The pool of a device that Check takes, made by the first call. Each gpu(i) has one, and each
  // cpu_pinned(i): memory that gpu(i) gets a context for, if any, and all GPUs copy from and to.
  Allocator& Pool(Device device);
  // ConfigureMemory and the others for all devices of a type other than kCpu.
  void Configure(DeviceType type, const MemoryOptions& options);
  MemoryStats Stats(DeviceType type);
  std::int64_t Trim(DeviceType type);

  // Can `device` copy from and to the memory of `peer` by itself? Asked once.
  bool Linked(int device, int peer);
  // How it does. Asked once.
  internal::GpuLink Link(int device, int peer);

 private:
  static constexpr std::size_t kTypes = 3;

  std::vector<Allocator*> PoolsOf(DeviceType type);
  std::vector<Allocator*> PoolsOfLocked(DeviceType type) REQUIRES(mutex_);

  internal::GpuDriver& driver_;
  const ops::GpuKernels* const own_kernels_;  // of simulated devices
  const ops::GpuRowKernels* const own_row_kernels_;
  Mutex mutex_;
  std::array<std::vector<std::unique_ptr<Allocator>>, kTypes> pools_ GUARDED_BY(mutex_);
  std::array<std::unique_ptr<const MemoryOptions>, kTypes> options_ GUARDED_BY(mutex_);
  std::map<std::pair<int, int>, bool> linked_ GUARDED_BY(mutex_);
  std::map<std::pair<int, int>, internal::GpuLink> links_ GUARDED_BY(mutex_);
};

// InvalidArgument for a number that is no type.
void CheckDeviceType(DeviceType type);
// InvalidArgument, naming what is there, unless arrays of `engine` can lie on `device`.
void CheckDevice(Device device, const Engine& engine);

// That of `engine`'s GPUs, never null.
std::shared_ptr<internal::GpuDriver> GpuDriverOf(const Engine& engine);

// Where an array of `engine` on `device`, which CheckDevice takes, gets its memory.
struct ArrayMemory {
  Allocator& allocator;
  std::shared_ptr<internal::GpuDriver> driver;  // keeps the allocator; null: nothing needs to
};
ArrayMemory MemoryOf(Device device, const Engine& engine);

}  // namespace heddle::storage
