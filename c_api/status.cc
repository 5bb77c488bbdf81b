#include "c_api/status.h"

#include <new>
#include <utility>

#include <fmt/format.h>

#include "base/build_info.h"

namespace heddle::c_api {

namespace {

// A callback's failure whose status no type of heddle/error.h stands for.
class StatusError : public Error {
 public:
  StatusError(HeddleStatus status, const std::string& message) : Error(message), status_(status) {}
  HeddleStatus status() const { return status_; }

 private:
  HeddleStatus status_;
};

// The innermost callback's that this thread runs, or its own.
LastError*& Current() noexcept {
  thread_local LastError own;
  thread_local LastError* current = &own;
  return current;
}
LastError& OfThisThread() noexcept { return *Current(); }

template <class E>
std::exception_ptr Make(const std::string& message) {
  return std::make_exception_ptr(E(message));
}

template <>
std::exception_ptr Make<CudaError>(const std::string& message) {
  return std::make_exception_ptr(CudaError(message, 0));  // no error of the runtime's own
}

template <>
std::exception_ptr Make<NcclError>(const std::string& message) {
  return std::make_exception_ptr(NcclError(message, 0));
}

// The types of heddle/error.h and their codes; a derived type stands before its base.
struct TypedError {
  HeddleStatus status;
  std::exception_ptr (*make)(const std::string& message);
  bool (*is)(const Error& error);
};
template <class E>
constexpr TypedError Typed(HeddleStatus status) {
  return {status, &Make<E>,
          [](const Error& error) { return dynamic_cast<const E*>(&error) != nullptr; }};
}
constexpr TypedError kTypedErrors[] = {
    Typed<UnknownKey>(HEDDLE_UNKNOWN_KEY),     Typed<InvalidArgument>(HEDDLE_INVALID_ARGUMENT),
    Typed<InvalidState>(HEDDLE_INVALID_STATE), Typed<AccessError>(HEDDLE_ACCESS_ERROR),
    Typed<TimeoutError>(HEDDLE_TIMEOUT),       Typed<OutOfMemory>(HEDDLE_OUT_OF_MEMORY),
    Typed<IoError>(HEDDLE_IO_ERROR),           Typed<OpError>(HEDDLE_OP_ERROR),
    Typed<NetworkError>(HEDDLE_NETWORK_ERROR), Typed<CudaError>(HEDDLE_CUDA_ERROR),
    Typed<NcclError>(HEDDLE_NCCL_ERROR),
};

HeddleStatus StatusOf(const Error& error) noexcept {
  if (const auto* reported = dynamic_cast<const StatusError*>(&error)) return reported->status();
  for (const TypedError& type : kTypedErrors) {
    if (type.is(error)) return type.status;
  }
  return HEDDLE_ERROR;
}

}  // namespace

HeddleStatus SetLastError(HeddleStatus status, std::string_view message) noexcept {
  LastError& last = OfThisThread();
  try {
    last.message.assign(message);
    last.status = status;
  } catch (...) {
    last.message.clear();
    last.status = HEDDLE_OUT_OF_MEMORY;
  }
  return last.status;
}

HeddleStatus SetLastErrorToCurrentException() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    return SetLastError(StatusOf(error), error.what());
  } catch (const std::bad_alloc&) {
    return SetLastError(HEDDLE_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& error) {
    return SetLastError(HEDDLE_ERROR, error.what());
  } catch (...) {
    return SetLastError(HEDDLE_ERROR, "an exception that is no std::exception");
  }
}

std::exception_ptr ErrorOf(HeddleStatus status, const std::string& message) {
  const std::string text =
      !message.empty() ? message : fmt::format("a callback failed with status {}", status);
  for (const TypedError& type : kTypedErrors) {
    if (type.status == status) return type.make(text);
  }
  return std::make_exception_ptr(StatusError(status, text));
}

CallbackScope::CallbackScope() noexcept : outer_(std::exchange(Current(), &own_)) {}

CallbackScope::~CallbackScope() { Current() = outer_; }

void CallbackScope::Throw(HeddleStatus status) const {
  // A message that came with another status is about something else.
  std::rethrow_exception(ErrorOf(status, own_.status == status ? own_.message : std::string()));
}

}  // namespace heddle::c_api

using heddle::c_api::OfThisThread;

const char* HeddleGetVersion(void) { return heddle::kVersion.data(); }
int HeddleGetAbiVersion(void) { return HEDDLE_ABI_VERSION; }

HeddleStatus HeddleLastError(void) { return OfThisThread().status; }
const char* HeddleLastErrorMessage(void) { return OfThisThread().message.c_str(); }
HeddleStatus HeddleSetLastError(HeddleStatus status, const char* message) {
  heddle::c_api::SetLastError(status, message != nullptr ? message : "");
  return status;
}
