// heddle._core.Optimizer: a built-in optimizer and its parameters.
#include <heddle/error.h>
#include <heddle/optimizer.h>
#include <heddle/schedule.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "kvstore/optimizer/foreign.h"
#include "kvstore/optimizer_states.h"
#include "python/src/array_updater.h"
#include "python/src/bindings.h"
#include "python/src/keys.h"

namespace heddle::python {

namespace {

WarmUp ToWarmUp(std::int64_t steps, double begin_rate, bool is_constant) {
  return {.steps = steps, .begin_rate = begin_rate, .is_constant = is_constant};
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

using Named = std::vector<std::pair<std::string, double>>;
// A key, its shape and its dtype.
using Forms = std::vector<std::tuple<nb::object, std::vector<std::int64_t>, int>>;

}  // namespace

void BindOptimizer(nb::module_& m) {
  nb::class_<LearningRateSchedule>(m, "Schedule")
      .def("__call__",
           [](const LearningRateSchedule& self, std::int64_t n) { return RateAt(self, n); });
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
                     const std::string& parameter) { return self.optimizer->Get(parameter); })
      .def("set", [](const PyOptimizer& self, const std::string& parameter,
                     double value) { self.optimizer->Set(parameter, value); })
      .def("parameters",
           [](const PyOptimizer& self) {
             Named named;
             for (const auto& [name, value] : self.optimizer->Parameters()) {
               named.emplace_back(name, value);
             }
             return named;
           })
      .def(
          "set_schedule",
          [](const PyOptimizer& self, nb::handle schedule) {
            self.optimizer->SetSchedule(schedule.is_none()
                                            ? std::optional<LearningRateSchedule>()
                                            : nb::cast<LearningRateSchedule>(schedule));
          },
          nb::arg("schedule").none())
      .def("set_lr_mult",
           [](const PyOptimizer& self, nb::handle key, double multiplier) {
             self.optimizer->SetLearningRateMultiplier(ToKey("set_lr_mult", key), multiplier);
           })
      .def("set_wd_mult", [](const PyOptimizer& self, nb::handle key, double multiplier) {
        self.optimizer->SetWeightDecayMultiplier(ToKey("set_wd_mult", key), multiplier);
      });
  nb::class_<PyUpdater>(m, "Updater")
      .def(nb::init<const PyOptimizer&>())
      .def("update",
           [](const PyUpdater& self, nb::handle key, const PyArray& gradient,
              const PyArray& weight) {
             const KeyRef one = ToKey("Updater", key);
             const NDArray& written = Writable("Updater", weight);
             const Blocking blocking;
             self.updater->Update(one, gradient.array, written);
           })
      .def("forget",
           [](const PyUpdater& self, nb::handle key) {
             const KeyRef one = ToKey("Updater", key);
             const Unlocked unlocked;
             self.updater->Forget(one);
           })
      .def("save_states",
           [](const PyUpdater& self, const std::string& file, bool with_optimizer) {
             const Blocking blocking;
             self.updater->SaveStates(file, with_optimizer);
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
  m.def("optimizer_names", [] {
    std::vector<std::string> names;
    for (std::string_view name : OptimizerNames()) names.emplace_back(name);
    return names;
  });
}

}  // namespace heddle::python
