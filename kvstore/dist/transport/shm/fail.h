// How calls of the system for shared memory fail.
#pragma once

#include <heddle/error.h>

#include <system_error>

#include <fmt/format.h>

namespace heddle::kvstore::dist {

// Throws NetworkError: could not do `what`, by errno `error`.
[[noreturn]] inline void Fail(const char* what, int error) {
  throw NetworkError(fmt::format("{}: {}", what, std::generic_category().message(error)));
}

}  // namespace heddle::kvstore::dist
