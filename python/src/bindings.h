// What the binding's sources share.
//
// Rules. A call that can block, or compute, holds no GIL while it does (Unlocked, Blocking). What
// an engine op holds of Python's is a PyRef, which takes the GIL to let go. Python code that an op
// runs goes through PyBody. Signals reach Python in waits through Blocking.
#pragma once

#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/ndarray.h>
#include <heddle/optimizer.h>
#include <heddle/row_sparse.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>

#include "engine/fork.h"
#include "python/src/gil.h"

namespace heddle::python {

namespace nb = nanobind;

// The engine that the package uses; made on first use.
Engine& TheEngine();

// Set at the interpreter's exit: from then on no op may run Python code.
extern std::atomic<bool> python_is_over;

// For calls that may wait or push: no GIL, and signals are looked for 20 times a second. What a
// signal handler raises leaves a wait; if a push waits for room the outermost call of the thread is
// completed, and Python raises the exception right after it.
class Blocking {
 public:
  Blocking() : scope_(std::chrono::milliseconds(50), &LookForSignals) { ++depth; }
  ~Blocking() {
    if (--depth == 0) late_.error = scope_.TakeError();
  }
  Blocking(const Blocking&) = delete;
  Blocking& operator=(const Blocking&) = delete;

  // Has an exception of Python's leave the thread's call as if the handler of a signal had raised
  // it during a wait. With the GIL; of the main thread.
  static void Leave(std::exception_ptr error);

 private:
  // Throws, before any lock is asked for, in a child of fork() that cannot work.
  struct ForkCheck {
    ForkCheck() { engine::CheckNotForked("heddle"); }
  };
  // Has Python raise the error, if there is one, when the GIL is back.
  struct Late {
    ~Late();
    std::exception_ptr error;
  };
  static void LookForSignals();  // throws what a signal handler raises

  static inline thread_local int depth = 0;
  ForkCheck fork_check_;
  Late late_;
  Unlocked unlocked_;
  WaitCheckScope scope_;
};

// Calls f with the GIL, on any thread; not at all once the interpreter is gone.
template <class F>
void WhilePythonLives(const F& f) {
  const RunningOp running;  // what f drops may leave heddle in the middle of an op
  if (python_is_over) return;
  if (const nb::detail::cleanup_guard locked; locked) f();
}

// One reference to a Python object, for engine ops: copied and dropped on any thread, with or
// without the GIL. Leaks it once the interpreter is gone.
class PyRef {
 public:
  explicit PyRef(nb::object object) : object_(object.release().ptr()) {}
  PyRef(PyRef&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  PyRef(const PyRef& other);
  PyRef& operator=(PyRef) = delete;
  ~PyRef();

  nb::handle get() const { return object_; }

 private:
  PyObject* object_;
};

// An exception of Python code that an op ran. Every wait that it concerns raises a copy, with the
// traceback of the op and of that wait. It is kept by variables, which Python's garbage collector
// does not see: so it must hold none of the frames of the op or of waits, whose arrays have
// variables.
class PyFailure : public std::exception {
 public:
  // With the GIL. Throws what the handler of a signal raises meanwhile.
  explicit PyFailure(nb::python_error& error);
  const char* what() const noexcept override { return message_.c_str(); }
  void Raise() const;  // sets Python's error; with the GIL

 private:
  PyRef value_;
  PyRef traceback_;      // null: none
  std::string message_;  // "ValueError: ..."
};

// Calls a Python function as the body of an op. What is to end the program, KeyboardInterrupt and
// SystemExit, of the main thread leaves the call that runs the op, once (Blocking::Leave); the op
// has failed by an Interrupted.
class PyBody {
 public:
  explicit PyBody(nb::object function) : function_(std::move(function)) {}
  void operator()() const;

