#include "tests/engine/sim_gpu.h"

#include <heddle/error.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <random>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "base/clock.h"
#include "ops/cast.h"
#include "ops/fill.h"
#include "ops/quantise.h"
#include "ops/row_merge.h"
#include "ops/row_sparse.h"
#include "ops/sum.h"

namespace heddle::engine_test {
namespace {

thread_local void* current_device = nullptr;  // a SimDevice
thread_local std::string launch_error;

constexpr int kIllegalAddress = 700;  // what CUDA numbers it
constexpr int kLaunchFailure = 719;

}  // namespace

// Guards all events: how often each was recorded, which of these has happened, and which will not.
struct SimGpu::Shared {
  std::mutex mutex;
  std::condition_variable changed;
};

// What the driver gives out is a handle: as with CUDA, an event may be freed before it happens.
struct SimGpu::SimEvent {
  int device;
  std::uint64_t recorded = 0;
  std::uint64_t happened = 0;
  std::uint64_t lost = 0;

  static const std::shared_ptr<SimEvent>& Of(Event event) {
    return *static_cast<std::shared_ptr<SimEvent>*>(event);
  }
};

// Hands on what kernels have done, in any order.
struct SimGpu::Reporter {
  Reporter(internal::DeviceWorkSink& to, Reports how, std::uint64_t seed)
      : sink(&to), reports(how), random(seed) {}

  void Report(const internal::DeviceWork& work) {
    const std::lock_guard lock(mutex);
    if (sink == nullptr) return;
    held.push_back(work);
    while (reports == Reports::kLate && !held.empty() && random() % 2 == 0) HandOnOne();
  }
  void End() {
    const std::lock_guard lock(mutex);
    while (sink != nullptr && !held.empty()) HandOnOne();
    sink = nullptr;
  }
  void HandOnOne() {
    std::swap(held[random() % held.size()], held.back());
    sink->OnWork(held.back());
    held.pop_back();
  }

  std::mutex mutex;
  internal::DeviceWorkSink* sink;
  const Reports reports;
  std::mt19937_64 random;
  std::vector<internal::DeviceWork> held;
};

namespace {

// The op whose body this thread runs, for those who trace it.
template <class Reporter>
struct TracedOp {
  std::shared_ptr<Reporter> reporter;
  std::uint64_t op = 0;
};
template <class Reporter>
thread_local TracedOp<Reporter> traced_op;

}  // namespace

class SimGpu::SimTrace final : public internal::DeviceTrace {
 public:
  explicit SimTrace(std::shared_ptr<Reporter> reporter) : reporter_(std::move(reporter)) {}

  void Begin(std::uint64_t op) noexcept override {
    CHECK(traced_op<Reporter>.reporter == nullptr, "Begin inside of another");
    traced_op<Reporter> = {reporter_, op};
  }
  void End() noexcept override {
    CHECK(traced_op<Reporter>.reporter == reporter_, "End without its Begin");
    traced_op<Reporter> = {};
  }
  void Stop() noexcept override { reporter_->End(); }

 private:
  const std::shared_ptr<Reporter> reporter_;
};

std::unique_ptr<internal::DeviceTrace> SimGpu::TraceDevices(
    internal::DeviceWorkSink& sink) noexcept {
  if (reports_ == Reports::kNone) return nullptr;
  return std::make_unique<SimTrace>(
      std::make_shared<Reporter>(sink, reports_.load(), seed_.fetch_add(1)));
}

class SimGpu::SimStream {
 public:
  SimStream(int device, int number, SimDevice& state, std::shared_ptr<Shared> shared,
            std::uint64_t turns_max, std::uint64_t seed)
      : device_(device),
        number_(number),
        state_(state),
        shared_(std::move(shared)),
        turns_max_(turns_max),
        random_(seed) {}
  ~SimStream() {
    Add(nullptr);
    thread_.join();
  }

  int device() const { return device_; }
  int number() const { return number_; }
  SimDevice& state() { return state_; }
  // Does nothing happen on it any more?
  bool is_dead() const { return state_.failed || stuck_; }
  // It waits for what never comes. What follows is dropped, not kept for ever.
  void GetStuck() {
    stuck_ = true;
    state_.stuck = true;
  }

