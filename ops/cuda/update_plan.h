// Updates on a GPU: what its threads do, and which launches the updates of several arrays take.
//
// The formulas are those of the CPU (kvstore/optimizer/<name>-inl.h), for one element at a time.
#pragma once

#include <heddle/dtype.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/cuda/host_device.h"
#include "ops/cuda/pack.h"
#include "ops/cuda/run.h"
#include "ops/cuda/table.h"
#include "ops/formula-inl.h"
#include "ops/reduce.h"
#include "ops/update.h"

namespace heddle::ops::one_lane {

// One element as formulas see it: the operations of Lanes (ops/update-inl.h).
template <typename C>
struct Lane {
  using Number = C;

  C v;

  static HEDDLE_HOST_DEVICE Lane Of(Number number) { return {number}; }

  friend HEDDLE_HOST_DEVICE Lane operator+(Lane a, Lane b) { return {a.v + b.v}; }
  friend HEDDLE_HOST_DEVICE Lane operator-(Lane a, Lane b) { return {a.v - b.v}; }
  friend HEDDLE_HOST_DEVICE Lane operator*(Lane a, Lane b) { return {a.v * b.v}; }
  friend HEDDLE_HOST_DEVICE Lane operator/(Lane a, Lane b) { return {a.v / b.v}; }
  friend HEDDLE_HOST_DEVICE Lane operator-(Lane a) { return {-a.v}; }

  friend HEDDLE_HOST_DEVICE Lane operator+(Lane a, Number b) { return {a.v + b}; }
  friend HEDDLE_HOST_DEVICE Lane operator+(Number a, Lane b) { return {a + b.v}; }
  friend HEDDLE_HOST_DEVICE Lane operator*(Lane a, Number b) { return {a.v * b}; }
  friend HEDDLE_HOST_DEVICE Lane operator*(Number a, Lane b) { return {a * b.v}; }
  friend HEDDLE_HOST_DEVICE Lane operator/(Lane a, Number b) { return {a.v / b}; }

  friend HEDDLE_HOST_DEVICE Lane Sqrt(Lane a) { return {std::sqrt(a.v)}; }
  friend HEDDLE_HOST_DEVICE Lane Abs(Lane a) { return {std::abs(a.v)}; }
  friend HEDDLE_HOST_DEVICE Lane Max(Lane a, Lane b) { return {a.v > b.v ? a.v : b.v}; }
  friend HEDDLE_HOST_DEVICE Lane Sign(Lane a) {
    return {static_cast<C>((a.v > 0 ? 1 : 0) - (a.v < 0 ? 1 : 0))};
  }
  friend HEDDLE_HOST_DEVICE Lane Clip(Lane a, Number limit) {
    const C raised = a.v < -limit ? -limit : a.v;
    return {raised > limit ? limit : raised};
  }
  friend HEDDLE_HOST_DEVICE Lane ZeroIfAtMost(Lane a, Number b, Lane otherwise) {
    return {a.v <= b ? C{0} : otherwise.v};
  }
  friend HEDDLE_HOST_DEVICE Lane ZeroIfZero(Lane a, Lane otherwise) {
    return {a.v == 0 ? C{0} : otherwise.v};
  }
};

// GradientOf, with or without a limit: half as many kernels.
template <typename C>
struct AnyGradient {
  using Number = C;

  explicit AnyGradient(const GradientOptions& options)
      : rescale(static_cast<C>(options.rescale)), limit(static_cast<C>(options.limit)) {
    // As ops::Apply has it: in float64, no limit is the greatest one.
    if (std::is_same_v<C, double> && limit == 0) limit = std::numeric_limits<C>::infinity();
  }

  C rescale;
  C limit;  // 0: none

  HEDDLE_HOST_DEVICE bool clips() const { return limit != 0; }
  template <class V>
  HEDDLE_HOST_DEVICE V Clipped(V v) const {
    return clips() ? Clip(v, limit) : v;
  }
  template <class V>
  HEDDLE_HOST_DEVICE V Scaled(V gradient) const {
    return Clipped(rescale * gradient);
  }
  template <class V>
  HEDDLE_HOST_DEVICE V ScaledWithDecay(V gradient, C decay, V weight) const {
    return Clipped(rescale * gradient + decay * weight);
  }
};

}  // namespace heddle::ops::one_lane

