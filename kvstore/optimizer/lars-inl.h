// The numbers of kvstore/optimizer/lars.cc; its formula is that of sgd_formulas-inl.h.
#pragma once

#include <cmath>
#include <string_view>

#include "kvstore/optimizer/update_rule.h"
#include "ops/cuda/host_device.h"
#include "ops/update.h"

namespace heddle::kvstore {

struct LarsNumbers {
  ops::GradientOptions gradient;
  double momentum;
  double eta;
  double epsilon;
  bool corrects;  // the momentum

  static bool IsScaled(std::string_view key) {
    return !key.ends_with("gamma") && !key.ends_with("beta") && !key.ends_with("bias");
  }
  double MomentumOf(const internal::KeyUpdate& update) const {
    return corrects ? momentum * update.numbers[1] : momentum;
  }
  // By what the learning rate is multiplied, for the sums of squares of weights and gradients.
  HEDDLE_HOST_DEVICE double Scale(const double* sums, double weight_decay) const {
    const double weight_norm = std::sqrt(sums[0]);
    const double gradient_norm = std::abs(gradient.rescale) * std::sqrt(sums[1]);
    if (!(weight_norm > 0 && gradient_norm > 0)) return 1;
    return eta * weight_norm / (gradient_norm + weight_decay * weight_norm + epsilon);
  }
};

}  // namespace heddle::kvstore
