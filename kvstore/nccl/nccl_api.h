// What the stores need of NCCL: the one place between their bookkeeping and it. Tests put a
// simulated NCCL here.
//
// Groups:  the calls of a thread between GroupStart and GroupEnd begin together at its end. Calls
// on
//          communicators of several devices need a group: one by one they wait for each other.
// Errors:  NcclError with NCCL's name and text, if not said otherwise. The communicators of a group
//          that failed are good for Abort alone.
// Threads: one call at a time on communicators that belong together, Ask included.
#pragma once

#include <heddle/dtype.h>

#include <array>
#include <cstddef>
#include <exception>
#include <memory>
#include <string>

namespace heddle::kvstore {

class Nccl {
 public:
  using Comm = void*;
  using Stream = void*;              // a cudaStream_t
  using Id = std::array<char, 128>;  // what the ranks of a communicator have in common

  // What a communicator says.
  struct State {
    bool in_progress = false;    // a call goes on; no other may come before it is over
    std::exception_ptr error{};  // of a call, or of what runs on the device
  };

  virtual ~Nccl() = default;

  virtual std::string Describe() const = 0;  // version and file: "2.28.9, /usr/lib/libnccl.so.2"

  virtual Id NewId() = 0;
  virtual void GroupStart() = 0;
  // False: something goes on, and Ask says when it is over. Work of others on the streams of the
  // group comes after that.
  [[nodiscard]] virtual bool GroupEnd() = 0;
  // One rank, on the current device. Writes *comm at once, and perhaps the same again until it is
  // over, also by Abort.
  virtual void Init(Comm* comm, int ranks, const Id& id, int rank) = 0;
  virtual State Ask(Comm comm) noexcept = 0;

  // Elements are of a dtype that Sums takes. `out` counts on the root alone.
  virtual void Reduce(const void* in, void* out, std::size_t count, DType dtype, int root,
                      Comm comm, Stream stream) = 0;
  // The same on every rank. `in` may be `out`.
  virtual void AllReduce(const void* in, void* out, std::size_t count, DType dtype, Comm comm,
                         Stream stream) = 0;
  // The root's `data` comes to the others'.
  virtual void Broadcast(void* data, std::size_t bytes, int root, Comm comm, Stream stream) = 0;

  // Ends what runs, however long it would wait for others, and takes the communicator down. Both
  // calls may wait until all communicators of this process that belong together have had theirs.
  virtual void Abort(Comm comm) noexcept = 0;
  // The orderly end, after all that was issued has ended. False: it goes on, and Ask says when it
  // is over; it may wait until the ranks of other processes have come to theirs. Abort may end it,
  // too.
  [[nodiscard]] virtual bool Finalize(Comm comm) = 0;
  // Of a communicator whose Finalize is over; of another one it would wait for the others, without
  // a deadline.
  virtual void Destroy(Comm comm) noexcept = 0;

  // Can NCCL add elements of this dtype?
  static bool Sums(DType dtype) { return dtype != DType::kBool; }
};

// Loads the library, once a process, and logs its version and file. NcclError says what is missing:
// the file, a function in it, or the build option.
std::shared_ptr<Nccl> LoadNccl();

}  // namespace heddle::kvstore
