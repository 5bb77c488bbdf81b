// Keys and optimizers as Python passes them.
#pragma once

#include <heddle/key.h>
#include <heddle/optimizer.h>

#include "python/src/bindings.h"

namespace heddle::python {

struct PyOptimizer {
  OptimizerPtr optimizer;
};

// Borrows the text of a str, which the caller keeps. InvalidType, naming `call`, unless it is a str
// or an integer (NumPy's too) other than a bool; InvalidArgument for integers beyond 64 bits.
KeyRef ToKey(const char* call, nb::handle object);
nb::object FromKey(KeyRef key);

}  // namespace heddle::python