  void Add(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    ++state_.tasks;
    tasks_.push_back(std::move(task));
    added_.notify_one();
  }

 private:
  void Loop() {
    while (true) {
      std::unique_lock lock(mutex_);
      added_.wait(lock, [&] { return !tasks_.empty(); });
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      if (task != nullptr) {
        // Sleeps, for who yields its CPU beside a busy program is away for all of that one's slice.
        for (std::uint64_t turns = random_() % (turns_max_ + 1); turns > 0; --turns)
          std::this_thread::sleep_for(std::chrono::nanoseconds(1));
        task();
      }
      --state_.tasks;
      if (task == nullptr) return;
    }
  }

  const int device_;
  const int number_;
  SimDevice& state_;
  const std::shared_ptr<Shared> shared_;
  const std::uint64_t turns_max_;
  bool stuck_ = false;  // the thread's own
  std::mt19937_64 random_;
  std::mutex mutex_;
  std::condition_variable added_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_{[this] { Loop(); }};
};

SimGpu::SimGpu(int devices, std::uint64_t seed) : shared_(std::make_shared<Shared>()), seed_(seed) {
  for (int i = 0; i < devices; ++i) {
    devices_.push_back(std::make_unique<SimDevice>(i));
    names_.emplace(i, fmt::format("simulated GPU {}", i));
  }
}

SimGpu::~SimGpu() {
  CHECK(streams_left_ == 0 && events_left_ == 0, "{} streams and {} events were not freed",
        streams_left_.load(), events_left_.load());
}

void SimGpu::Launch(GpuStream stream, std::function<void()> kernel, Kind kind, std::int64_t bytes) {
  auto* sim = static_cast<SimStream*>(stream.handle);
  CHECK(current() == stream.device && sim->device() == stream.device,
        "a launch on gpu({}) while gpu({}) is current", stream.device, current());
  internal::DeviceWork work{.op = traced_op<Reporter>.op,
                            .kind = kind,
                            .device = stream.device,
                            .stream = static_cast<std::uint32_t>(sim->number()),
                            .bytes = static_cast<std::uint64_t>(bytes),
                            .name = kind == Kind::kKernel ? "sim_kernel" : nullptr};
  sim->Add(
      [sim, work, reporter = traced_op<Reporter>.reporter, kernel = std::move(kernel)]() mutable {
        if (sim->is_dead()) return;
        work.started_ns = static_cast<std::uint64_t>(SteadyNowNs());
        try {
          kernel();
        } catch (...) {
          sim->state().failed = true;
        }
        work.ended_ns = static_cast<std::uint64_t>(SteadyNowNs());
        if (reporter != nullptr) reporter->Report(work);
      });
}

void SimGpu::FailLaunch(std::string name) { launch_error = std::move(name); }

int SimGpu::current() {
  return current_device == nullptr ? -1 : static_cast<const SimDevice*>(current_device)->id;
}

std::set<int> SimGpu::devices_entered() const {
  std::set<int> entered;
  for (int i = 0; i < device_count(); ++i) {
    if (devices_[static_cast<std::size_t>(i)]->entered) entered.insert(i);
  }
  return entered;
}

std::string SimGpu::WhyNoGpu(int id) const {
  return fmt::format("gpu({}): there are {} simulated ones", id, devices_.size());
}

SimGpu::Context SimGpu::Enter(int device) {
  SimDevice& entered = *devices_.at(static_cast<std::size_t>(device));
  entered.entered = true;
  return {.device = std::exchange(current_device, &entered)};
}

void SimGpu::Leave(Context outer) noexcept { current_device = outer.device; }

void SimGpu::AwaitAll(int device) noexcept {
  const std::atomic<int>& tasks = devices_.at(static_cast<std::size_t>(device))->tasks;
  ++awaited_;
  while (tasks > 0) std::this_thread::yield();
}

SimGpu::Stream SimGpu::NewStream(bool, int) {
  const int number = ++streams_made_;
  ++streams_left_;
  const int id = current();
  SimDevice& device = *devices_.at(static_cast<std::size_t>(id));
  return new SimStream(id, number, device, shared_, turns_max_, seed_.fetch_add(1));
}

SimGpu::Event SimGpu::NewEvent() {
  ++events_made_;
  ++events_left_;
  return new std::shared_ptr<SimEvent>(new SimEvent{.device = current()});
}

void SimGpu::Free(int device, Stream stream) noexcept {
  auto* sim = static_cast<SimStream*>(stream);
  CHECK(sim->device() == device);
  delete sim;
  --streams_left_;
}

void SimGpu::FreeEvent(int device, Event event) noexcept {
  {
    const SimEvent& sim = *SimEvent::Of(event);
    const SimDevice& on = *devices_.at(static_cast<std::size_t>(device));
    const std::lock_guard lock(shared_->mutex);
    // Also of a device that has not failed, but whose stream has not come to what it waits for.
    CHECK(sim.device == device &&
          (sim.recorded == std::max(sim.happened, sim.lost) || on.failed || on.stuck));
  }
  delete static_cast<std::shared_ptr<SimEvent>*>(event);
  --events_left_;
}

void SimGpu::Record(Event event, Stream stream) {
  const std::shared_ptr<SimEvent>& sim = SimEvent::Of(event);
  auto* on = static_cast<SimStream*>(stream);
  CHECK(sim->device == on->device(), "an event of gpu({}) on a stream of gpu({})", sim->device,
        on->device());
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(shared_->mutex);
    // Of a device that has failed Query says nothing but that, so its events are free at once.
    CHECK(sim->recorded == sim->happened || on->state().failed,
          "an event was used again before it had happened");
    number = ++sim->recorded;
  }
  on->Add([this, on, sim, number] {
    const std::lock_guard lock(shared_->mutex);
    (on->is_dead() ? sim->lost : sim->happened) = number;
    shared_->changed.notify_all();
  });
}

