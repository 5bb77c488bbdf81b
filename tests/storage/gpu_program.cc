#include "tests/storage/gpu_program.h"

#include <heddle/math.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace heddle::storage_test {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kInt32, DType::kBFloat16, DType::kUInt8};

// The same values on a device and in the oracle's memory.
struct GpuSlot {
  NDArray array;
  NDArray expected;
};

class GpuProgram {
 public:
  GpuProgram(Engine& engine, int gpus, std::uint64_t seed) : engine_(engine), gpus_(gpus) {
    random_.seed(seed);
    for (int i = 0; i < 8; ++i) slots_.push_back(Fresh(Size()));
  }

  void Run(int steps) {
    for (int i = 0; i < steps && !testing::Test::HasFailure(); ++i) Step();
    for (const GpuSlot& slot : slots_) Check(slot);
  }

 private:
  static EngineOptions OneByOne() {
    EngineOptions options;
    options.type = "serial";
    return options;
  }

  std::uint64_t Below(std::uint64_t n) { return random_() % n; }

  std::int64_t Size() {
    return static_cast<std::int64_t>(Below(30) == 0 ? 300'000 + Below(1'200'000) : 1 + Below(3000));
  }
  DType AnyDType() { return kDTypes[Below(std::size(kDTypes))]; }
  Device AnyDevice() {
    const auto id = static_cast<int>(Below(static_cast<std::uint64_t>(gpus_)));
    switch (Below(6)) {
      case 0:
        return Cpu(id);
      case 1:
        return CpuPinned(id);
      default:
        return Gpu(id);
    }
  }
  // Exact in all dtypes; products and sums wrap or round alike.
  int Value() { return static_cast<int>(Below(12)); }

  GpuSlot Fresh(std::int64_t size) { return Fresh(size, AnyDType(), AnyDevice()); }
  GpuSlot Fresh(std::int64_t size, DType dtype, Device device) {
    std::vector<int> values(static_cast<std::size_t>(size));
    for (int& value : values) value = Value();
    return {NDArray::FromVector(values, {size}, dtype, device, engine_),
            NDArray::FromVector(values, {size}, dtype, Cpu(), oracle_)};
  }

  GpuSlot& Any() { return slots_[Below(slots_.size())]; }
  // A view of some of its elements, often all.
  GpuSlot View(const GpuSlot& slot) {
    if (Below(2) == 0) return slot;
    const std::int64_t size = slot.array.size();
    const auto begin = static_cast<std::int64_t>(Below(static_cast<std::uint64_t>(size)));
    const auto end =
        begin + 1 + static_cast<std::int64_t>(Below(static_cast<std::uint64_t>(size - begin)));
    return {slot.array.Slice(begin, end), slot.expected.Slice(begin, end)};
  }
  static GpuSlot First(const GpuSlot& slot, std::int64_t count) {
    return {slot.array.Slice(0, count), slot.expected.Slice(0, count)};
  }

  void Step() {
    switch (Below(11)) {
      case 0:
        Any() = Fresh(Size());
        break;
      case 1:
      case 2: {
        const GpuSlot from = View(Any());
        const GpuSlot to = View(Any());
        const std::int64_t count = std::min(from.array.size(), to.array.size());
        const int priority = static_cast<int>(Below(3)) - 1;
        First(from, count).array.CopyTo(First(to, count).array, priority);
        First(from, count).expected.CopyTo(First(to, count).expected, priority);
        break;
      }
      case 3: {
        const GpuSlot& from = Any();
        const Device device = AnyDevice();
        Any() = {from.array.Copy(device), from.expected.Copy()};
        break;
      }
      case 4: {
        const GpuSlot& from = Any();
        const DType dtype = AnyDType();
        Any() = {from.array.AsType(dtype), from.expected.AsType(dtype)};
        break;
      }
      case 5: {
        const GpuSlot slot = View(Any());
        const int value = Value();
        slot.array.Fill(value);
        slot.expected.Fill(value);
        break;
      }
      case 6: {
        const GpuSlot slot = View(Any());
        const GpuSlot other = Fresh(slot.array.size(), slot.array.dtype(), slot.array.device());
        Arithmetic(slot, other);
        break;
      }
      case 7: {
        const GpuSlot& slot = Any();
        const int value = Value();
        Any() = Below(2) == 0 ? GpuSlot{slot.array * value, slot.expected * value}
                              : GpuSlot{value - slot.array, value - slot.expected};
        break;
      }
      case 8: {
        const GpuSlot out = View(Any());
        const GpuSlot a = Fresh(out.array.size(), out.array.dtype(), out.array.device());
        Sum({a.array, out.array, a.array}, out.array);
        Sum({a.expected, out.expected, a.expected}, out.expected);
        break;
      }
      case 9: {
        const GpuSlot from = View(Any());
        const std::uint64_t which = Below(5);
        Any() = {Function(which, from.array), Function(which, from.expected)};
        break;
      }
      default:
        Check(View(Any()));
    }
  }

  static NDArray Function(std::uint64_t which, const NDArray& a) {
    const std::vector<AxisRange> turned = {
        {.begin = a.size() - 1, .step = -2, .count = (a.size() + 1) / 2}};
    switch (which) {
      case 0:
        return Square(a);
      case 1:
        return Maximum(a, 5);
      case 2:
        return SumAlong(a, std::nullopt);
      case 3:
        return CopyPart(a, turned);
      default:
        AssignPart(a, turned, Remainder(7, CopyPart(a, turned)));
        return a;
    }
  }

  void Arithmetic(const GpuSlot& slot, const GpuSlot& other) {
    switch (Below(3)) {
      case 0:
        slot.array += other.array;
        slot.expected += other.expected;
        break;
      case 1:
        slot.array *= other.array;
        slot.expected *= other.expected;
        break;
      default:
        slot.array -= slot.array * other.array;
        slot.expected -= slot.expected * other.expected;
    }
  }

  void Check(const GpuSlot& slot) {
    // Doubles hold every value of the dtypes exactly. Floats that overflowed may be NaN by now.
    const std::vector<double> found = slot.array.ToVector<double>();
    const std::vector<double> expected = slot.expected.ToVector<double>();
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      if (found[i] != found[i] && expected[i] != expected[i]) continue;
      ASSERT_EQ(found[i], expected[i])
          << "element " << i << " of " << found.size() << ", " << Name(slot.array.dtype()) << " on "
          << ToString(slot.array.device());
    }
  }

  Engine& engine_;
  const int gpus_;
  std::mt19937_64 random_;
  Engine oracle_{OneByOne()};
  std::vector<GpuSlot> slots_;
};

}  // namespace

void RunGpuProgram(Engine& engine, int gpus, int steps, std::uint64_t seed) {
  GpuProgram(engine, gpus, seed).Run(steps);
}

}  // namespace heddle::storage_test
