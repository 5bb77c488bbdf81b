// Comparisons and functions of elements on a GPU: what its threads do, and the launch that an
// operation takes. Bools are computed as the bytes that they are stored in, as on the CPU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ops/cuda/copy_plan.h"
#include "ops/cuda/host_device.h"
#include "ops/cuda/math.h"
#include "ops/cuda/pack.h"
#include "ops/cuda/run.h"
#include "ops/cuda/side.h"
#include "ops/cuda/table.h"
#include "ops/dispatch.h"
#include "ops/math_op.h"

namespace heddle::ops::cuda {

// 16 elements a thread at most: some of these functions are long.
template <typename S>
inline constexpr int kMathUnroll = std::clamp(16 * static_cast<int>(sizeof(S)) / kAccessBytes, 1,
                                              4);

template <typename S>
struct UnaryBody {
  using C = ComputeType<S>;
  static constexpr int kLanes = kAccessBytes / sizeof(S);
  static constexpr int kUnroll = kMathUnroll<S>;

  template <int kWidth, int kVectors>
  HEDDLE_HOST_DEVICE void operator()(std::uint64_t first, std::uint64_t step) const {
    Pack<S, kWidth> packs[kVectors];
    HEDDLE_UNROLL
    for (int v = 0; v < kVectors; ++v) packs[v] = LoadPack<kWidth>(a + first + v * step);
    DispatchUnaryOp(op, [&](auto constant) {
      constexpr UnaryOp kOp = decltype(constant)::value;
      HEDDLE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        HEDDLE_UNROLL
        for (int i = 0; i < kWidth; ++i) {
          packs[v].lanes[i] = Narrow<S>(ApplyUnary<kOp>(Widen(packs[v].lanes[i])));
        }
      }
    });
    HEDDLE_UNROLL
    for (int v = 0; v < kVectors; ++v) StorePack(packs[v], out + first + v * step);
  }

  UnaryOp op;
  const S* a;
  S* out;
};

// What apply(x, y) says of each of a thread's elements; `out`: where those of its first vector go.
template <typename O, typename C, int kVectors, int kWidth, typename Apply>
HEDDLE_HOST_DEVICE void StoreOfBoth(const C (&x)[kVectors][kWidth], const C (&y)[kVectors][kWidth],
                                    O* out, std::uint64_t step, const Apply& apply) {
  HEDDLE_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    Pack<O, kWidth> pack;
    HEDDLE_UNROLL
    for (int i = 0; i < kWidth; ++i) pack.lanes[i] = apply(x[v][i], y[v][i]);
    StorePack(pack, out + v * step);
  }
}

template <typename S>
struct PairBody {
  using C = ComputeType<S>;
  static constexpr int kLanes = kAccessBytes / sizeof(S);
  static constexpr int kUnroll = kMathUnroll<S>;

  template <int kWidth, int kVectors>
  HEDDLE_HOST_DEVICE void operator()(std::uint64_t first, std::uint64_t step) const {
    C x[kVectors][kWidth];
    C y[kVectors][kWidth];
    a.Load(first, step, x);
    b.Load(first, step, y);
    DispatchPairOp(op, [&](auto constant) {
      constexpr PairOp kOp = decltype(constant)::value;
      StoreOfBoth(x, y, out + first, step,
                  [](C p, C q) { return Narrow<S>(ApplyPair<kOp>(p, q)); });
    });
  }

  PairOp op;
  Side<S, C> a;
  Side<S, C> b;
  S* out;
};

// Elements of S compared as C.
template <typename S, typename C>
struct CompareBody {
  static constexpr int kLanes = kAccessBytes / sizeof(S);
  static constexpr int kUnroll = kMathUnroll<S>;

  template <int kWidth, int kVectors>
  HEDDLE_HOST_DEVICE void operator()(std::uint64_t first, std::uint64_t step) const {
    C x[kVectors][kWidth];
    C y[kVectors][kWidth];
    a.Load(first, step, x);
    b.Load(first, step, y);
    DispatchCompareOp(op, [&](auto constant) {
      constexpr CompareOp kOp = decltype(constant)::value;
      StoreOfBoth(x, y, out + first, step, [](C p, C q) { return Holds<kOp>(p, q); });
    });
  }

  CompareOp op;
  Side<S, C> a;
  Side<S, C> b;
  std::uint8_t* out;
};

// The functions below call launch(table) unless there are no elements. A null array stands for its
// number.

template <class Launch>
void PlanUnary(UnaryOp op, DType dtype, const void* a, void* out, std::size_t count,
               const Launch& launch) {
  CheckUnary(op, dtype);
  if (dtype == DType::kBool) {  // the negative and the magnitude of a bool: itself
    const CopyTask task{a, out, count};
    return PlanCopies({&task, 1}, launch);
  }
  DispatchDType(dtype, [&](auto type) {
    using S = StorageType<typename decltype(type)::type>;
    Packer<UnaryBody<S>, Launch> packer(launch);
    packer.Add({op, static_cast<const S*>(a), static_cast<S*>(out)},
               MakeRun(count, UnaryBody<S>::kLanes, {{a, sizeof(S)}, {out, sizeof(S)}}));
    packer.Flush();
  });
}

template <class Launch>
void PlanPair(PairOp op, DType dtype, const void* a, Scalar a_number, const void* b,
              Scalar b_number, void* out, std::size_t count, const Launch& launch) {
  DispatchDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using S = StorageType<T>;
    using C = ComputeType<S>;
    Packer<PairBody<S>, Launch> packer(launch);
    packer.Add(
        {op,
         {static_cast<const S*>(a), static_cast<C>(a_number.As<ComputeType<T>>())},
         {static_cast<const S*>(b), static_cast<C>(b_number.As<ComputeType<T>>())},
         static_cast<S*>(out)},
        MakeRun(count, PairBody<S>::kLanes, {{a, sizeof(S)}, {b, sizeof(S)}, {out, sizeof(S)}}));
    packer.Flush();
  });
}

// Integers are compared as int64, or with a number that no int64 equals as float64.
template <class Launch>
void PlanCompare(CompareOp op, DType dtype, const void* a, const void* b, Scalar b_number,
                 std::uint8_t* out, std::size_t count, const Launch& launch) {
  const auto add = [&]<typename S, typename C>(std::type_identity<S>, C number) {
    using Body = CompareBody<S, C>;
    Packer<Body, Launch> packer(launch);
    packer.Add({op, {static_cast<const S*>(a), C()}, {static_cast<const S*>(b), number}, out},
               MakeRun(count, Body::kLanes, {{a, sizeof(S)}, {b, sizeof(S)}, {out, 1}}));
    packer.Flush();
  };
  DispatchDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const std::type_identity<StorageType<T>> stored;
    const Scalar number = b_number.ToCompare();
    if constexpr (!std::is_integral_v<T>) {
      add(stored, static_cast<ComputeType<T>>(b_number.As<T>()));
    } else if (b != nullptr || number.is_integer()) {
      add(stored, number.As<std::int64_t>());
    } else {
      add(stored, number.As<double>());
    }
  });
}

}  // namespace heddle::ops::cuda