void SimGpu::Wait(Stream stream, Event event) {
  const std::shared_ptr<SimEvent>& sim = SimEvent::Of(event);
  auto* on = static_cast<SimStream*>(stream);
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(shared_->mutex);
    number = sim->recorded;
  }
  on->Add([this, on, sim, number] {
    if (on->is_dead()) return;
    std::unique_lock lock(shared_->mutex);
    shared_->changed.wait(lock, [&] { return sim->happened >= number || sim->lost >= number; });
    if (sim->happened < number) on->GetStuck();
  });
}

SimGpu::State SimGpu::Query(Event event) noexcept {
  const SimEvent* const sim = SimEvent::Of(event).get();
  if (devices_[static_cast<std::size_t>(sim->device)]->failed) {
    return {.error = std::make_exception_ptr(
                CudaError("the GPU reports cudaErrorIllegalAddress", kIllegalAddress))};
  }
  const std::lock_guard lock(shared_->mutex);
  return {.happened = sim->happened == sim->recorded};
}

void SimGpu::CheckLaunches() {
  if (launch_error.empty()) return;
  throw CudaError(std::exchange(launch_error, {}), kLaunchFailure);
}

// --- memory and copies ---------------------------------------------------------------------------

void* SimGpu::AllocateDevice(int device, std::int64_t bytes) {
  return memory_.Allocate(device, bytes, device_bytes_);
}
void SimGpu::FreeDevice(int device, void* block) noexcept { memory_.Free(device, block); }
void* SimGpu::AllocatePinned(int, std::int64_t bytes) {
  return memory_.Allocate(SimMemory::kPinned, bytes, std::int64_t{1} << 40);
}
void SimGpu::FreePinned(int, void* block) noexcept { memory_.Free(SimMemory::kPinned, block); }

bool SimGpu::EnablePeer(int device, int peer) {
  const bool linked = LinkOf(device, peer).access;
  if (linked) memory_.Link(device, peer);
  return linked;
}

