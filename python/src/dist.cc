// The roles of a distributed job that are no workers.
#include <heddle/dist.h>

#include <string>
#include <string_view>
#include <utility>

#include <nanobind/stl/string.h>

#include "python/src/bindings.h"

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

}  // namespace

void BindDist(nb::module_& m) {
  m.def("dist_role", [] { return std::string(DistRoleName(DistOptions::FromEnvironment().role)); });
  m.def("run_scheduler", [] {
    const Unlocked unlocked;
    RunScheduler(DistOptions::FromEnvironment());
  });
  m.def(
      "run_server",
      [](nb::object controller) {
        ServerController called;
        if (!controller.is_none()) called = PyController{PyRef(std::move(controller))};
        const Unlocked unlocked;
        RunServer(DistOptions::FromEnvironment(), std::move(called));
      },
      nb::arg("controller").none());
}

}  // namespace heddle::python
