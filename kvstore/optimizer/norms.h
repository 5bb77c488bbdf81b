// Numbers that optimizers make of norms.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "kvstore/optimizer/update_rule.h"
#include "ops/cuda/host_device.h"
#include "ops/reduce.h"

namespace heddle::kvstore {

// The root of the sum of squares, at least `lower` and at most `upper` unless these are 0.
HEDDLE_HOST_DEVICE double BoundedNorm(double squares, double lower, double upper) {
  double norm = std::sqrt(squares);
  if (lower > 0) norm = std::max(norm, lower);
  if (upper > 0) norm = std::min(norm, upper);
  return norm;
}

// 1 if either norm is 0.
HEDDLE_HOST_DEVICE double TrustRatio(double weight_norm, double direction_norm) {
  return weight_norm == 0 || direction_norm == 0 ? 1 : weight_norm / direction_norm;
}

// Block sums of the squares of the run's weights: of the master copy, if there is one.
inline void SumWeights(const internal::UpdateRun& run, double* blocks) {
  if (run.master != nullptr) {
    ops::SquaredNormBlocks(DType::kFloat32, run.master, run.count, blocks);
  } else {
    ops::SquaredNormBlocks(run.dtype, run.weight, run.count, blocks);
  }
}

inline void SumGradients(const internal::UpdateRun& run, double* blocks) {
  ops::SquaredNormBlocks(run.dtype, run.gradient, run.count, blocks);
}

}  // namespace heddle::kvstore
