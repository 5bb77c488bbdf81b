// Thread-local variables read on the hot path.
//
// constinit and trivially destructible, so an access is one load without an initialisation check;
// the initial-exec model keeps it one load inside a shared library too.
#pragma once

#define HEDDLE_TLS __attribute__((tls_model("initial-exec"))) constinit thread_local