internal::GpuLink SimGpu::LinkOf(int device, int peer) noexcept {
  const auto link = links_.find({std::min(device, peer), std::max(device, peer)});
  return link != links_.end() ? link->second : internal::GpuLink{.access = linked_};
}

std::vector<SimGpu::Step> SimGpu::TakeSteps() {
  const std::lock_guard lock(steps_mutex_);
  return std::exchange(steps_, {});
}

void SimGpu::Note(const Step& step) const {
  const std::lock_guard lock(steps_mutex_);
  steps_.push_back(step);
}

void SimGpu::LaunchOn(GpuStream stream, std::vector<const void*> arrays,
                      std::vector<std::int64_t> bytes,
                      std::function<void(const std::vector<std::byte*>& at)> kernel,
                      Kind kind) const {
  auto uses = memory_.Use(arrays);
  const std::int64_t moved = kind == Kind::kKernel ? 0 : bytes[0];
  Launch(
      stream,
      [this, stream, arrays = std::move(arrays), bytes = std::move(bytes),
       kernel = std::move(kernel), uses = std::move(uses)] {
        std::vector<std::byte*> at;
        for (std::size_t i = 0; i < arrays.size(); ++i) {
          at.push_back(memory_.Find(stream.device, arrays[i], bytes[i]));
        }
        kernel(at);
      },
      kind, moved);
}

void SimGpu::Copy(Stream stream, void* to, const void* from, std::int64_t bytes) {
  CountLaunch();
  const GpuStream on{static_cast<SimStream*>(stream)->device(), stream};
  LaunchOn(
      on, {to, from}, {bytes, bytes},
      [bytes](const std::vector<std::byte*>& at) {
        std::memcpy(at[0], at[1], static_cast<std::size_t>(bytes));
      },
      Kind::kCopy);
}

void SimGpu::CopyPeer(Stream stream, int to_device, void* to, int from_device, const void* from,
                      std::int64_t bytes) {
  CHECK(to_device != from_device && static_cast<SimStream*>(stream)->device() == to_device);
  peer_bytes_ += bytes;
  Note({.device = to_device, .from = from_device});
  Copy(stream, to, from, bytes);
}

// --- kernels -------------------------------------------------------------------------------------

namespace {

std::int64_t Bytes(DType dtype, std::size_t count) {
  return static_cast<std::int64_t>(SizeOf(dtype) * count);
}

}  // namespace

void SimGpu::Fill(DType dtype, ops::Scalar value, void* out, std::size_t count,
                  GpuStream stream) const {
  LaunchOn(stream, {out}, {Bytes(dtype, count)},
           [=](const std::vector<std::byte*>& at) { ops::Fill(dtype, value, at[0], count); });
}

void SimGpu::Copy(std::span<const ops::CopyTask> tasks, GpuStream stream) const {
  CountLaunch();
  for (const ops::CopyTask& task : tasks) {
    const auto bytes = static_cast<std::int64_t>(task.bytes);
    LaunchOn(stream, {task.out, task.source}, {bytes, bytes},
             [=](const std::vector<std::byte*>& at) { std::memmove(at[0], at[1], task.bytes); });
  }
}

void SimGpu::Cast(DType from, DType to, std::span<const ops::CastTask> tasks,
                  GpuStream stream) const {
  CountLaunch();
  for (const ops::CastTask& task : tasks) {
    LaunchOn(
        stream, {task.out, task.source}, {Bytes(to, task.count), Bytes(from, task.count)},
        [=](const std::vector<std::byte*>& at) { ops::Cast(from, at[1], to, at[0], task.count); });
  }
}

void SimGpu::Binary(ops::BinaryOp op, DType dtype, const void* a, const void* b, void* out,
                    std::size_t count, GpuStream stream) const {
  const std::int64_t bytes = Bytes(dtype, count);
  LaunchOn(stream, {out, a, b}, {bytes, bytes, bytes}, [=](const std::vector<std::byte*>& at) {
    ops::Binary(op, dtype, at[1], at[2], at[0], count);
  });
}

