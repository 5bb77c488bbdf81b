// Random programs of array operations against plain vectors.
//
// Goal: arrays behave as if every operation ran when it was called. Method: a few slots hold arrays
// of float32, int32 or bfloat16. Each step picks an operation and random views, does it to the
// arrays, and by a plain loop to a model: a vector of element values a buffer. Handles are dropped
// and replaced with work pending. Values are compared at random moments and at the end, on every
// engine, over many seeds.
#include <heddle/engine.h>
#include <heddle/ndarray.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ops/convert.h"
#include "tests/engine/support.h"

namespace heddle {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kInt32, DType::kBFloat16};

// One element of any of kDTypes: the value in double, which holds all of theirs exactly.
using Values = std::vector<double>;

double Rounded(DType dtype, double value) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<float>(value);
    case DType::kBFloat16:
      return static_cast<float>(BFloat16(static_cast<float>(value)));
    default:
      return static_cast<double>(ops::Convert<std::int32_t>(value));
  }
}

enum class Op { kAdd, kSubtract, kMultiply, kDivide };

std::int32_t Wrapped(std::int64_t value) { return static_cast<std::int32_t>(value); }

// As one kernel does it: in float for floats, wrapping for integers.
double Apply(Op op, DType dtype, double x, double y) {
  if (dtype == DType::kInt32) {
    const auto a = static_cast<std::int64_t>(x);
    const auto b = static_cast<std::int64_t>(y);
    switch (op) {
      case Op::kAdd:
        return Wrapped(a + b);
      case Op::kSubtract:
        return Wrapped(a - b);
      case Op::kMultiply:
        return Wrapped(a * b);
      case Op::kDivide:
        return b == 0 ? 0 : Wrapped(a / b);
    }
  }
  const auto a = static_cast<float>(x);
  const auto b = static_cast<float>(y);
  const float exact = op == Op::kAdd        ? a + b
                      : op == Op::kSubtract ? a - b
                      : op == Op::kMultiply ? a * b
                                            : a / b;
  return Rounded(dtype, exact);
}

struct ModelBuffer {
  DType dtype;
  Values values;
};

// An array and where the model has its elements.
struct Slot {
  NDArray array;
  std::shared_ptr<ModelBuffer> buffer;
  std::size_t begin = 0;

  std::size_t size() const { return static_cast<std::size_t>(array.size()); }
  DType dtype() const { return array.dtype(); }
  Values Read() const {
    const auto first = buffer->values.begin() + static_cast<std::ptrdiff_t>(begin);
    return Values(first, first + static_cast<std::ptrdiff_t>(size()));
  }
  void Write(const Values& values) const {
    for (std::size_t i = 0; i < size(); ++i) buffer->values[begin + i] = values[i];
  }
};

class Program {
 public:
  Program(Engine& engine, std::uint64_t seed) : engine_(engine), random_(seed) {
    for (int i = 0; i < 6; ++i) slots_.push_back(Fresh());
  }

  void Run(int steps) {
    for (int step = 0; step < steps && !testing::Test::HasFailure(); ++step) Step();
    for (const Slot& slot : slots_) Check(slot);
  }

 private:
  std::uint64_t Below(std::uint64_t n) { return random_() % n; }

  // Small integers: exact in every dtype. Arithmetic makes the rest.
  double Value() { return static_cast<double>(Below(17)) - 8; }

