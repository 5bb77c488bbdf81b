// Updates on a GPU against those of the CPU. emulated_update_test.cc has the thorough comparisons
// of what threads do; here the compiler and the hardware do it.
#include <heddle/error.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "kvstore/optimizer/cuda/update.h"
#include "kvstore/optimizer/foreign.h"
#include "tests/kvstore/cuda/update_values.h"
#include "tests/kvstore/gpu_optimizers.h"
#include "tests/ops/cuda/device_array.h"

namespace heddle::kvstore::cuda {
namespace {

class GpuUpdateTest : public ops::cuda::GpuKernelTest {
 protected:
  template <typename T>
  void CompareWithCpu(std::string_view optimizer, bool multi_precision) {
    const RulePtr rule = MakeRuleOf(optimizer, {{"momentum", 0.9}, {"clip_gradient", 0.5}});
    SCOPED_TRACE(optimizer);
    const std::size_t row_length = rule->by_rows() ? 1 + Below(5000) : 1;
    const std::size_t elements = Below(2) == 0 ? Below(200000) : RandomCount();
    const std::size_t count = (elements + row_length - 1) / row_length * row_length;
    Value<T> value(count, 0, multi_precision, random_);
    internal::KeyUpdate update = {};
    update.learning_rate = 0.1;
    update.weight_decay = 0.01;
    update.step = 2;
    update.row_length = static_cast<std::int64_t>(row_length);
    update.numbers = {0.8, 0.1};
    const int passes = rule->Begin(update);
    internal::UpdateRun run = value.Run(*rule, update);
    const std::size_t offset = Below(3);
    ops::cuda::DeviceArray<T> weight(value.weight, offset);
    ops::cuda::DeviceArray<T> gradient(value.gradient, offset);
    ops::cuda::DeviceArray<float> master(*value.master, offset);
    std::vector<std::unique_ptr<ops::cuda::DeviceArray<T>>> states;
    std::vector<std::unique_ptr<ops::cuda::DeviceArray<float>>> wide_states;
    internal::UpdateRun gpu_run = run;
    gpu_run.weight = weight.data();
    gpu_run.gradient = gradient.data();
    if (multi_precision) gpu_run.master = master.data();
    for (std::size_t k = 0; k < rule->num_states(); ++k) {
      states.push_back(std::make_unique<ops::cuda::DeviceArray<T>>(*value.states[k], offset));
      wide_states.push_back(
          std::make_unique<ops::cuda::DeviceArray<float>>(*value.wide_states[k], offset));
      gpu_run.states[k] = multi_precision ? static_cast<void*>(wide_states[k]->data())
                                          : static_cast<void*>(states[k]->data());
    }
    ops::Array<double> scratch(ScratchBytes({&gpu_run, 1}, passes) / sizeof(double));
    ops::cuda::DeviceArray<double> gpu_scratch(scratch);
    Update(*rule, {&gpu_run, 1}, {passes, 0, passes}, gpu_scratch.data(), nullptr);
    UpdateOnCpu(*rule, run, update, passes);
    ops::Array<T> actual(value.weight.size());
    weight.CopyTo(actual);
    for (std::size_t i = 0; i < actual.size(); ++i) {
      const double expected = ops::ToDouble(value.weight[i]);
      // sgld's noise is not the same in its last bits, which may round a 16-bit weight otherwise.
      const double relative = optimizer == "sgld" ? (sizeof(T) == 2 ? 0x1p-7 : 1e-6) : 0;
      ASSERT_NEAR(ops::ToDouble(actual[i]), expected, relative * std::max(1.0, std::abs(expected)))
          << "weight " << i << " of " << actual.size();
    }
    for (std::size_t k = 0; k < rule->num_states(); ++k) {
      states[k]->ExpectSameAs(*value.states[k], "state");
      wide_states[k]->ExpectSameAs(*value.wide_states[k], "state");
    }
  }
};

TEST_F(GpuUpdateTest, EqualsTheCpuForEveryOptimizer) {
  for (std::string_view optimizer : kvstore_test::GpuOptimizerNames()) {
    CompareWithCpu<float>(optimizer, false);
    CompareWithCpu<double>(optimizer, false);
    CompareWithCpu<Float16>(optimizer, false);
    CompareWithCpu<BFloat16>(optimizer, true);
  }
}

// Needs no GPU: nothing is launched.
TEST(GpuUpdate, AnOptimizerWithoutKernelsIsAnError) {
  const RulePtr rule = MakeForeignOptimizer("theirs", {})->plan()->rule;
  EXPECT_FALSE(HasKernels(*rule));
  const internal::UpdateRun run = {};
  EXPECT_THROW(Update(*rule, {&run, 1}, {1, 0, 1}, nullptr, nullptr), InvalidState);
}

}  // namespace
}  // namespace heddle::kvstore::cuda
