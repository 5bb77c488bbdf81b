// Optimizers: how a store changes a value by the gradients pushed to it.
//
//   auto sgd = heddle::Sgd({.learning_rate = 0.1, .momentum = 0.9});
//   store->SetOptimizer(sgd);
//   sgd->Set("learning_rate", 0.01);  // counts from the next push on
#pragma once

#include <heddle/key.h>
#include <heddle/schedule.h>

#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace heddle {

namespace internal {
struct UpdatePlan;  // kvstore/optimizer/update_plan.h
}

// An optimizer's name and the parameters that it has now. Serves any number of stores; each keeps
// the state (momentum, ...) of its own keys.
// Threads: all methods, any thread.
class Optimizer {
 public:
  Optimizer() = default;
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  virtual std::string_view name() const = 0;  // "sgd"
  // InvalidArgument for an unknown parameter (naming the nearest known one), a value out of its
  // range, or one that is fixed once the optimizer is made (multi_precision).
  virtual double Get(std::string_view parameter) const = 0;
  virtual void Set(std::string_view parameter, double value) = 0;
  virtual std::vector<std::pair<std::string_view, double>> Parameters() const = 0;

  // The schedule sets the learning rate in place of the parameter, which then cannot be set:
  // InvalidState. Null goes back to the parameter. InvalidArgument as CheckSchedule.
  virtual void SetSchedule(std::optional<LearningRateSchedule> schedule) = 0;
  virtual std::optional<LearningRateSchedule> schedule() const = 0;

  // By what learning rate and weight decay are multiplied for one key, in every store; 1 where it
  // was never set. InvalidArgument for negative numbers and those that are not finite.
  virtual void SetLearningRateMultiplier(KeyRef key, double multiplier) = 0;
  virtual void SetWeightDecayMultiplier(KeyRef key, double multiplier) = 0;

  // For heddle itself: how to update with the parameters as they are now.
  virtual std::shared_ptr<const internal::UpdatePlan> plan() const = 0;
};

using OptimizerPtr = std::shared_ptr<Optimizer>;

// Common to the optimizers below, for weight w and pushed sum g; clip(x) limits x to
// [-clip_gradient, clip_gradient], and 0 turns it off. With multi_precision a float16 or bfloat16
// value is updated through a float32 copy of it, kept by the store, and the state is float32. With
// lazy_update a row-sparse gradient changes only the rows that it has, states included; else its
// missing rows count as zeros.
//
// m = momentum * m - learning_rate * (weight_decay * w + clip(rescale_grad * g));  w += m.
struct SgdOptions {
  double learning_rate = 0.01;
  double momentum = 0;  // in [0, 1)
  double weight_decay = 0;
  double rescale_grad = 1;
  double clip_gradient = 0;
  bool lazy_update = true;
  bool multi_precision = false;
};
OptimizerPtr Sgd(const SgdOptions& options = {});

// G = clip(rescale_grad * g + weight_decay * w), and for the t-th update of the key
// m = beta1 * m + (1 - beta1) * G;  v = beta2 * v + (1 - beta2) * G * G;
// w -= learning_rate * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + epsilon).
struct AdamOptions {
  double learning_rate = 0.001;
  double beta1 = 0.9;    // in [0, 1)
  double beta2 = 0.999;  // in [0, 1)
  double epsilon = 1e-8;
  double weight_decay = 0;
  double rescale_grad = 1;
  double clip_gradient = 0;
  bool lazy_update = true;
  bool multi_precision = false;
};
OptimizerPtr Adam(const AdamOptions& options = {});

// By name ("sgd", "adam"; case does not matter), with parameters that differ from the defaults.
// InvalidArgument for an unknown name (listing the known ones), an unknown parameter or a value out
// of range.
OptimizerPtr MakeOptimizer(std::string_view name,
                           const std::vector<std::pair<std::string_view, double>>& parameters = {});
std::vector<std::string_view> OptimizerNames();  // sorted

}  // namespace heddle
