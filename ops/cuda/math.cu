#include "ops/cuda/launch.cuh"
#include "ops/cuda/math.h"
#include "ops/cuda/math_plan.h"

namespace heddle::ops::cuda {

namespace {

void LaunchPair(PairOp op, DType dtype, const void* a, Scalar a_number, const void* b,
                Scalar b_number, void* out, std::size_t count, Stream stream) {
  PlanPair(op, dtype, a, a_number, b, b_number, out, count,
           [&](const auto& table) { LaunchTable("function of two numbers", table, stream); });
}

}  // namespace

void Unary(UnaryOp op, DType dtype, const void* a, void* out, std::size_t count, Stream stream) {
  PlanUnary(op, dtype, a, out, count,
            [&](const auto& table) { LaunchTable("function of a number", table, stream); });
}

void Pair(PairOp op, DType dtype, const void* a, const void* b, void* out, std::size_t count,
          Stream stream) {
  LaunchPair(op, dtype, a, 0, b, 0, out, count, stream);
}

void PairWithScalar(PairOp op, DType dtype, const void* a, Scalar b, void* out, std::size_t count,
                    Stream stream) {
  LaunchPair(op, dtype, a, 0, nullptr, b, out, count, stream);
}

void PairWithScalar(PairOp op, DType dtype, Scalar a, const void* b, void* out, std::size_t count,
                    Stream stream) {
  LaunchPair(op, dtype, nullptr, a, b, 0, out, count, stream);
}

}  // namespace heddle::ops::cuda