void SimGpu::BinaryWithScalar(ops::BinaryOp op, DType dtype, const void* a, ops::Scalar b,
                              void* out, std::size_t count, GpuStream stream) const {
  const std::int64_t bytes = Bytes(dtype, count);
  LaunchOn(stream, {out, a}, {bytes, bytes}, [=](const std::vector<std::byte*>& at) {
    ops::BinaryWithScalar(op, dtype, at[1], b, at[0], count);
  });
}

void SimGpu::BinaryWithScalar(ops::BinaryOp op, DType dtype, ops::Scalar a, const void* b,
                              void* out, std::size_t count, GpuStream stream) const {
  const std::int64_t bytes = Bytes(dtype, count);
  LaunchOn(stream, {out, b}, {bytes, bytes}, [=](const std::vector<std::byte*>& at) {
    ops::BinaryWithScalar(op, dtype, a, at[1], at[0], count);
  });
}

void SimGpu::UseCarry(std::size_t inputs, void* carry, std::int64_t bytes, GpuStream stream) const {
  if (inputs <= ops::kGpuSumInputsMax) return;
  LaunchOn(stream, {carry}, {bytes}, [](const std::vector<std::byte*>&) {});
}

void SimGpu::Sum(DType dtype, std::span<const ops::SumTask> tasks, GpuStream stream) const {
  CountLaunch();
  for (const ops::SumTask& task : tasks) {
    Note({.device = stream.device, .inputs = task.inputs.size()});
    UseCarry(task.inputs.size(), task.carry, Bytes(ops::CarryDType(dtype), task.count), stream);
    std::vector<const void*> arrays(task.inputs.begin(), task.inputs.end());
    arrays.push_back(task.out);
    std::vector<std::int64_t> bytes(arrays.size(), Bytes(dtype, task.count));
    LaunchOn(stream, std::move(arrays), std::move(bytes),
             [dtype, count = task.count](const std::vector<std::byte*>& at) {
               const std::vector<const void*> read(at.begin(), at.end() - 1);
               ops::Sum(dtype, read, at.back(), count);
             });
  }
}

void SimGpu::QuantiseOneBit(float threshold, DType dtype, const void* gradient, float* residual,
                            void* code, std::size_t count, GpuStream stream) const {
  LaunchOn(stream, {gradient, residual, code},
           {Bytes(dtype, count), Bytes(DType::kFloat32, count),
            static_cast<std::int64_t>(ops::OneBitCodeBytes(count))},
           [=](const std::vector<std::byte*>& at) {
             ops::QuantiseOneBit(threshold, dtype, at[0], reinterpret_cast<float*>(at[1]), at[2],
                                 count);
           });
}

void SimGpu::QuantiseTwoBit(float threshold, DType dtype, const void* gradient, float* residual,
                            void* code, std::size_t count, GpuStream stream) const {
  LaunchOn(stream, {gradient, residual, code},
           {Bytes(dtype, count), Bytes(DType::kFloat32, count),
            static_cast<std::int64_t>(ops::TwoBitCodeBytes(count))},
           [=](const std::vector<std::byte*>& at) {
             ops::QuantiseTwoBit(threshold, dtype, at[0], reinterpret_cast<float*>(at[1]), at[2],
                                 count);
           });
}

void SimGpu::SumCodes(std::span<const void* const> codes, std::size_t code_bytes, DType dtype,
                      void* out, float* carry, std::size_t count, GpuStream stream,
                      std::function<void(const void* code, float* values)> decode) const {
  UseCarry(codes.size(), carry, Bytes(DType::kFloat32, count), stream);
  std::vector<const void*> arrays(codes.begin(), codes.end());
  std::vector<std::int64_t> bytes(arrays.size(), static_cast<std::int64_t>(code_bytes));
  arrays.push_back(out);
  bytes.push_back(Bytes(dtype, count));
  LaunchOn(stream, std::move(arrays), std::move(bytes),
           [=, decode = std::move(decode)](const std::vector<std::byte*>& at) {
             std::vector<float> sum(count);
             std::vector<float> term(count);
             decode(at[0], sum.data());
             for (std::size_t k = 1; k + 1 < at.size(); ++k) {
               decode(at[k], term.data());
               for (std::size_t i = 0; i < count; ++i) sum[i] += term[i];
             }
             ops::Cast(DType::kFloat32, sum.data(), dtype, at.back(), count);
           });
}

