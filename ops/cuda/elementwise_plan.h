// Arithmetic on a GPU: what its threads do, and the launch that an operation takes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ops/binary_op.h"
#include "ops/cuda/elementwise.h"
#include "ops/cuda/host_device.h"
#include "ops/cuda/pack.h"
#include "ops/cuda/run.h"
#include "ops/cuda/side.h"
#include "ops/cuda/table.h"
#include "ops/dispatch.h"

namespace heddle::ops::cuda {

template <typename T>
struct BinaryBody {
  using C = ComputeType<T>;
  using S = StorageType<T>;
  static constexpr int kLanes = kAccessBytes / sizeof(T);
  static constexpr int kUnroll = std::min(4, 32 / kLanes);

  template <int kWidth, int kVectors>
  HEDDLE_HOST_DEVICE void operator()(std::uint64_t first, std::uint64_t step) const {
    C x[kVectors][kWidth];
    C y[kVectors][kWidth];
    a.Load(first, step, x);
    b.Load(first, step, y);
    HEDDLE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      Pack<S, kWidth> pack;
      HEDDLE_UNROLL
      for (int i = 0; i < kWidth; ++i) pack.lanes[i] = Apply(x[v][i], y[v][i]);
      StorePack(pack, out + first + v * step);
    }
  }

  HEDDLE_HOST_DEVICE S Apply(C x, C y) const {
    switch (op) {
      case BinaryOp::kAdd:
        return ApplyOp<BinaryOp::kAdd>(x, y);
      case BinaryOp::kSubtract:
        return ApplyOp<BinaryOp::kSubtract>(x, y);
      case BinaryOp::kMultiply:
        return ApplyOp<BinaryOp::kMultiply>(x, y);
      default:
        return ApplyOp<BinaryOp::kDivide>(x, y);
    }
  }
  template <BinaryOp kOp>
  static HEDDLE_HOST_DEVICE S ApplyOp(C x, C y) {
    if constexpr (std::is_same_v<T, bool>) {
      return ApplyBool<kOp>(x, y);
    } else if constexpr (std::is_integral_v<T>) {
      return ApplyInteger<kOp>(x, y);
    } else if constexpr (kOp == BinaryOp::kAdd) {
      return Narrow<S>(x + y);
    } else if constexpr (kOp == BinaryOp::kSubtract) {
      return Narrow<S>(x - y);
    } else if constexpr (kOp == BinaryOp::kMultiply) {
      return Narrow<S>(x * y);
    } else {
      return Narrow<S>(x / y);
    }
  }

  BinaryOp op;
  Side<S, C> a;
  Side<S, C> b;
  S* out;
};

// Calls launch(table) unless there are no elements. A null array stands for its number.
template <class Launch>
void PlanBinary(BinaryOp op, DType dtype, const void* a, Scalar a_number, const void* b,
                Scalar b_number, void* out, std::size_t count, const Launch& launch) {
  DispatchDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using Body = BinaryBody<T>;
    using S = typename Body::S;
    using C = typename Body::C;
    Packer<Body, Launch> packer(launch);
    packer.Add({op,
                {static_cast<const S*>(a), a_number.As<C>()},
                {static_cast<const S*>(b), b_number.As<C>()},
                static_cast<S*>(out)},
               MakeRun(count, Body::kLanes, {{a, sizeof(T)}, {b, sizeof(T)}, {out, sizeof(T)}}));
    packer.Flush();
  });
}

}  // namespace heddle::ops::cuda
