// The engine: ops that run Python functions, waits, traces, statistics.
#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/logging.h>
#include <heddle/memory.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "engine/gpu/driver.h"
#include "python/src/bindings.h"

namespace heddle::python {

namespace {

Var VarOf(nb::handle object, bool written) {
  if (const PyArray* array = AsArray(object)) {
    return (written ? Writable("engine.push: writes", *array) : array->array).var();
  }
  if (const PyRowSparse* array = AsRowSparse(object)) return array->array.var();
  PyVar* var = nullptr;
  if (nb::try_cast(object, var) && var != nullptr) return var->var;
  throw InvalidType(
      fmt::format("engine.push: expected arrays and variables, got {}", TypeName(object)));
}

std::vector<Var> VarsOf(nb::iterable objects, bool written) {
  std::vector<Var> vars;
  for (nb::handle object : objects) vars.push_back(VarOf(object, written));
  return vars;
}

void Push(nb::callable function, nb::iterable reads, nb::iterable writes, int priority,
          const std::string& name) {
  const std::vector<Var> read = VarsOf(reads, /*written=*/false);
  const std::vector<Var> written = VarsOf(writes, /*written=*/true);
  if (python_is_over) throw InvalidState("engine.push: the interpreter is ending");
  PyBody body(std::move(function));
  const Blocking blocking;
  TheEngine().Push({.name = name, .reads = read, .writes = written, .priority = priority},
                   std::move(body));
}

std::optional<Deadline> DeadlineIn(std::optional<double> seconds) {
  constexpr double kLongest = 100.0 * 365 * 24 * 3600;  // a century: more would not fit the clock
  if (!seconds || *seconds > kLongest) return std::nullopt;
  if (std::isnan(*seconds)) throw InvalidArgument("timeout: expected seconds or None, got nan");
  return Deadline(std::chrono::duration<double>(std::max(*seconds, 0.0)));
}

}  // namespace

void BindEngine(nb::module_& m) {
  nb::class_<PyVar>(m, "Var", "A variable of the engine: orders the ops that name it.")
      .def_prop_ro(
          "name", [](const PyVar& self) { return self.var.name(); }, "The name that it was given.")
      .def_prop_ro(
          "version", [](const PyVar& self) { return TheEngine().version(self.var); },
          "How many writes of it have completed.")
      .def(
          "wait",
          [](const PyVar& self, std::optional<double> timeout) {
            const Blocking blocking;
            const auto deadline = DeadlineIn(timeout);
            deadline ? TheEngine().WaitForVar(self.var, *deadline)
                     : TheEngine().WaitForVar(self.var);
          },
          nb::arg("timeout") = nb::none(),
          "Waits for the writes pushed so far; raises the error of a poisoned variable.")
      .def(
          "clear_error",
          [](const PyVar& self) {
            const Blocking blocking;
            TheEngine().ClearError(self.var);
          },
          "Cures it of the error of the op that failed to write it.");
  m.def(
      "new_var",
      [](const std::string& name) {
        const Blocking blocking;
        return PyVar{TheEngine().NewVar(name)};
      },
      nb::arg("name") = "");
  m.def("push", &Push, nb::arg("function"), nb::arg("reads"), nb::arg("writes"),
        nb::arg("priority"), nb::arg("name"));
  m.def(
      "waitall",
      [](std::optional<double> timeout) {
        const Blocking blocking;
        const auto deadline = DeadlineIn(timeout);
        deadline ? TheEngine().WaitForAll(*deadline) : TheEngine().WaitForAll();
      },
      nb::arg("timeout").none());
  // These may start the engine, or CUDA.
  m.def("num_gpus", [] {
    const Unlocked unlocked;
    return internal::DefaultGpuDriver()->device_count();
  });
  m.def("engine_type", [] {
    const Unlocked unlocked;
    return TheEngine().options().type;
  });
  m.def("num_workers", [] {
    const Unlocked unlocked;
    return TheEngine().options().num_workers;
  });
  m.def("dump_state", [] {
    const Unlocked unlocked;
    return TheEngine().DumpState();
  });
  m.def("engine_stats", [] {
    EngineStats stats;
    {
      const Unlocked unlocked;
      stats = TheEngine().stats();
    }
    nb::dict result;
    result["pushed"] = stats.pushed;
    result["done"] = stats.done;
    result["failed"] = stats.failed;
    result["running"] = stats.running;
    result["pending_bytes"] = stats.pending_bytes;
    result["late_completions"] = stats.late_completions;
    return result;
  });
  m.def("start_trace", [](const std::string& file) {
    const Unlocked unlocked;
    TheEngine().StartTrace(file);
  });
  m.def("stop_trace", [] {
    const Unlocked unlocked;
    TheEngine().StopTrace();
  });
  m.def(
      "in_forked_child", [] { return engine::InForkedChild(); },
      "Whether every call of heddle is refused, as in a child of fork().");
  m.def("set_log_level", [](const std::string& level) { SetLogLevel(ParseLogLevel(level)); });
  m.def("memory_stats", [] {
    const MemoryStats stats = GetMemoryStats(DeviceType::kCpu);
    nb::dict result;
    result["used"] = stats.used;
    result["cached"] = stats.cached;
    result["peak"] = stats.peak;
    result["bytes_max"] = stats.bytes_max;
    return result;
  });
  m.def("trim_memory", [] {
    const Unlocked unlocked;
    return TrimMemory(DeviceType::kCpu);
  });
}

}  // namespace heddle::python
