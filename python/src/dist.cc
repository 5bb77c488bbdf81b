// The roles of a distributed job that are no workers, and how a worker ends.
#include <heddle/dist.h>
#include <heddle/nccl.h>

#include <future>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <nanobind/stl/string.h>

#include "kvstore/dist/run.h"
#include "kvstore/dist/state_signal.h"
#include "kvstore/nccl/nccl_meeting.h"
#include "python/src/bindings.h"
#include "python/src/keys.h"

namespace heddle::python {

namespace {

// Calls `f` with the GIL; what Python raises leaves as a PyFailure.
template <class F>
auto InPython(const F& f) {
  const RunningOp running;
  const nb::gil_scoped_acquire locked;
  try {
    return f();
  } catch (nb::python_error& error) {
    throw PyFailure(error);
  }
}

// The same for what may wait, which ops must not: on a thread of its own.
template <class F>
auto OnOwnThread(const F& f) {
  return std::async(std::launch::async, [&] { return f(); }).get();
}

// A controller written in Python: called on threads of the server's engine.
struct PyController {
  PyRef function;

  void operator()(int head, std::string_view body) const {
    InPython([&] { function.get()(head, nb::str(body.data(), body.size())); });
  }
};

// The same memory as an array of the package's engine; `array` belongs to the server's.
NDArray Shared(const NDArray& array) {
  return NDArray::FromForeign(
      array.data(), array.shape(), array.dtype(), [array] {}, Cpu(), TheEngine());
}

// An optimizer written in Python: heddle.server's _Updater.
class PyServerUpdater {
 public:
  explicit PyServerUpdater(nb::object object) : object_(std::move(object)) {}

  void Update(const ServerUpdate& update) const {
    OnOwnThread([&] {
      const NDArray weight = Shared(update.weight);
      Call(update, Shared(update.gradient), weight);
      weight.WaitToRead();
      weight.WaitToWrite();
    });
  }

  std::optional<std::string> SaveState(KeyRef key) const {
    return OnOwnThread([&] {
      return InPython([&] {
        const nb::object state = object_.get().attr("save_state")(FromKey(key));
        if (state.is_none()) return std::optional<std::string>();
        const auto bytes = nb::cast<nb::bytes>(state);
        return std::optional<std::string>({bytes.c_str(), bytes.size()});
      });
    });
  }

  void LoadState(KeyRef key, std::string_view state) const {
    OnOwnThread([&] {
      InPython([&] {
        object_.get().attr("load_state")(FromKey(key), nb::bytes(state.data(), state.size()));
      });
    });
  }

  void Forget(KeyRef key) const {
    InPython([&] { object_.get().attr("forget")(FromKey(key)); });
  }

 private:
  void Call(const ServerUpdate& update, NDArray gradient, const NDArray& weight) const {
    InPython([&] {
      nb::dict parameters;
      for (const auto& [name, value] : update.parameters) parameters[name.c_str()] = value;
      object_.get()(FromKey(update.key), parameters, update.learning_rate, update.weight_decay,
                    Wrap(std::move(gradient)), Wrap(weight));
    });
  }

  PyRef object_;
};

// make(name) returns a PyServerUpdater's object.
struct PyServerOptimizers {
  PyRef make;

  ServerUpdater operator()(std::string_view name) const {
    const auto updater = InPython([&] {  // shared by the four functions
      return std::make_shared<const PyServerUpdater>(
          nb::object(make.get()(nb::str(name.data(), name.size()))));
    });
    return {.update = [updater](const ServerUpdate& update) { updater->Update(update); },
            .save_state = [updater](KeyRef key) { return updater->SaveState(key); },
            .load_state = [updater](KeyRef key,
                                    std::string_view state) { updater->LoadState(key, state); },
            .forget = [updater](KeyRef key) { updater->Forget(key); }};
  }
};

}  // namespace

void BindDist(nb::module_& m) {
  m.def("dist_role", [] { return std::string(DistRoleName(DistOptions::FromEnvironment().role)); });
  m.def("nccl_spans_job", &kvstore::NcclSpansJob);
  m.def("new_nccl_id", [] {
    const Unlocked unlocked;
    return NewNcclId();
  });
  m.def(
      "fail_worker",
      [](const std::string& why) {
        const Unlocked unlocked;
        kvstore::dist::FailProcessWorker(why);
      },
      nb::arg("why"));
  m.def("leave_at_process_exit", [] {
    const Unlocked unlocked;
    kvstore::dist::LeaveAtProcessExit();
  });
  m.def("expect_state_signal", &kvstore::dist::ExpectStateSignal);
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
