// Simulated GPUs behind the engine's GpuDriver: a stream is a thread that runs "kernels" in order,
// after latencies drawn from a seed. Kernels are functions over plain memory, so the thread
// sanitizer sees an order that the engine forgot.
#pragma once

#include <heddle/device.h>
#include <heddle/gpu.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/gpu/driver.h"
#include "ops/gpu_kernels.h"
#include "ops/gpu_row_kernels.h"
#include "ops/row_sparse.h"
#include "tests/engine/sim_memory.h"

namespace heddle::engine_test {

class SimGpu : public internal::GpuDriver, public ops::GpuKernels, public ops::GpuRowKernels {
 public:
  SimGpu(int devices, std::uint64_t seed);
  ~SimGpu() override;  // every stream has been freed

  // From the body of a GPU op. A kernel that throws fails the device: nothing runs on it any more,
  // its events report cudaErrorIllegalAddress, and those that have not happened never do: a stream
  // of another device that waits for one stands still for good.
  using Kind = internal::DeviceWork::Kind;
  static void Launch(GpuStream stream, std::function<void()> kernel, Kind kind = Kind::kKernel,
                     std::int64_t bytes = 0);
  // A kernel over arrays of `bytes` bytes each: kernel(where they lie).
  void LaunchOn(GpuStream stream, std::vector<const void*> arrays, std::vector<std::int64_t> bytes,
                std::function<void(const std::vector<std::byte*>& at)> kernel,
                Kind kind = Kind::kKernel) const;
  void CountLaunch() const { ++launches_; }
  // The next CheckLaunches of this thread throws CudaError with this name.
  static void FailLaunch(std::string name);

  // gpu(device) is another name of the GPU behind gpu(of).
  void MakeAlias(int device, int of) { names_.at(device) = names_.at(of); }
  // Before the first copy: no two devices are linked.
  void Unlink() { linked_ = false; }
  // Before the first copy: what LinkOf says of two devices, either way. Of all others: that they
  // are linked, alike.
  void SetLink(int a, int b, internal::GpuLink link) {
    links_[{std::min(a, b), std::max(a, b)}] = link;
  }
  // Streams made from now on let other threads run so often at most before a task.
  void set_turns_max(std::uint64_t turns) { turns_max_ = turns; }
  void set_patience(std::chrono::milliseconds patience) { patience_ = patience; }
  // How much each device has.
  void set_device_bytes(std::int64_t bytes) { device_bytes_ = bytes; }
  std::int64_t bytes_used(Device device) const {
    return memory_.bytes_used(device.type == DeviceType::kGpu ? device.id : SimMemory::kPinned);
  }

  // How traces hear of what was done: some time later, in any order, or only when they end, or
  // never, as where there is no CUPTI. Of traces that begin from now on.
  enum class Reports : std::uint8_t { kLate, kAtTheEnd, kNone };
  void set_reports(Reports reports) { reports_ = reports; }

  // Calls so far that launch kernels, each for one array or a list, and copies within a device.
  int launches() const { return launches_; }
  // What was issued since the last call, in that order: copies between linked devices, which are
  // issued on the one they end on, and sums of arrays.
  struct Step {
    int device;
    int from = -1;           // of a copy
    std::size_t inputs = 0;  // of a sum

    friend bool operator==(const Step&, const Step&) = default;
  };
  std::vector<Step> TakeSteps();
  // Copied between devices so far.
  std::int64_t peer_bytes() const { return peer_bytes_; }

  static int current();  // device of this thread; -1: none
  std::set<int> devices_entered() const;
  int streams_made() const { return streams_made_; }
  int streams_left() const { return streams_left_; }
  int events_made() const { return events_made_; }
  // Calls of AwaitAll so far, those that still wait among them.
  int awaited() const { return awaited_; }

