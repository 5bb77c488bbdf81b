// The roles of a distributed job that are no workers.
#include <heddle/dist.h>

#include <future>
#include <string>
#include <string_view>
#include <utility>

#include <nanobind/stl/string.h>

#include "kvstore/dist/protocol/bodies.h"
#include "python/src/bindings.h"
#include "python/src/keys.h"

namespace heddle::python {

namespace {

// A controller written in Python: called on threads of the server's engine.
struct PyController {
  PyRef function;

  void operator()(int head, std::string_view body) const {
    const nb::gil_scoped_acquire locked;
    try {
      function.get()(head, nb::str(body.data(), body.size()));
    } catch (nb::python_error& error) {
      throw PyFailure(error);
    }
  }
};

// The same memory as an array of the package's engine; `array` belongs to the server's.
NDArray Shared(const NDArray& array) {
  return NDArray::FromForeign(
      array.data(), array.shape(), array.dtype(), [array] {}, Cpu(), TheEngine());
}

// An optimizer written in Python: update(key, parameters, learning_rate, weight_decay, gradient,
// weight). It may wait, which ops must not, so it runs on a thread of its own.
struct PyServerUpdater {
  PyRef function;

  void operator()(const ServerUpdate& update) const {
    std::async(std::launch::async, [&] {
      const NDArray weight = Shared(update.weight);
      Call(update, Shared(update.gradient), weight);
      weight.WaitToRead();
      weight.WaitToWrite();
    }).get();
  }

  void Call(const ServerUpdate& update, NDArray gradient, const NDArray& weight) const {
    const nb::gil_scoped_acquire locked;
    try {
      nb::dict parameters;
      for (const auto& [name, value] : update.parameters) parameters[name.c_str()] = value;
      function.get()(FromKey(update.key), parameters, update.learning_rate, update.weight_decay,
                     Wrap(std::move(gradient)), Wrap(weight));
    } catch (nb::python_error& error) {
      throw PyFailure(error);
    }
  }
};

// make(name) returns what PyServerUpdater calls.
struct PyServerOptimizers {
  PyRef make;

  ServerUpdater operator()(std::string_view name) const {
    const nb::gil_scoped_acquire locked;
    try {
      return PyServerUpdater{PyRef(make.get()(nb::str(name.data(), name.size())))};
    } catch (nb::python_error& error) {
      throw PyFailure(error);
    }
  }
};

}  // namespace

void BindDist(nb::module_& m) {
  m.def("dist_role", [] { return std::string(DistRoleName(DistOptions::FromEnvironment().role)); });
  m.def("trace_command", [] { return kvstore::dist::kTraceCommand; });
  m.def("run_scheduler", [] {
    const Unlocked unlocked;
    RunScheduler(DistOptions::FromEnvironment());
  });
  m.def(
      "run_server",
      [](nb::object controller, nb::object make_updater) {
        ServerProgram program;
        if (!controller.is_none()) program.controller = PyController{PyRef(std::move(controller))};
        program.optimizers = PyServerOptimizers{PyRef(std::move(make_updater))};
        const Unlocked unlocked;
        RunServer(DistOptions::FromEnvironment(), std::move(program));
      },
      nb::arg("controller").none(), nb::arg("make_updater"));
}

}  // namespace heddle::python