void SimGpu::SumOneBit(std::span<const void* const> codes, DType dtype, void* out, float* carry,
                       std::size_t count, GpuStream stream) const {
  SumCodes(codes, ops::OneBitCodeBytes(count), dtype, out, carry, count, stream,
           [=](const void* code, float* values) { ops::DequantiseOneBit(code, values, count); });
}

void SimGpu::SumTwoBit(float threshold, std::span<const void* const> codes, DType dtype, void* out,
                       float* carry, std::size_t count, GpuStream stream) const {
  SumCodes(codes, ops::TwoBitCodeBytes(count), dtype, out, carry, count, stream,
           [=](const void* code, float* values) {
             ops::DequantiseTwoBit(threshold, code, values, count);
           });
}

// --- rows ----------------------------------------------------------------------------------------

namespace {

constexpr std::size_t kIdBytes = sizeof(std::int64_t);

std::int64_t* IdsAt(std::byte* at) { return reinterpret_cast<std::int64_t*>(at); }

}  // namespace

void SimGpu::SumRows(DType dtype, std::size_t row_elements, std::span<const ops::GpuRows> inputs,
                     std::int64_t* out_ids, void* out_rows, std::int64_t* out_count, void* scratch,
                     GpuStream stream) const {
  CountLaunch();
  std::size_t total = 0;
  std::vector<const void*> arrays;
  std::vector<std::int64_t> bytes;
  const auto use = [&](const void* array, std::int64_t size) {
    arrays.push_back(array);
    bytes.push_back(size);
  };
  std::vector<std::size_t> counts;
  for (const ops::GpuRows& input : inputs) {
    CHECK(input.count > 0 && input.present == nullptr);
    use(input.ids, static_cast<std::int64_t>(input.count * kIdBytes));
    use(input.rows, Bytes(dtype, input.count * row_elements));
    counts.push_back(input.count);
    total += input.count;
  }
  use(out_ids, static_cast<std::int64_t>(total * kIdBytes));
  use(out_rows, Bytes(dtype, total * row_elements));
  use(out_count, kIdBytes);
  use(scratch, static_cast<std::int64_t>(SumRowsScratchBytes(total)));
  LaunchOn(stream, std::move(arrays), std::move(bytes),
           [dtype, row_elements, counts, total](const std::vector<std::byte*>& at) {
             std::vector<ops::SparseRows> values;
             for (std::size_t k = 0; k < counts.size(); ++k) {
               values.push_back({{IdsAt(at[2 * k]), counts[k]}, at[2 * k + 1]});
             }
             std::vector<ops::RowEntry> entries(2 * total);
             const auto merged = ops::MergeRows(values, row_elements * SizeOf(dtype),
                                                entries.data(), entries.data() + total);
             std::byte* const* const out = at.data() + 2 * counts.size();
             ops::SumRows(dtype, row_elements, merged, IdsAt(out[0]), out[1]);
             *IdsAt(out[2]) = static_cast<std::int64_t>(ops::CountIds(merged));
           });
}

void SimGpu::LaunchOnRows(
    const ops::GpuRows& value, std::size_t row_bytes, const void* other, GpuStream stream,
    std::function<void(const ops::SparseRows& rows, std::byte* other)> kernel) const {
  CountLaunch();
  std::vector<const void*> arrays = {value.ids, other};
  std::vector<std::int64_t> bytes = {static_cast<std::int64_t>(value.count * kIdBytes), 0};
  if (value.rows != nullptr) {
    arrays.push_back(value.rows);
    bytes.push_back(static_cast<std::int64_t>(value.count * row_bytes));
  }
  if (value.present != nullptr) {
    arrays.push_back(value.present);
    bytes.push_back(kIdBytes);
  }
  LaunchOn(stream, std::move(arrays), std::move(bytes),
           [count = value.count, known = value.present == nullptr,
            kernel = std::move(kernel)](const std::vector<std::byte*>& at) {
             const std::size_t present =
                 known ? count : static_cast<std::size_t>(*IdsAt(at.back()));
             kernel({{IdsAt(at[0]), present}, at.size() > 2 ? at[2] : nullptr}, at[1]);
           });
}