namespace heddle::ops::cuda {

// The place of an element in its array, for formulas that need it.
template <class F>
concept TakesPlace = F::kTakesPlace;
// Formulas whose numbers depend on norms, which lie in the GPU's memory when they are needed.
template <class F>
concept TakesSums = F::kTakesSums;

// A formula over weights and gradients of T and states of S: T, or float with a master copy, which
// is the weight that is read then.
template <class F, typename T, typename S>
struct UpdateBody {
  using C = typename F::Number;
  static constexpr bool kMaster = !std::is_same_v<T, S>;
  static constexpr int kArrays = 2 + F::kStates + (kMaster ? 1 : 0);
  static constexpr int kLanes = kAccessBytes / std::max(sizeof(T), sizeof(S));
  // Some eight loads in flight.
  static constexpr int kUnroll = std::clamp(32 / (kLanes * kArrays), 1, 4);

  template <int kWidth, int kVectors>
  HEDDLE_HOST_DEVICE void operator()(std::uint64_t first, std::uint64_t step) const {
    Pack<S, kWidth> w[kVectors];
    Pack<T, kWidth> g[kVectors];
    Pack<S, kWidth> s[kVectors][F::kStates > 0 ? F::kStates : 1];
    HEDDLE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const std::uint64_t at = first + v * step;
      w[v] = LoadPack<kWidth>(read_weight() + at);
      g[v] = LoadPack<kWidth>(gradient + at);
      HEDDLE_UNROLL
      for (int k = 0; k < F::kStates; ++k) s[v][k] = LoadPack<kWidth>(states[k] + at);
    }
    F f = formula;
    if constexpr (TakesSums<F>) f.TakeSums(sums);
    HEDDLE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const std::uint64_t at = first + v * step;
      HEDDLE_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        using V = one_lane::Lane<C>;
        one_lane::Element<V, F::kStates, F::kOutputs> e;
        e.weight = {Widen(w[v].lanes[i])};
        e.gradient = {Widen(g[v].lanes[i])};
        HEDDLE_UNROLL
        for (int k = 0; k < F::kStates; ++k) e.state[k] = {Widen(s[v][k].lanes[i])};
        if constexpr (TakesPlace<F>) f.template TakePlace<S>(place + at + i);
        f(e);
        w[v].lanes[i] = Narrow<S>(e.weight.v);
        HEDDLE_UNROLL
        for (int k = 0; k < F::kStates; ++k) s[v][k].lanes[i] = Narrow<S>(e.state[k].v);
        // From what is not rounded yet, as on the CPU.
        if constexpr (kMaster) g[v].lanes[i] = Narrow<T>(e.weight.v);
      }
      if constexpr (F::kWritesStates) {
        HEDDLE_UNROLL
        for (int k = 0; k < F::kStates; ++k) StorePack(s[v][k], states[k] + at);
      }
      if constexpr (F::kWritesWeight) {
        StorePack(w[v], read_weight() + at);
        if constexpr (kMaster) StorePack(g[v], weight + at);
      }
    }
  }

  HEDDLE_HOST_DEVICE S* read_weight() const {
    if constexpr (kMaster) {
      return master;
    } else {
      return weight;
    }
  }

  F formula;
  T* weight;
  const T* gradient;
  S* master;
  S* states[F::kStates > 0 ? F::kStates : 1];
  std::uint64_t place;  // of the run's first element
  const double* sums;
};

// A pass that sums the squares of a formula's outputs: of output k in sum k, or, with kSumsWeights,
// in sum k + 1, and in sum 0 those of the weights before the pass.
//
// As on the CPU (ops/reduce.h), each block of kReductionBlock elements is summed on its own. A warp
// takes it: lane j the elements j, j + 32, ...; then the lanes' sums are added pairwise, halving.
template <class F, typename T, typename S, bool kSumsWeights>
struct SumPassBody {
  using C = typename F::Number;
  static constexpr int kFirst = kSumsWeights ? 1 : 0;
  static constexpr int kSums = kFirst + F::kOutputs;
  static constexpr bool kIsSumPass = true;

