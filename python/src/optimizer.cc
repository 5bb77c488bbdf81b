// heddle._core.Optimizer: a built-in optimizer and its parameters.
#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/optimizer.h>
#include <heddle/schedule.h>

#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "engine/may_wait.h"
#include "kvstore/optimizer/foreign.h"
#include "kvstore/optimizer_states.h"
#include "python/src/array_updater.h"
#include "python/src/bindings.h"
#include "python/src/keys.h"
#include "storage/array_ops.h"

namespace heddle::python {

namespace {

WarmUp ToWarmUp(std::int64_t steps, double begin_rate, bool is_constant) {
  return {.steps = steps, .begin_rate = begin_rate, .is_constant = is_constant};
}

// The class of heddle.lr_scheduler that makes the schedule, and the arguments that it takes for it.
nb::typed<nb::tuple, std::string, nb::dict> Describe(const LearningRateSchedule& schedule) {
  nb::dict arguments;
  const auto name = [&](const auto& s) {
    using Kind = std::decay_t<decltype(s)>;
    arguments["base_lr"] = s.base_rate;
    arguments["warmup_steps"] = s.warm_up.steps;
    arguments["warmup_begin_lr"] = s.warm_up.begin_rate;
    arguments["warmup_mode"] = s.warm_up.is_constant ? "constant" : "linear";
    if constexpr (std::is_same_v<Kind, FactorSchedule>) {
      arguments["step"] = s.step;
      arguments["factor"] = s.factor;
      arguments["stop_factor_lr"] = s.stop_rate;
      return "FactorScheduler";
    } else if constexpr (std::is_same_v<Kind, MultiFactorSchedule>) {
      arguments["step"] = s.steps;
      arguments["factor"] = s.factor;
      return "MultiFactorScheduler";
    } else if constexpr (std::is_same_v<Kind, PolySchedule>) {
      arguments["max_update"] = s.max_update;
      arguments["pwr"] = s.power;
      arguments["final_lr"] = s.final_rate;
      return "PolyScheduler";
    } else {
      static_assert(std::is_same_v<Kind, CosineSchedule>);
      arguments["max_update"] = s.max_update;
      arguments["final_lr"] = s.final_rate;
      return "CosineScheduler";
    }
  };
  const char* const kind = std::visit(name, schedule);
  return nb::typed<nb::tuple, std::string, nb::dict>(nb::make_tuple(kind, arguments));
}

// Whose locks may be held for ever in a child of fork().
Optimizer& Live(const PyOptimizer& self) {
  engine::CheckNotForked("an optimizer");
  return *self.optimizer;
}

// (key, multiplier of the learning rate, of the weight decay) of each key that was given some.
nb::list MultipliersOf(const PyOptimizer& self) {
  nb::list all;
  for (const auto& one : kvstore::SettingsOf(Live(self)).multipliers) {
    all.append(nb::make_tuple(FromKey(one.key), one.learning_rate, one.weight_decay));
  }
  return all;
}

// Holds the weights that its states were made for.
struct PyUpdater {
  explicit PyUpdater(const PyOptimizer& of)
      : updater(std::make_unique<ArrayUpdater>(of.optimizer)) {}
  ~PyUpdater() {
    const Unlocked unlocked;
    updater.reset();
  }
  std::unique_ptr<ArrayUpdater> updater;
};

template <class Gradient>
void UpdateBy(const PyUpdater& self, nb::handle key, const Gradient& gradient,
              const PyArray& weight, std::optional<double> learning_rate,
              std::optional<double> weight_decay) {
  const KeyRef one = ToKey("Updater", key);
  const NDArray& written = Writable("Updater", weight);
  const Blocking blocking;
  self.updater->Update(one, gradient.array, written,
                       {.learning_rate = learning_rate, .weight_decay = weight_decay});
}

void UpdateRows(const PyUpdater& self, nb::handle key, const PyRowSparse& gradient,
                const PyRowSparse& weight, std::optional<double> learning_rate,
                std::optional<double> weight_decay) {
  const KeyRef one = ToKey("Updater", key);
  const Blocking blocking;
  self.updater->Update(one, gradient.array, weight.array,
                       {.learning_rate = learning_rate, .weight_decay = weight_decay});
}

// Whether an array has failed; waits for its pending writes to know. False in the body of an op,
// which must not wait. Not by a wait on the array itself: the failure would count as seen.
template <class Array>
bool HasFailed(const Array& array) {
  const Blocking blocking;
  try {
    engine::CheckMayWait("has_failed");
  } catch (const InvalidState&) {
    return false;
  }
  Engine& engine = array.engine();
  const Var looked = engine.NewVar("HasFailed");
  const auto failed = std::make_shared<bool>(false);  // by the op and its waiter
  engine.Push(
      {.name = "HasFailed", .reads = {array.var()}, .writes = {looked}, .run_when_poisoned = true},
      [array, failed] { *failed = array.engine().ErrorOf(array.var()) != nullptr; });
  engine.WaitForVar(looked);
  return *failed;
}

// If the sum fails, so do the arrays, before the ops to come touch them: these leave them as they
// are.
template <class Gradient>
void FailWith(const Gradient& sum, const std::vector<NDArray>& arrays) {
  const Blocking blocking;
  std::vector<VarRef> vars;
  for (const NDArray& array : arrays) vars.push_back(array.var());
  sum.array.engine().Push({.name = "FailWith", .reads = {sum.array.var()}, .writes = vars}, [] {});
}

// Whether the array has failed with the sum. Throws another failure of it.
template <class Array>
bool FailedWith(const Array& sum, const NDArray& array) {
  const Engine& engine = array.engine();
  std::exception_ptr error = engine.ErrorOf(array.var());
  if (error == nullptr) return false;
  if (error != engine.ErrorOf(sum.var())) std::rethrow_exception(std::move(error));
  return true;
}

// Cures an array that has failed with the sum, in which so no op has written.
template <class Gradient>
void Cure(const Gradient& sum, const NDArray& array) {
  const Blocking blocking;
  array.engine().Push({.name = "Cure",
                       .reads = {sum.array.var(), array.var()},
                       .writes = {array.var()},
                       .run_when_poisoned = true},
                      [sum = sum.array, array] { FailedWith(sum, array); });
}

// What ops that failed with the sum were to make has the values of `before` instead. On GPUs, or if
// these are of another size, it is left alone.
template <class Gradient>
void Restore(const Gradient& sum, const NDArray& array, const NDArray& before) {
  if (storage::IsOnGpu(array) || storage::IsOnGpu(before) || array.bytes() != before.bytes())
    return;
  const Blocking blocking;
  array.engine().Push({.name = "Restore",
                       .reads = {sum.array.var(), before.var(), array.var()},
                       .writes = {array.var()},
                       .run_when_poisoned = true},
                      [sum = sum.array, array, before] {
                        if (!FailedWith(sum, array)) return;
                        if (const auto error = array.engine().ErrorOf(before.var())) {
                          std::rethrow_exception(error);
                        }
                        std::memcpy(array.data(), before.const_data(),
                                    static_cast<std::size_t>(array.bytes()));
                      });
}

std::vector<NDArray> ArraysOf(const std::vector<const PyArray*>& arrays) {
  std::vector<NDArray> found;
  for (const PyArray* const array : arrays) found.push_back(array->array);
  return found;
}

using Named = std::vector<std::pair<std::string, double>>;
// A key, its shape and its dtype.
using Forms = std::vector<std::tuple<nb::object, std::vector<std::int64_t>, int>>;

}  // namespace

void BindOptimizer(nb::module_& m) {
  nb::class_<LearningRateSchedule>(m, "Schedule")
      .def("__call__",
           [](const LearningRateSchedule& self, std::int64_t n) { return RateAt(self, n); })
      .def("describe", &Describe);
  const auto checked = [](LearningRateSchedule schedule) {
    CheckSchedule(schedule);
    return schedule;
  };
  m.def("factor_schedule", [=](std::int64_t step, double factor, double stop_rate, double base_rate,
                               std::int64_t warm_up, double begin_rate, bool is_constant) {
    return checked(FactorSchedule{.step = step,
                                  .factor = factor,
                                  .stop_rate = stop_rate,
                                  .base_rate = base_rate,
                                  .warm_up = ToWarmUp(warm_up, begin_rate, is_constant)});
  });
  m.def("multi_factor_schedule", [=](const std::vector<std::int64_t>& steps, double factor,
                                     double base_rate, std::int64_t warm_up, double begin_rate,
                                     bool is_constant) {
    return checked(MultiFactorSchedule{.steps = steps,
                                       .factor = factor,
                                       .base_rate = base_rate,
                                       .warm_up = ToWarmUp(warm_up, begin_rate, is_constant)});
  });
  m.def("poly_schedule",
        [=](std::int64_t max_update, double power, double final_rate, double base_rate,
            std::int64_t warm_up, double begin_rate, bool is_constant) {
          return checked(PolySchedule{.max_update = max_update,
                                      .power = power,
                                      .final_rate = final_rate,
                                      .base_rate = base_rate,
                                      .warm_up = ToWarmUp(warm_up, begin_rate, is_constant)});
        });
  m.def("cosine_schedule", [=](std::int64_t max_update, double final_rate, double base_rate,
                               std::int64_t warm_up, double begin_rate, bool is_constant) {
    return checked(CosineSchedule{.max_update = max_update,
                                  .final_rate = final_rate,
                                  .base_rate = base_rate,
                                  .warm_up = ToWarmUp(warm_up, begin_rate, is_constant)});
  });

  nb::class_<PyOptimizer>(m, "Optimizer")
      .def_prop_ro("name",
                   [](const PyOptimizer& self) { return std::string(self.optimizer->name()); })
      .def("get", [](const PyOptimizer& self,
                     const std::string& parameter) { return Live(self).Get(parameter); })
      .def("set", [](const PyOptimizer& self, const std::string& parameter,
                     double value) { Live(self).Set(parameter, value); })
      .def("parameters",
           [](const PyOptimizer& self) {
             Named named;
             for (const auto& [name, value] : Live(self).Parameters()) {
               named.emplace_back(name, value);
             }
             return named;
           })
      .def(
          "set_schedule",
          [](const PyOptimizer& self, nb::handle schedule) {
            Live(self).SetSchedule(schedule.is_none() ? std::optional<LearningRateSchedule>()
                                                      : nb::cast<LearningRateSchedule>(schedule));
          },
          nb::arg("schedule").none())
      .def("schedule", [](const PyOptimizer& self) { return Live(self).schedule(); })
      .def("multipliers", &MultipliersOf)
      .def("set_lr_mult",
           [](const PyOptimizer& self, nb::handle key, double multiplier) {
             Live(self).SetLearningRateMultiplier(ToKey("set_lr_mult", key), multiplier);
           })
      .def("set_wd_mult", [](const PyOptimizer& self, nb::handle key, double multiplier) {
        Live(self).SetWeightDecayMultiplier(ToKey("set_wd_mult", key), multiplier);
      });
  nb::class_<PyUpdater>(m, "Updater")
      .def(nb::init<const PyOptimizer&>())
      .def("update", &UpdateBy<PyArray>, nb::arg("key"), nb::arg("gradient"), nb::arg("weight"),
           nb::arg("learning_rate") = nb::none(), nb::arg("weight_decay") = nb::none())
      .def("update", &UpdateBy<PyRowSparse>, nb::arg("key"), nb::arg("gradient"), nb::arg("weight"),
           nb::arg("learning_rate") = nb::none(), nb::arg("weight_decay") = nb::none())
      .def("update", &UpdateRows, nb::arg("key"), nb::arg("gradient"), nb::arg("weight"),
           nb::arg("learning_rate") = nb::none(), nb::arg("weight_decay") = nb::none())
      .def("forget",
           [](const PyUpdater& self, nb::handle key) {
             const KeyRef one = ToKey("Updater", key);
             const Blocking blocking;
             self.updater->Forget(one);
           })
      .def("save_states",
           [](const PyUpdater& self, const std::string& file, Flag with_optimizer) {
             const Blocking blocking;
             self.updater->SaveStates(file, with_optimizer.value);
           })
      .def(
          "load_states",
          [](const PyUpdater& self, const std::string& file, const std::optional<Forms>& given) {
            std::vector<kvstore::KeyForm> forms;
            for (const auto& [key, shape, dtype] : given.value_or(Forms())) {
              forms.push_back({.key = ToKey("Updater", key).ToKey(),
                               .shape = ToShape(shape),
                               .dtype = ToDType(dtype)});
            }
            const Blocking blocking;
            self.updater->LoadStates(file, TheEngine(), given ? &forms : nullptr);
          },
          nb::arg("file"), nb::arg("forms").none())
      .def("counts", [](const PyUpdater& self) {
        engine::CheckNotForked("Updater");
        nb::list counts;
        for (const auto& [key, count] : self.updater->Counts()) {
          counts.append(nb::make_tuple(FromKey(key), count));
        }
        return counts;
      });
  m.def("make_optimizer", [](const std::string& name, const Named& parameters) {
    std::vector<std::pair<std::string_view, double>> borrowed(parameters.begin(), parameters.end());
    return PyOptimizer{MakeOptimizer(name, borrowed)};
  });
  // What stands at workers for an optimizer that their servers have.
  m.def("make_foreign_optimizer", [](const std::string& name, const Named& parameters) {
    return PyOptimizer{kvstore::MakeForeignOptimizer(name, parameters)};
  });
  m.def("has_failed", [](const PyArray& array) { return HasFailed(array.array); });
  m.def("has_failed", [](const PyRowSparse& array) { return HasFailed(array.array); });
  m.def("fail_with", [](const PyArray& sum, const std::vector<const PyArray*>& arrays) {
    FailWith(sum, ArraysOf(arrays));
  });
  m.def("fail_with", [](const PyRowSparse& sum, const std::vector<const PyArray*>& arrays) {
    FailWith(sum, ArraysOf(arrays));
  });
  m.def("cure", [](const PyArray& sum, const PyArray& array) { Cure(sum, array.array); });
  m.def("cure", [](const PyRowSparse& sum, const PyArray& array) { Cure(sum, array.array); });
  m.def("restore", [](const PyArray& sum, const PyArray& array, const PyArray& before) {
    Restore(sum, array.array, before.array);
  });
  m.def("restore", [](const PyRowSparse& sum, const PyArray& array, const PyArray& before) {
    Restore(sum, array.array, before.array);
  });
  m.def("optimizer_names", [] {
    std::vector<std::string> names;
    for (std::string_view name : OptimizerNames()) names.emplace_back(name);
    return names;
  });
}

}  // namespace heddle::python