  int device_count() const override { return static_cast<int>(devices_.size()); }
  std::string WhyNoGpu(int id) const override;
  std::string UniqueName(int device) const override { return names_.at(device); }
  Context Enter(int device) override;
  void Leave(Context outer) noexcept override;
  Stream NewStream(bool urgent, int priority) override;
  Event NewEvent() override;
  void Free(int device, Stream stream) noexcept override;
  void FreeEvent(int device, Event event) noexcept override;
  void Record(Event event, Stream stream) override;
  void Wait(Stream stream, Event event) override;
  State Query(Event event) noexcept override;
  std::chrono::milliseconds patience() const override { return patience_; }
  void AwaitAll(int device) noexcept override;
  void CheckLaunches() override;
  std::unique_ptr<internal::DeviceTrace> TraceDevices(
      internal::DeviceWorkSink& sink) noexcept override;
  void* AllocateDevice(int device, std::int64_t bytes) override;
  void FreeDevice(int device, void* block) noexcept override;
  void TrimDevice(int) noexcept override {}
  void* AllocatePinned(int near, std::int64_t bytes) override;
  void FreePinned(int near, void* block) noexcept override;
  bool EnablePeer(int device, int peer) override;
  internal::GpuLink LinkOf(int device, int peer) noexcept override;
  void Copy(Stream stream, void* to, const void* from, std::int64_t bytes) override;
  void CopyPeer(Stream stream, int to_device, void* to, int from_device, const void* from,
                std::int64_t bytes) override;

  // The kernels of the CPU, on the simulated streams.
  void Fill(DType dtype, ops::Scalar value, void* out, std::size_t count,
            GpuStream stream) const override;
  void Copy(std::span<const ops::CopyTask> tasks, GpuStream stream) const override;
  void Cast(DType from, DType to, std::span<const ops::CastTask> tasks,
            GpuStream stream) const override;
  void Binary(ops::BinaryOp op, DType dtype, const void* a, const void* b, void* out,
              std::size_t count, GpuStream stream) const override;
  void BinaryWithScalar(ops::BinaryOp op, DType dtype, const void* a, ops::Scalar b, void* out,
                        std::size_t count, GpuStream stream) const override;
  void BinaryWithScalar(ops::BinaryOp op, DType dtype, ops::Scalar a, const void* b, void* out,
                        std::size_t count, GpuStream stream) const override;
  void Sum(DType dtype, std::span<const ops::SumTask> tasks, GpuStream stream) const override;
  void QuantiseOneBit(float threshold, DType dtype, const void* gradient, float* residual,
                      void* code, std::size_t count, GpuStream stream) const override;
  void QuantiseTwoBit(float threshold, DType dtype, const void* gradient, float* residual,
                      void* code, std::size_t count, GpuStream stream) const override;
  void SumOneBit(std::span<const void* const> codes, DType dtype, void* out, float* carry,
                 std::size_t count, GpuStream stream) const override;
  void SumTwoBit(float threshold, std::span<const void* const> codes, DType dtype, void* out,
                 float* carry, std::size_t count, GpuStream stream) const override;
  void Compare(ops::CompareOp op, DType dtype, const void* a, const void* b, std::uint8_t* out,
               std::size_t count, GpuStream stream) const override;
  void CompareWithScalar(ops::CompareOp op, DType dtype, const void* a, ops::Scalar b,
                         std::uint8_t* out, std::size_t count, GpuStream stream) const override;
  void Unary(ops::UnaryOp op, DType dtype, const void* a, void* out, std::size_t count,
             GpuStream stream) const override;
  void Pair(ops::PairOp op, DType dtype, const void* a, const void* b, void* out, std::size_t count,
            GpuStream stream) const override;
  void PairWithScalar(ops::PairOp op, DType dtype, const void* a, ops::Scalar b, void* out,
                      std::size_t count, GpuStream stream) const override;
  void PairWithScalar(ops::PairOp op, DType dtype, ops::Scalar a, const void* b, void* out,
                      std::size_t count, GpuStream stream) const override;
  void SumAxis(DType dtype, const void* a, std::size_t outer, std::size_t length, std::size_t inner,
               std::size_t divisor, void* out, void* scratch, GpuStream stream) const override;
  void MatrixProduct(DType dtype, const void* a, const void* b, std::size_t rows, std::size_t inner,
                     std::size_t columns, void* out, void* scratch,
                     GpuStream stream) const override;
  void Norm(DType dtype, const void* x, std::size_t count, void* out, void* scratch,
            GpuStream stream) const override;
  void Gather(std::size_t element_bytes, const void* array, const ops::StridedPart& part,
              void* packed, GpuStream stream) const override;
  void Scatter(std::size_t element_bytes, const void* packed, const ops::StridedPart& part,
               void* array, GpuStream stream) const override;