  // What a lane adds up.
  HEDDLE_HOST_DEVICE void SumLane(std::uint64_t count, std::uint64_t block, unsigned lane,
                                  double (&lane_sums)[kSums]) const {
    const std::uint64_t begin = block * kReductionBlock;
    const std::uint64_t past = begin + kReductionBlock;
    const std::uint64_t end = past < count ? past : count;
    F f = arrays.formula;
    if constexpr (TakesSums<F>) f.TakeSums(arrays.sums);
    HEDDLE_UNROLL
    for (int k = 0; k < kSums; ++k) lane_sums[k] = 0;
    for (std::uint64_t i = begin + lane; i < end; i += kWarpLanes) {
      one_lane::Element<one_lane::Lane<C>, F::kStates, F::kOutputs> e;
      e.weight = {Widen(arrays.read_weight()[i])};
      e.gradient = {Widen(arrays.gradient[i])};
      HEDDLE_UNROLL
      for (int k = 0; k < F::kStates; ++k) e.state[k] = {Widen(arrays.states[k][i])};
      if constexpr (kSumsWeights) AddSquare(e.weight.v, lane_sums[0]);
      f(e);
      HEDDLE_UNROLL
      for (int k = 0; k < F::kOutputs; ++k) AddSquare(e.output[k].v, lane_sums[kFirst + k]);
      if constexpr (F::kWritesStates) {
        HEDDLE_UNROLL
        for (int k = 0; k < F::kStates; ++k) arrays.states[k][i] = Narrow<S>(e.state[k].v);
      }
    }
  }
  static HEDDLE_HOST_DEVICE void AddSquare(C value, double& sum) {
    sum = sum + static_cast<double>(value) * static_cast<double>(value);
  }

  UpdateBody<F, T, S> arrays;
  double* block_sums[kSums];
};

// The sum of an array's block sums, in their order, by one thread: of a run of one element.
struct AddBlocksBody {
  static constexpr int kLanes = 1;
  static constexpr int kUnroll = 1;

  template <int kWidth, int kVectors>
  HEDDLE_HOST_DEVICE void operator()(std::uint64_t /*first*/, std::uint64_t /*step*/) const {
    double total = 0;
    for (std::uint64_t i = 0; i < count; ++i) total += blocks[i];
    *sum = total;
  }

  const double* blocks;
  std::uint64_t count;
  double* sum;
};

// An update by rows, with one number of state for each: a warp takes a row. Its threads first sum
// the squares of the output of `Squared`, as on the CPU in blocks of kReductionBlock elements from
// the row's first one, each as SumPassBody sums; the mean goes to Step::TakeRow, which changes the
// state and readies the step that the elements then take.
template <class Squared, class Step, typename T, typename S>
struct RowPassBody {
  using C = typename Step::Number;
  static constexpr bool kIsRowPass = true;

  HEDDLE_HOST_DEVICE std::uint64_t BlocksOfRow() const {
    return (row_length + kReductionBlock - 1) / kReductionBlock;
  }
  // What a lane adds up of a block of the row.
  HEDDLE_HOST_DEVICE double SumLane(std::uint64_t row, std::uint64_t block, unsigned lane) const {
    const T* const gradient = step.gradient + row * row_length;
    const std::uint64_t begin = block * kReductionBlock;
    const std::uint64_t past = begin + kReductionBlock;
    const std::uint64_t end = past < row_length ? past : row_length;
    double sum = 0;
    for (std::uint64_t i = begin + lane; i < end; i += kWarpLanes) {
      one_lane::Element<one_lane::Lane<C>, 0, 1> e;
      e.weight = {};
      e.gradient = {Widen(gradient[i])};
      squared(e);
      const double value = static_cast<double>(e.output[0].v);
      sum = sum + value * value;
    }
    return sum;
  }
  // The lane's elements take their step. `state`: the row's before any lane has come here;
  // `sum`: of the whole row.
  HEDDLE_HOST_DEVICE void Finish(std::uint64_t row, unsigned lane, S state, double sum) const {
    UpdateBody<Step, T, S> own = step;
    C number = Widen(state);
    own.formula.TakeRow(sum / static_cast<double>(row_length), number);
    if (lane == 0) states[row] = Narrow<S>(number);
    const std::uint64_t begin = row * row_length;
    for (std::uint64_t i = lane; i < row_length; i += kWarpLanes) {
      own.template operator()<1, 1>(begin + i, 0);
    }
  }

