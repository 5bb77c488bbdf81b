#include "ops/cuda/elementwise.h"
#include "ops/cuda/elementwise_plan.h"
#include "ops/cuda/launch.cuh"

namespace heddle::ops::cuda {

namespace {

void Launch(BinaryOp op, DType dtype, const void* a, Scalar a_number, const void* b,
            Scalar b_number, void* out, std::size_t count, Stream stream) {
  PlanBinary(op, dtype, a, a_number, b, b_number, out, count,
             [&](const auto& table) { LaunchTable("elementwise", table, stream); });
}

}  // namespace

void Binary(BinaryOp op, DType dtype, const void* a, const void* b, void* out, std::size_t count,
            Stream stream) {
  Launch(op, dtype, a, 0, b, 0, out, count, stream);
}

void BinaryWithScalar(BinaryOp op, DType dtype, const void* a, Scalar b, void* out,
                      std::size_t count, Stream stream) {
  Launch(op, dtype, a, 0, nullptr, b, out, count, stream);
}

void BinaryWithScalar(BinaryOp op, DType dtype, Scalar a, const void* b, void* out,
                      std::size_t count, Stream stream) {
  Launch(op, dtype, nullptr, a, b, 0, out, count, stream);
}

}  // namespace heddle::ops::cuda
