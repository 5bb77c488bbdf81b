// What the binding's sources share.
//
// Rules. A call that can block, or compute, holds no GIL while it does (Unlocked, Blocking). What
// an engine op holds of Python's is a PyRef, which takes the GIL to let go. Python code that an op
// runs goes through PyBody. Signals reach Python in waits through Blocking.
#pragma once

#include <heddle/engine.h>
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

namespace heddle::python {

namespace nb = nanobind;

// The engine that the package uses; made on first use.
Engine& TheEngine();

// Set at the interpreter's exit: from then on no op may run Python code.
extern std::atomic<bool> python_is_over;

using Unlocked = nb::gil_scoped_release;

// For calls that may wait: no GIL, and signals are looked for 20 times a second.
class Blocking {
 public:
  Blocking() : scope_(std::chrono::milliseconds(50), &LookForSignals) {}

 private:
  // Throws, before any lock is asked for, in a child of fork() that cannot work.
  struct ForkCheck {
    ForkCheck() { engine::CheckNotForked("heddle"); }
  };
  static void LookForSignals();  // throws what a signal handler raises

  ForkCheck fork_check_;
  Unlocked unlocked_;
  WaitCheckScope scope_;
};

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

// An exception of Python code that an op ran. Raised, the same object, by every wait that it
// concerns.
class PyFailure : public std::exception {
 public:
  explicit PyFailure(nb::python_error& error);  // with the GIL
  const char* what() const noexcept override { return message_.c_str(); }
  nb::handle value() const { return value_.get(); }

 private:
  PyRef value_;
  std::string message_;  // "ValueError: ..."
};

// Calls a Python function as the body of an op.
class PyBody {
 public:
  explicit PyBody(nb::object function) : function_(std::move(function)) {}
  void operator()() const;

 private:
  PyRef function_;
};

// What Python objects hold. They live only inside of these, so they go with the GIL held; what they
// let go of, they let go of without it.
struct PyArray {
  explicit PyArray(NDArray held) : array(std::move(held)) {}
  ~PyArray() {
    if (array.empty()) return;
    const Unlocked unlocked;
    array = NDArray();
  }
  NDArray array;
};
struct PyRowSparse {
  explicit PyRowSparse(RowSparseNDArray held) : array(std::move(held)) {}
  ~PyRowSparse() {
    if (array.empty()) return;
    const Unlocked unlocked;
    array = RowSparseNDArray();
  }
  RowSparseNDArray array;
};
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

// A Python object of `type`, a class that derives from the binding's.
template <class Holder, class Array>
nb::object Wrap(nb::handle type, Array array) {
  nb::object object = nb::inst_alloc(type);
  new (nb::inst_ptr<Holder>(object)) Holder(std::move(array));
  nb::inst_mark_ready(object);
  return object;
}
inline nb::object WrapArray(NDArray array) {
  return Wrap<PyArray>(registered->array_type, std::move(array));
}
inline nb::object WrapRowSparse(RowSparseNDArray array) {
  return Wrap<PyRowSparse>(registered->row_sparse_type, std::move(array));
}

// Null if the object is something else.
PyArray* AsArray(nb::handle object);
PyRowSparse* AsRowSparse(nb::handle object);

// A number of Python's or NumPy's; false: it is something else.
bool ToScalar(nb::handle object, Scalar* scalar);

DType ToDType(int code);  // InvalidArgument for a number that is no DType
// A device as the package passes it: its type times 65536 plus its id.
Device ToDevice(int code);
int FromDevice(Device device);
Shape ToShape(const std::vector<std::int64_t>& dims);
nb::tuple FromShape(const Shape& shape);

// The name of the object's type, for messages.
std::string TypeName(nb::handle object);
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