  Squared squared;
  UpdateBody<Step, T, S> step;
  S* states;  // one for each row
  std::uint64_t row_length;
};

// Collects updates of arrays and hands launch(table) the launches that make them: for each formula
// and dtype, as many arrays a launch as its table has room for. Updates of one array in one list
// take effect in any order.
template <class Launch>
class UpdatePlanner {
 public:
  explicit UpdatePlanner(const Launch& launch) : launch_(launch) {}

  // make(gradient) returns the formula, as for ops::Apply. `place`: of the first element. `sums`:
  // what the passes before have summed, in the GPU's memory.
  template <class MakeFormula>
  void Apply(const UpdateArrays& a, const GradientOptions& options, const MakeFormula& make,
             std::uint64_t place = 0, const double* sums = nullptr) {
    OnTypes(a, options, make, [&](const auto& formula, auto types) {
      AddApply<typename decltype(types)::T, typename decltype(types)::S>(formula, a, place, sums);
    });
  }

  // A pass over a whole array that sums (SumPassBody): sum k goes to new_sums[k] by way of
  // block_sums[k], an array of ReductionBlocks(a.count).
  template <bool kSumsWeights, class MakeFormula>
  void ApplySums(const UpdateArrays& a, const GradientOptions& options, const MakeFormula& make,
                 double* const* block_sums, double* new_sums, const double* sums = nullptr) {
    OnTypes(a, options, make, [&](const auto& formula, auto types) {
      AddSums<kSumsWeights, typename decltype(types)::T, typename decltype(types)::S>(
          formula, a, block_sums, new_sums, sums);
    });
  }

  // An update by rows of `row_length` elements (RowPassBody), of which states[0] has one number
  // each.
  template <class MakeSquared, class MakeStep>
  void ApplyRows(const UpdateArrays& a, std::uint64_t row_length, const GradientOptions& options,
                 const MakeSquared& make_squared, const MakeStep& make_step) {
    const auto make_both = [&](const auto& gradient) {
      return std::pair(make_squared(gradient), make_step(gradient));
    };
    OnTypes(a, options, make_both, [&](const auto& both, auto types) {
      AddRows<typename decltype(types)::T, typename decltype(types)::S>(both.first, both.second, a,
                                                                        row_length);
    });
  }

  // To be called after the last Apply.
  void Flush() {
    for (auto& [tag, kind] : kinds_) kind->Flush();
    Packer<AddBlocksBody, Launch> packer(launch_);
    for (const AddBlocksBody& body : additions_) packer.Add(body, {.count = 1, .head = 0});
    packer.Flush();
    additions_.clear();
  }

 private:
  struct AnyKind {
    virtual ~AnyKind() = default;
    virtual void Flush() = 0;
  };
  template <class Body>
  struct Kind final : AnyKind {
    explicit Kind(const Launch& launch) : packer(launch) {}
    void Flush() override { packer.Flush(); }

    Packer<Body, Launch> packer;
    static constexpr char kTag = 0;  // its address names the type
  };

  template <typename OneT, typename OneS>
  struct Types {
    using T = OneT;  // of weights and gradients
    using S = OneS;  // of states
  };