 private:
  PyRef function_;
};

// What Python objects hold. They live only inside of these, so they go with the GIL held; what they
// let go of, they let go of without it.
template <class Array>
struct Holder {
  explicit Holder(Array held, bool is_read_only = false)
      : array(std::move(held)), read_only(is_read_only) {}
  ~Holder() {
    if (array.empty()) return;
    const Unlocked unlocked;
    array = Array();
  }
  Array array;
  const bool read_only;  // over memory that its owner shares for reading alone
};
using PyArray = Holder<NDArray>;
using PyRowSparse = Holder<RowSparseNDArray>;
struct PyVar {
  Var var;
};

// What the Python half of the package hands over when it is imported.
struct Registered {
  nb::object array_type;       // heddle.nd.NDArray
  nb::object row_sparse_type;  // heddle.nd.sparse.RowSparseNDArray
  nb::object empty;            // numpy.empty
  nb::object dtypes;           // a tuple: NumPy's dtype for each DType; bfloat16's is float32
};
extern Registered* registered;  // never freed: the interpreter goes first

// An object whose class the stubs name.
template <class Class>
class Result : public nb::object {
 public:
  static constexpr auto Name = Class::Name;
  Result(nb::object object) : nb::object(std::move(object)) {}
};
struct SelfClass {
  static constexpr auto Name = nb::detail::const_name("typing.Self");
};
struct DenseClass {
  static constexpr auto Name = nb::detail::const_name("heddle.nd.NDArray");
};
struct RowSparseClass {
  static constexpr auto Name = nb::detail::const_name("heddle.sparse.RowSparseNDArray");
};
struct NumpyClass {
  static constexpr auto Name = nb::detail::const_name("numpy.ndarray");
};
using SameClass = Result<SelfClass>;  // the class of the object whose method it is
using Dense = Result<DenseClass>;
using RowSparse = Result<RowSparseClass>;
using Numpy = Result<NumpyClass>;
using Extents = nb::typed<nb::tuple, nb::int_, nb::ellipsis>;

// A Python object of `type`, a class that derives from the binding's.
template <class Array>
nb::any WrapAs(nb::handle type, Array array, bool read_only = false) {
  nb::object object = nb::inst_alloc(type);
  new (nb::inst_ptr<Holder<Array>>(object)) Holder<Array>(std::move(array), read_only);
  nb::inst_mark_ready(object);
  return nb::any(object.release(), nb::detail::steal_t{});
}
inline Dense Wrap(NDArray array) { return WrapAs(registered->array_type, std::move(array)); }
inline RowSparse Wrap(RowSparseNDArray array) {
  return WrapAs(registered->row_sparse_type, std::move(array));
}

// Null if the object is something else.
PyArray* AsArray(nb::handle object);
PyRowSparse* AsRowSparse(nb::handle object);
// The array, to be written; InvalidArgument if it is for reading alone.
const NDArray& Writable(const char* call, const PyArray& array);

// InvalidArgument, naming the call, unless the rows are of the engine, shape, dtype and device of a
// dense array.
void CheckAlike(const char* call, const NDArray& dense, const RowSparseNDArray& rows);

// A number of Python's or NumPy's; false: it is something else.
bool ToScalar(nb::handle object, Scalar* scalar);
// The same, or InvalidType.
Scalar ToNumber(const char* call, nb::handle object);

DType ToDType(int code);  // InvalidArgument for a number that is no DType
// A device as the package passes it: its type times 65536 plus its id.
Device ToDevice(int code);
int FromDevice(Device device);
Shape ToShape(const std::vector<std::int64_t>& dims);
Extents FromShape(const Shape& shape);

// An argument that Python takes for true or false, such as 0 or numpy.True_.
struct Flag {
  bool value = false;
};

// The name of the object's type, for messages.
std::string TypeName(nb::handle object);
// Raised as what leaves the call that ran the op, if it is that call which throws it, or else as
// heddle.OpError.
class Interrupted : public OpError {
 public:
  using OpError::OpError;
};
// An argument of a wrong type: raised as heddle.InvalidType.
class InvalidType : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

void BindErrors(nb::module_& m);
void BindEngine(nb::module_& m);
void BindArray(nb::module_& m);
void BindExchange(nb::class_<PyArray>& type, nb::module_& m);
void BindRowSparse(nb::module_& m);
void BindOptimizer(nb::module_& m);
void BindKVStore(nb::module_& m);
void BindDist(nb::module_& m);

}  // namespace heddle::python

template <>
struct nanobind::detail::type_caster<heddle::python::Flag> {
  NB_TYPE_CASTER(heddle::python::Flag, const_name("bool"))

  bool from_python(handle source, std::uint32_t, cleanup_list*) noexcept {
    const int truth = PyObject_IsTrue(source.ptr());
    if (truth < 0) PyErr_Clear();  // it is an argument of a wrong type
    value.value = truth > 0;
    return truth >= 0;
  }
};