  std::size_t SumRowsScratchBytes(std::size_t total) const override { return 1 + total; }
  void SumRows(DType dtype, std::size_t row_elements, std::span<const ops::GpuRows> inputs,
               std::int64_t* out_ids, void* out_rows, std::int64_t* out_count, void* scratch,
               GpuStream stream) const override;
  void GatherDenseRows(const void* dense, const ops::GpuIds& ids, std::size_t row_bytes, void* out,
                       GpuStream stream) const override;
  void ScatterRows(const ops::GpuRows& value, std::size_t row_bytes, void* dense,
                   GpuStream stream) const override;
  void AddRows(DType dtype, std::size_t row_elements, const ops::GpuRows& value, void* dense,
               GpuStream stream) const override;
  void GatherRows(const ops::GpuRows& value, const ops::GpuIds& wanted, std::size_t row_bytes,
                  void* out, GpuStream stream) const override;
  void FindRows(const ops::GpuIds& value, const ops::GpuIds& wanted, std::int64_t* places,
                GpuStream stream) const override;
  std::size_t CountMissingScratchBytes(std::size_t wanted) const override { return 1 + wanted; }
  void CountMissing(const ops::GpuIds& value, const ops::GpuIds& wanted, std::int64_t* before,
                    void* scratch, GpuStream stream) const override;
  void InsertRows(const ops::GpuRows& value, const ops::GpuIds& wanted, const std::int64_t* before,
                  std::size_t row_bytes, std::int64_t* out_ids, void* out_rows,
                  GpuStream stream) const override;
  std::size_t NonZeroRowsScratchBytes(std::size_t rows) const override { return 1 + rows; }
  void NonZeroRows(DType dtype, std::size_t row_elements, const void* dense, std::size_t rows,
                   std::int64_t* out_ids, std::int64_t* out_count, void* scratch,
                   GpuStream stream) const override;

 private:
  // A kernel over the rows that are there, of which `value.rows` may be null, and another array.
  void LaunchOnRows(
      const ops::GpuRows& value, std::size_t row_bytes, const void* other, GpuStream stream,
      std::function<void(const ops::SparseRows& rows, std::byte* other)> kernel) const;
  // A kernel over the rows of a value, of which `rows` may be null, and the wanted ids that are
  // there, and other arrays of so many bytes each.
  using WantedKernel =
      std::function<void(const ops::SparseRows& value, std::span<const std::int64_t> wanted,
                         const std::vector<std::byte*>& others)>;
  void LaunchOnWanted(const ops::GpuRows& value, std::size_t row_bytes, const ops::GpuIds& wanted,
                      const std::vector<std::pair<const void*, std::size_t>>& others,
                      GpuStream stream, WantedKernel kernel) const;

  struct SimDevice {
    explicit SimDevice(int its_id) : id(its_id) {}

    const int id;
    std::atomic<bool> failed{false};
    std::atomic<bool> stuck{false};  // one of its streams is
    std::atomic<bool> entered{false};
    std::atomic<int> tasks{0};  // added and not over
  };
  struct SimEvent;
  class SimStream;
  class SimTrace;
  struct Reporter;  // by a trace and the kernels that it has heard of
  struct Shared;    // by the driver and its streams

  void Note(const Step& step) const;
  // Of a sum of so many inputs: the memory that it is put aside in is there.
  void UseCarry(std::size_t inputs, void* carry, std::int64_t bytes, GpuStream stream) const;
  void SumCodes(std::span<const void* const> codes, std::size_t code_bytes, DType dtype, void* out,
                float* carry, std::size_t count, GpuStream stream,
                std::function<void(const void* code, float* values)> decode) const;

  mutable SimMemory memory_;
  bool linked_ = true;
  std::map<std::pair<int, int>, internal::GpuLink> links_;
  std::uint64_t turns_max_ = 7;
  std::chrono::milliseconds patience_ = internal::GpuDriver::patience();
  std::atomic<std::int64_t> device_bytes_{std::int64_t{1} << 40};
  std::vector<std::unique_ptr<SimDevice>> devices_;
  std::map<int, std::string> names_;
  const std::shared_ptr<Shared> shared_;
  std::atomic<std::uint64_t> seed_;
  mutable std::atomic<int> launches_{0};
  std::atomic<std::int64_t> peer_bytes_{0};
  mutable std::mutex steps_mutex_;
  mutable std::vector<Step> steps_;
  std::atomic<int> streams_made_{0}, events_made_{0}, awaited_{0};
  std::atomic<int> streams_left_{0}, events_left_{0};
  std::atomic<Reports> reports_{Reports::kLate};
};

}  // namespace heddle::engine_test
