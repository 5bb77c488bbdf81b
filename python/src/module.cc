// The extension module heddle._core: the C++ library as the Python half of the package uses it.
#include <heddle/error.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <nanobind/stl/string.h>

#include "engine/thread_context.h"
#include "engine/wait_checks.h"
#include "python/src/bindings.h"

namespace heddle::python {

std::atomic<bool> python_is_over = false;
Registered* registered = nullptr;

namespace {
std::atomic<bool> engine_is_used = false;

void Register(nb::object array_type, nb::object row_sparse_type, nb::object empty,
              nb::object dtypes) {
  registered = new Registered{std::move(array_type), std::move(row_sparse_type), std::move(empty),
                              std::move(dtypes)};
}

// At the interpreter's exit: all that is pending gets done while there still is a Python to run it.
void Finish() {
  EndThreads();
  if (engine_is_used && !engine::InForkedChild()) {
    const Blocking blocking;
    AwaitUpdaters();
    TheEngine().Stop();
    python_is_over = true;
    AwaitRunningOps();  // what ops have dropped may go after they are done
  }
  python_is_over = true;
}

// One engine serves the process, and its threads can enter one interpreter.
void RequireMainInterpreter() {
  constexpr std::int64_t kMain = 0;
  const std::int64_t id = PyInterpreterState_GetID(PyInterpreterState_Get());
  if (id == kMain) return;
  PyErr_Format(PyExc_ImportError, "heddle: expected the main interpreter, got subinterpreter %lld",
               static_cast<long long>(id));
  throw nb::python_error();
}

// Whether the error is to end the program: the handler of a signal has raised it, or the function
// itself, which the main thread runs.
bool EndsProgram(const nb::python_error& error) {
  if (!error.matches(PyExc_KeyboardInterrupt) && !error.matches(PyExc_SystemExit)) return false;
  const nb::object main = nb::module_::import_("threading").attr("main_thread")();
  return nb::cast<unsigned long>(main.attr("ident")) == PyThread_get_thread_ident();
}

// A function of heddle/error.py.
nb::object Helper(const char* name) { return nb::module_::import_("heddle.error").attr(name); }

// Without the frames, of which there may be one that cannot be replaced.
nb::object TracebackAlone(const nb::python_error& error) {
  try {
    return Helper("_let_go_of_frames")(error.value());
  } catch (nb::python_error& raised) {
    if (EndsProgram(raised)) throw;
    return error.traceback();
  }
}
}  // namespace

Engine& TheEngine() {
  Engine& engine = Engine::Default();
  engine_is_used = true;  // not of one whose options are wrong: the exit would try again
  return engine;
}

void Blocking::LookForSignals() {
  const Entrance entrance;
  if (!entrance) return;
  const nb::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
  engine::CheckNotForked("heddle");  // a handler may have forked, and have returned in the child
}

void Blocking::Leave(std::exception_ptr error) {
  if (engine::tls_context.wait_check != nullptr) {
    internal::WaitChecks::Keep(std::move(error));
  } else {
    const Late late = {std::move(error)};
  }
}

Blocking::Late::~Late() {
  if (error == nullptr) return;
  try {
    std::rethrow_exception(std::exchange(error, nullptr));
  } catch (const nb::python_error& raised) {
    PyObject* const value = nb::borrow(raised.value()).release().ptr();
    // Run by the main thread, which this is, before it executes anything else.
    const auto raise = [](void* held) {
      const nb::object exception = nb::steal(static_cast<PyObject*>(held));
      PyErr_SetObject(exception.type().ptr(), exception.ptr());
      return -1;
    };
    if (Py_AddPendingCall(raise, value) == 0) return;
    PyErr_SetObject(raised.type().ptr(), value);
    PyErr_WriteUnraisable(value);
    Py_DECREF(value);
  }
}

PyRef::PyRef(const PyRef& other) : object_(nullptr) {
  WhilePythonLives([&] { object_ = nb::handle(other.object_).inc_ref().ptr(); });
}

PyRef::~PyRef() {
  if (object_ != nullptr) WhilePythonLives([this] { Py_DECREF(object_); });
}

PyFailure::PyFailure(nb::python_error& error)
    : value_(nb::borrow(error.value())),
      traceback_(TracebackAlone(error)),
      message_(TypeName(error.value())) {
  const nb::object text = nb::steal(PyObject_Str(error.value().ptr()));
  nb::bytes bytes;  // lone surrogates, which os.fsdecode makes, have no UTF-8
  if (text.is_valid()) {
    bytes =
        nb::steal<nb::bytes>(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  }
  if (!bytes.is_valid()) {
    PyErr_Clear();
    return;
  }
  message_ += fmt::format(": {}", std::string_view(bytes.c_str(), bytes.size()));
}

void PyFailure::Raise() const {
  try {
    const nb::object traceback = traceback_.get() ? nb::borrow(traceback_.get()) : nb::none();
    const nb::object copy = Helper("_copy_for_wait")(value_.get(), traceback);
    PyErr_SetObject(copy.type().ptr(), copy.ptr());
  } catch (nb::python_error& raised) {
    raised.restore();
  }
}

void PyBody::operator()() const {
  const RunningOp running;
  if (python_is_over) throw InvalidState("the op runs Python code, and the interpreter has ended");
  const nb::gil_scoped_acquire locked;
  if (!locked) throw InvalidState("the op runs Python code, and the interpreter has ended");
  try {
    try {
      function_.get()();
    } catch (nb::python_error& error) {
      if (EndsProgram(error)) throw;
      throw PyFailure(error);
    }
  } catch (nb::python_error& error) {
    Blocking::Leave(std::current_exception());
    throw Interrupted(fmt::format("the function was interrupted by {}", TypeName(error.value())));
  }
}

std::string TypeName(nb::handle object) {
  const nb::object name = nb::getattr(object.type(), "__name__");
  return nb::cast<std::string>(name);
}

}  // namespace heddle::python

NB_MODULE(_core, m) {
  using namespace heddle::python;
  RequireMainInterpreter();
  nb::set_leak_warnings(false);  // what lives at exit, user code holds
  BindErrors(m);
  BindEngine(m);
  BindArray(m);
  BindRowSparse(m);
  BindOptimizer(m);
  BindKVStore(m);
  BindDist(m);
  m.def("register", &Register, "Takes over what the Python half of the package has made.");
  m.def("finish", &Finish, "Waits for everything pending; nothing runs after it.");
}
