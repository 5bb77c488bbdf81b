// Thread-local variables read on the hot path.
//
// constinit and trivially destructible, so an access is one load without an initialisation check;
// the initial-exec model keeps it one load inside a shared library too. That model asks for room in
// every thread's first block, of which the loader keeps some 1.5 KiB for what a program loads when
// it runs, such as Python's modules. The static CUDA runtime has 4 KiB of thread-local variables:
// libraries with it use the model that they are compiled with. Programs that link heddle are not
// concerned: their linker makes it one load anyway, so their sources name no model.
#pragma once

#include "engine/tls_model.h"

#ifdef HEDDLE_LARGE_TLS
#define HEDDLE_TLS constinit thread_local
#else
#define HEDDLE_TLS __attribute__((tls_model("initial-exec"))) constinit thread_local
#endif
