// GPUs in a build without CUDA: there are none, so nothing but the first two calls ever comes.
#include "base/check.h"
#include "base/gpus.h"
#include "engine/gpu/driver.h"

namespace heddle::internal {
namespace {

class NoDriver final : public GpuDriver {
 public:
  int device_count() const override { return 0; }
  std::string WhyNoGpu(int id) const override { return heddle::WhyNoGpu(id); }
  std::string UniqueName(int) const override { Unreachable(); }
  Context Enter(int) override { Unreachable(); }
  void Leave(Context) noexcept override { Unreachable(); }
  Stream NewStream(bool, int) override { Unreachable(); }
  Event NewEvent() override { Unreachable(); }
  void Free(int, Stream) noexcept override { Unreachable(); }
  void FreeEvent(int, Event) noexcept override { Unreachable(); }
  void Record(Event, Stream) override { Unreachable(); }
  void Wait(Stream, Event) override { Unreachable(); }
  State Query(Event) noexcept override { Unreachable(); }
  void AwaitAll(int) noexcept override { Unreachable(); }
  void CheckLaunches() override { Unreachable(); }
  void* AllocateDevice(int, std::int64_t) override { Unreachable(); }
  void FreeDevice(int, void*) noexcept override { Unreachable(); }
  void TrimDevice(int) noexcept override { Unreachable(); }
  void* AllocatePinned(int, std::int64_t) override { Unreachable(); }
  void FreePinned(int, void*) noexcept override { Unreachable(); }
  bool EnablePeer(int, int) override { Unreachable(); }
  GpuLink LinkOf(int, int) noexcept override { Unreachable(); }
  void Copy(Stream, void*, const void*, std::int64_t) override { Unreachable(); }
  void CopyPeer(Stream, int, void*, int, const void*, std::int64_t) override { Unreachable(); }

 private:
  [[noreturn]] static void Unreachable() { CHECK(false, "a GPU is used in a build without CUDA"); }
};

}  // namespace

const std::shared_ptr<GpuDriver>& DefaultGpuDriver() {
  static const auto* const driver = new std::shared_ptr<GpuDriver>(std::make_shared<NoDriver>());
  return *driver;
}

}  // namespace heddle::internal