  template <class MakeFormula, class Add>
  static void OnTypes(const UpdateArrays& a, const GradientOptions& options,
                      const MakeFormula& make, const Add& add) {
    if (a.dtype == DType::kFloat64) {
      return add(make(one_lane::AnyGradient<double>(options)), Types<double, double>());
    }
    const auto formula = make(one_lane::AnyGradient<float>(options));
    if (a.dtype == DType::kFloat32) {
      add(formula, Types<float, float>());
    } else if (a.dtype == DType::kFloat16 && a.master != nullptr) {
      add(formula, Types<Float16, float>());
    } else if (a.dtype == DType::kFloat16) {
      add(formula, Types<Float16, Float16>());
    } else if (a.master != nullptr) {
      add(formula, Types<BFloat16, float>());
    } else {
      add(formula, Types<BFloat16, BFloat16>());
    }
  }

  template <typename T, typename S, class F>
  static UpdateBody<F, T, S> MakeBody(const F& formula, const UpdateArrays& a, std::uint64_t place,
                                      const double* sums) {
    using Body = UpdateBody<F, T, S>;
    static_assert(std::is_trivially_copyable_v<Body>);
    Body body{.formula = formula,
              .weight = static_cast<T*>(a.weight),
              .gradient = static_cast<const T*>(a.gradient),
              .master = nullptr,
              .states = {},
              .place = place,
              .sums = sums};
    if constexpr (Body::kMaster) body.master = a.master;
    for (int k = 0; k < F::kStates; ++k) body.states[k] = static_cast<S*>(a.states[k]);
    return body;
  }

  template <typename T, typename S, class F>
  void AddApply(const F& formula, const UpdateArrays& a, std::uint64_t place, const double* sums) {
    using Body = UpdateBody<F, T, S>;
    const Body body = MakeBody<T, S>(formula, a, place, sums);
    const auto state = [&](int k) {
      return ArrayAddress{k < F::kStates ? body.states[k] : nullptr, sizeof(S)};
    };
    static_assert(kUpdateStatesMax == 4);
    const Run run = MakeRun(a.count, Body::kLanes,
                            {{a.weight, sizeof(T)},
                             {a.gradient, sizeof(T)},
                             {body.master, sizeof(S)},
                             state(0),
                             state(1),
                             state(2),
                             state(3)});
    KindOf<Body>().packer.Add(body, run);
  }

  template <bool kSumsWeights, typename T, typename S, class F>
  void AddSums(const F& formula, const UpdateArrays& a, double* const* block_sums, double* new_sums,
               const double* sums) {
    using Body = SumPassBody<F, T, S, kSumsWeights>;
    Body body{.arrays = MakeBody<T, S>(formula, a, 0, sums), .block_sums = {}};
    const std::uint64_t blocks = ReductionBlocks(a.count);
    for (int k = 0; k < Body::kSums; ++k) {
      body.block_sums[k] = block_sums[k];
      additions_.push_back({block_sums[k], blocks, new_sums + k});
    }
    KindOf<Body>().packer.Add(body, {.count = a.count, .head = 0},
                              (blocks + kBlockWarps - 1) / kBlockWarps);
  }

  template <typename T, typename S, class Squared, class Step>
  void AddRows(const Squared& squared, const Step& step, const UpdateArrays& a,
               std::uint64_t row_length) {
    if (a.count == 0) return;
    using Body = RowPassBody<Squared, Step, T, S>;
    const Body body{.squared = squared,
                    .step = MakeBody<T, S>(step, a, 0, nullptr),
                    .states = static_cast<S*>(a.states[0]),
                    .row_length = row_length};
    const std::uint64_t rows = a.count / row_length;
    KindOf<Body>().packer.Add(body, {.count = rows, .head = 0},
                              (rows + kBlockWarps - 1) / kBlockWarps);
  }

  template <class Body>
  Kind<Body>& KindOf() {
    for (auto& [tag, kind] : kinds_) {
      if (tag == &Kind<Body>::kTag) return static_cast<Kind<Body>&>(*kind);
    }
    kinds_.emplace_back(&Kind<Body>::kTag, std::make_unique<Kind<Body>>(launch_));
    return static_cast<Kind<Body>&>(*kinds_.back().second);
  }

  const Launch& launch_;
  std::vector<std::pair<const void*, std::unique_ptr<AnyKind>>> kinds_;
  std::vector<AddBlocksBody> additions_;  // after all sums of blocks
};

}  // namespace heddle::ops::cuda