void SimGpu::GatherDenseRows(const void* dense, const ops::GpuIds& ids, std::size_t row_bytes,
                             void* out, GpuStream stream) const {
  const ops::GpuRows value = {ids.ids, ids.count, out, ids.present};
  LaunchOnRows(value, row_bytes, dense, stream,
               [row_bytes](const ops::SparseRows& rows, std::byte* from) {
                 auto* to = static_cast<std::byte*>(const_cast<void*>(rows.rows));
                 for (const std::int64_t id : rows.ids) {
                   std::copy_n(from + static_cast<std::size_t>(id) * row_bytes, row_bytes, to);
                   to += row_bytes;
                 }
               });
}

void SimGpu::ScatterRows(const ops::GpuRows& value, std::size_t row_bytes, void* dense,
                         GpuStream stream) const {
  LaunchOnRows(value, row_bytes, dense, stream,
               [row_bytes](const ops::SparseRows& rows, std::byte* to) {
                 ops::ScatterRows(rows, row_bytes, to, 0);
               });
}

void SimGpu::AddRows(DType dtype, std::size_t row_elements, const ops::GpuRows& value, void* dense,
                     GpuStream stream) const {
  LaunchOnRows(value, row_elements * SizeOf(dtype), dense, stream,
               [dtype, row_elements](const ops::SparseRows& rows, std::byte* to) {
                 ops::AddRows(dtype, row_elements, rows, to, 0);
               });
}

void SimGpu::NonZeroRows(DType dtype, std::size_t row_elements, const void* dense, std::size_t rows,
                         std::int64_t* out_ids, std::int64_t* out_count, void* scratch,
                         GpuStream stream) const {
  CountLaunch();
  LaunchOn(stream, {dense, out_ids, out_count, scratch},
           {Bytes(dtype, rows * row_elements), static_cast<std::int64_t>(rows * kIdBytes), kIdBytes,
            static_cast<std::int64_t>(NonZeroRowsScratchBytes(rows))},
           [dtype, row_elements, rows](const std::vector<std::byte*>& at) {
             std::vector<std::uint8_t> flags(rows);
             ops::FlagNonZeroRows(dtype, row_elements, at[0], flags);
             std::int64_t count = 0;
             for (std::size_t i = 0; i < rows; ++i) {
               if (flags[i] != 0) IdsAt(at[1])[count++] = static_cast<std::int64_t>(i);
             }
             *IdsAt(at[2]) = count;
           });
}

void SimGpu::LaunchOnWanted(const ops::GpuRows& value, std::size_t row_bytes,
                            const ops::GpuIds& wanted,
                            const std::vector<std::pair<const void*, std::size_t>>& others,
                            GpuStream stream, WantedKernel kernel) const {
  CountLaunch();
  CHECK(value.present == nullptr);
  std::vector<const void*> arrays;
  std::vector<std::int64_t> bytes;
  const auto use = [&](const void* array, std::size_t size) {
    if (size == 0) return std::size_t{0};
    arrays.push_back(array);
    bytes.push_back(static_cast<std::int64_t>(size));
    return arrays.size();  // its place, counted from 1
  };
  const std::size_t ids = use(value.ids, value.count * kIdBytes);
  const std::size_t rows = value.rows == nullptr ? 0 : use(value.rows, value.count * row_bytes);
  const std::size_t wanted_ids = use(wanted.ids, wanted.count * kIdBytes);
  const std::size_t present = wanted.present == nullptr ? 0 : use(wanted.present, kIdBytes);
  std::vector<std::size_t> places;
  for (const auto& [array, size] : others) places.push_back(use(array, size));
  LaunchOn(
      stream, std::move(arrays), std::move(bytes),
      [=, kernel = std::move(kernel), count = value.count,
       wanted_count = wanted.count](const std::vector<std::byte*>& at) {
        const auto find = [&](std::size_t place) { return place == 0 ? nullptr : at[place - 1]; };
        const std::size_t there =
            present == 0 ? wanted_count : static_cast<std::size_t>(*IdsAt(find(present)));
        std::vector<std::byte*> found;
        for (const std::size_t place : places) found.push_back(find(place));
        kernel({{IdsAt(find(ids)), count}, find(rows)}, {IdsAt(find(wanted_ids)), there}, found);
      });
}

