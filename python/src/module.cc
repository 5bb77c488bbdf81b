// The extension module heddle._core: the C++ library as the Python half of the package uses it.
#include <heddle/error.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <nanobind/stl/string.h>

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
    TheEngine().Stop();
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
  if (const nb::detail::cleanup_guard locked; locked)
    object_ = nb::handle(other.object_).inc_ref().ptr();
}

PyRef::~PyRef() {
  if (object_ != nullptr) WhilePythonLives([this] { Py_DECREF(object_); });
}

PyFailure::PyFailure(nb::python_error& error)
    : value_(nb::borrow(error.value())),
      traceback_(nb::borrow(error.traceback())),
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
  PyObject* const value = value_.get().ptr();
  PyObject* const traceback = traceback_.get().ptr();
  PyException_SetTraceback(value, traceback != nullptr ? traceback : Py_None);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value)), value);
}

void PyBody::operator()() const {
  if (python_is_over) throw InvalidState("the op runs Python code, and the interpreter has ended");
  const RunningOp running;
  const nb::gil_scoped_acquire locked;
  if (!locked) throw InvalidState("the op runs Python code, and the interpreter has ended");
  try {
    function_.get()();
  } catch (nb::python_error& error) {
    throw PyFailure(error);
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
