// Exceptions that heddle throws. All derive from Error, so `catch (const heddle::Error&)` takes
// every one.
//
// Errors of the user's own op bodies are not wrapped: they are rethrown unchanged by the waits.
#pragma once

#include <stdexcept>
#include <string>

namespace heddle {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller passed something that cannot work; nothing was changed. The message names what was
// expected and what was given.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

// A key that the store does not have.
class UnknownKey : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

// The call cannot work in the present state: the engine has stopped, or a wait was called inside an
// op.
class InvalidState : public Error {
 public:
  using Error::Error;
};

// The body of an op touched an array in a way that the op did not declare. The message names op,
// access and array. Thrown with EngineOptions::check_access only.
class AccessError : public Error {
 public:
  using Error::Error;
};

// A deadline passed. The message says what was waited for and which op holds it up.
class TimeoutError : public Error {
 public:
  using Error::Error;
};

// A pool's cap or the machine's memory is exhausted.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

// A file could not be read, written or understood.
class IoError : public Error {
 public:
  using Error::Error;
};

// A call of the CUDA runtime failed, or a GPU reported an error. The message names what was being
// done and the error as CUDA does.
class CudaError : public Error {
 public:
  CudaError(const std::string& message, int code) : Error(message), code_(code) {}
  int code() const { return code_; }  // a cudaError_t

 private:
  int code_;
};

// A call of NCCL failed, or NCCL is not there. The message names what was being done and the error
// as NCCL does.
class NcclError : public Error {
 public:
  NcclError(const std::string& message, int code) : Error(message), code_(code) {}
  int code() const { return code_; }  // a ncclResult_t; 0: there is no NCCL to call

 private:
  int code_;
};

// A peer of a distributed job could not be reached, refused, or was lost. The message names role,
// rank and address, and what came back.
class NetworkError : public Error {
 public:
  using Error::Error;
};

// An asynchronous op ended without a result: its completion was dropped, or reported an error code.
class OpError : public Error {
 public:
  using Error::Error;
};

}  // namespace heddle