void SimGpu::GatherRows(const ops::GpuRows& value, const ops::GpuIds& wanted, std::size_t row_bytes,
                        void* out, GpuStream stream) const {
  LaunchOnWanted(value, row_bytes, wanted, {{out, wanted.count * row_bytes}}, stream,
                 [row_bytes](const ops::SparseRows& rows, std::span<const std::int64_t> ids,
                             const std::vector<std::byte*>& at) {
                   ops::GatherRows(rows, ids, row_bytes, at[0]);
                 });
}

void SimGpu::FindRows(const ops::GpuIds& value, const ops::GpuIds& wanted, std::int64_t* places,
                      GpuStream stream) const {
  LaunchOnWanted({value.ids, value.count, nullptr, value.present}, 0, wanted,
                 {{places, wanted.count * kIdBytes}}, stream,
                 [](const ops::SparseRows& rows, std::span<const std::int64_t> ids,
                    const std::vector<std::byte*>& at) {
                   for (std::size_t i = 0; i < ids.size(); ++i) {
                     const auto found = std::ranges::find(rows.ids, ids[i]);
                     IdsAt(at[0])[i] = found == rows.ids.end() ? -1 : found - rows.ids.begin();
                   }
                 });
}

void SimGpu::CountMissing(const ops::GpuIds& value, const ops::GpuIds& wanted, std::int64_t* before,
                          void* scratch, GpuStream stream) const {
  LaunchOnWanted(
      {value.ids, value.count, nullptr, value.present}, 0, wanted,
      {{before, (wanted.count + 1) * kIdBytes}, {scratch, CountMissingScratchBytes(wanted.count)}},
      stream,
      [count = wanted.count](const ops::SparseRows& rows, std::span<const std::int64_t> ids,
                             const std::vector<std::byte*>& at) {
        std::int64_t missing = 0;
        for (std::size_t i = 0; i <= count; ++i) {
          IdsAt(at[0])[i] = missing;
          if (i < ids.size() && !std::ranges::binary_search(rows.ids, ids[i])) ++missing;
        }
      });
}

void SimGpu::InsertRows(const ops::GpuRows& value, const ops::GpuIds& wanted,
                        const std::int64_t* before, std::size_t row_bytes, std::int64_t* out_ids,
                        void* out_rows, GpuStream stream) const {
  // How many rows come out, one more at least, is known when this runs: there has to be room then.
  LaunchOnWanted(
      value, row_bytes, wanted,
      {{before, (wanted.count + 1) * kIdBytes},
       {out_ids, (value.count + 1) * kIdBytes},
       {out_rows, (value.count + 1) * row_bytes}},
      stream,
      [this, device = stream.device, count = wanted.count, row_bytes, out_ids, out_rows](
          const ops::SparseRows& rows, std::span<const std::int64_t> ids,
          const std::vector<std::byte*>& at) {
        const auto missing = static_cast<std::size_t>(IdsAt(at[0])[count]);
        const std::size_t all = rows.ids.size() + missing;
        auto* id = IdsAt(memory_.Find(device, out_ids, static_cast<std::int64_t>(all * kIdBytes)));
        std::byte* row = memory_.Find(device, out_rows, static_cast<std::int64_t>(all * row_bytes));
        std::vector<std::int64_t> both(all);
        std::ranges::set_union(rows.ids, ids, both.begin());
        std::ranges::copy(both, id);
        ops::GatherRows(rows, both, row_bytes, row);
      });
}

}  // namespace heddle::engine_test