  // Sizes from one element to some that are split into blocks.
  std::size_t Size() { return Below(40) == 0 ? 200'000 + Below(1000) : 12 * (1 + Below(20)); }

  Values RandomValues(std::size_t count) {
    Values values(count);
    for (double& value : values) value = Value();
    return values;
  }

  Slot Fresh() { return Fresh(Size(), kDTypes[Below(std::size(kDTypes))]); }
  Slot Fresh(std::size_t size, DType dtype) {
    const Values values = RandomValues(size);
    return {NDArray::FromVector(values, {static_cast<std::int64_t>(size)}, dtype, Cpu(), engine_),
            std::make_shared<ModelBuffer>(ModelBuffer{dtype, values}), 0};
  }
  Slot Result(const Slot& like, const NDArray& array, Values values) {
    return {array, std::make_shared<ModelBuffer>(ModelBuffer{like.dtype(), std::move(values)}), 0};
  }

  const Slot& Any() { return slots_[Below(slots_.size())]; }

  // `slot`, or `size` elements of it somewhere; sometimes in two dimensions.
  Slot ViewOf(const Slot& slot, std::size_t size) {
    const std::size_t offset = Below(slot.size() - size + 1);
    NDArray array =
        slot.array.Reshape({static_cast<std::int64_t>(slot.size())})
            .Slice(static_cast<std::int64_t>(offset), static_cast<std::int64_t>(offset + size));
    return {array, slot.buffer, slot.begin + offset};
  }
  Slot AnyView() {
    const Slot& slot = Any();
    if (Below(3) > 0) return ViewOf(slot, slot.size());
    return ViewOf(slot, 1 + Below(slot.size()));
  }
  // A view as long as `like`, of the same dtype if asked for: often of the same buffer.
  Slot Partner(const Slot& like, bool same_dtype) {
    for (int attempt = 0; attempt < 10; ++attempt) {
      const Slot& slot = Any();
      if (slot.size() < like.size() || (same_dtype && slot.dtype() != like.dtype())) continue;
      return ViewOf(slot, like.size());
    }
    return Fresh(like.size(), like.dtype());
  }

  void Step() {
    switch (Below(10)) {
      case 0:
        return Fill();
      case 1:
      case 2:
        return Copy();
      case 3:
      case 4:
        return InPlace();
      case 5:
        return IntoFresh();
      case 6:
        return Sums();
      case 7:
        return FromHost();
      case 8:
        slots_[Below(slots_.size())] = Fresh();  // drops a handle, whatever is pending
        return;
      default:
        return Check(AnyView());
    }
  }

  void Fill() {
    const Slot out = AnyView();
    const double value = Value();
    out.array.Fill(value);
    out.Write(Values(out.size(), value));
  }

  void Copy() {
    const Slot out = AnyView();
    const Slot in = Partner(out, false);
    in.array.CopyTo(out.array);
    Values values = in.Read();
    for (double& value : values) value = Rounded(out.dtype(), value);
    out.Write(values);
  }

  void InPlace() {
    const Slot out = AnyView();
    const Op op = static_cast<Op>(Below(4));
    Values values = out.Read();
    if (Below(2) == 0) {
      const double scalar = Value();
      Assign(op, out.array, scalar);
      for (double& value : values) value = Apply(op, out.dtype(), value, scalar);
    } else {
      const Slot in = Partner(out, true);
      Assign(op, out.array, in.array);
      const Values others = in.Read();
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = Apply(op, out.dtype(), values[i], others[i]);
      }
    }
    out.Write(values);
  }

  template <class Right>
  static void Assign(Op op, const NDArray& out, const Right& right) {
    switch (op) {
      case Op::kAdd:
        out += right;
        return;
      case Op::kSubtract:
        out -= right;
        return;
      case Op::kMultiply:
        out *= right;
        return;
      case Op::kDivide:
        out /= right;
        return;
    }
  }

  void IntoFresh() {
    const Slot a = AnyView();
    const Slot b = Partner(a, true);
    const Values x = a.Read();
    const Values y = b.Read();
    Values values(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      values[i] =
          Apply(Op::kSubtract, a.dtype(), Apply(Op::kMultiply, a.dtype(), x[i], y[i]), x[i]);
    }
    slots_[Below(slots_.size())] = Result(a, a.array * b.array - a.array, std::move(values));
  }

  void Sums() {
    const Slot out = AnyView();
    std::vector<Slot> inputs;
    std::vector<NDArray> arrays;
    for (std::uint64_t n = 1 + Below(7); n > 0; --n) {
      inputs.push_back(Partner(out, true));
      arrays.push_back(inputs.back().array);
    }
    Sum(arrays, out.array);
    Values total = inputs[0].Read();
    // bfloat16 adds in float and rounds at the end.
    const DType wide = out.dtype() == DType::kBFloat16 ? DType::kFloat32 : out.dtype();
    for (std::size_t k = 1; k < inputs.size(); ++k) {
      const Values next = inputs[k].Read();
      for (std::size_t i = 0; i < total.size(); ++i) {
        total[i] = Apply(Op::kAdd, wide, total[i], next[i]);
      }
    }
    for (double& value : total) value = Rounded(out.dtype(), value);
    out.Write(total);
  }

  void FromHost() {
    const Slot out = AnyView();
    const Values values = RandomValues(out.size());
    out.array.CopyFromHost(values);
    out.Write(values);
  }

  void Check(const Slot& slot) {
    const Values found = slot.array.ToVector<double>();
    const Values expected = slot.Read();
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      if (std::isnan(expected[i]) && std::isnan(found[i])) continue;
      ASSERT_EQ(std::bit_cast<std::uint64_t>(found[i]), std::bit_cast<std::uint64_t>(expected[i]))
          << "element " << i << " of " << Name(slot.dtype()) << ": " << found[i] << ", expected "
          << expected[i];
    }
  }

  Engine& engine_;
  std::mt19937_64 random_;
  std::vector<Slot> slots_;
};

class NDArrayRandom : public engine_test::EveryEngine {};

TEST_P(NDArrayRandom, ProgramsGiveTheValuesOfPlainLoops) {
  const int rounds = engine_test::Rounds(8);
  for (int round = 0; round < rounds && !HasFailure(); ++round) {
    const std::uint64_t seed = engine_test::BaseSeed() + static_cast<std::uint64_t>(round);
    SCOPED_TRACE("HEDDLE_TEST_SEED=" + std::to_string(seed));
    EngineOptions options = GetParam().options;
    options.seed = seed;
    Engine engine(options);
    Program(engine, seed).Run(400);
    engine.WaitForAll();
  }
}

INSTANTIATE_TEST_SUITE_P(All, NDArrayRandom, testing::ValuesIn(engine_test::AllConfigs()),
                         engine_test::ConfigLabel);

}  // namespace
}  // namespace heddle
