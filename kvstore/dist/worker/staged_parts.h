// Arrays on GPUs at a worker, part by part: parts of an array are copied out of the GPU, sent,
// received and copied into a GPU at the same time, each part one after another.
//
// DESIGN. The grain is the part of the protocol: that is what has a request of its own, a place in
// an order, an answer, and a run of memory that it is received into; nothing smaller can leave
// before the rest is there. (By default parts have from 256 KiB to 1 MiB, whose copy takes 10 us
// or more, against some microseconds for its ops.) An array of one part is copied whole, as
// near_arrays.h does.
//
// All of an array lies in one array in pinned memory, and each of its parts has a Var. These are
// the ops; the engine does all the waiting:
//
//   copy out of part i   GPU op      reads the array and var(i - 1), writes var(i)
//   kvstore.push         async op    reads var(first), runs in any case: the requests of all parts
//                                    take their places, without values
//   supply of part i     CPU op      reads var(i), runs in any case: request i gets its value, or
//                                    the failure, and goes when the protocol lets it
//
//   kvstore.pull         async op    writes the pinned array: its requests go; ends, or fails, as
//                                    all calls do
//   arrival of part i    async op    writes var(i): ends when its bytes are there, or when they
//                                    will not come any more; never fails
//   copy in of part i    GPU op      reads var(i), writes the output, a read-modify but for the
//                                    first; the last one reads the pinned array too
//
// Invariants:
//   (S1) The bytes of part i in pinned memory are written and read only in the order of var(i).
//        Whatever may touch them (ops, requests, landings) holds the pinned array, so its memory is
//        not used again while a part waits to be sent, is sent, or arrives.
//   (S2) The requests of a call take their places in the parts' orders all at once, in the order of
//        the key's calls; a part without its value holds up nothing but what comes behind it in its
//        own order. So parts overtake one another, calls never do.
//   (S3) A part that could not be copied fails with that error, and so do all later ones. If the
//        input has failed, or pinned memory is short, that is the first part: the whole push fails,
//        as a push from the CPUs does. Only where the device fails a copy, or the deadline passes,
//        parts may have gone before: these take part in their rounds, and the others fail them.
//   (S4) An output has the error of the pull, if there is one, from the pinned array: once, as all
//        calls report it. Bytes that did not come are not copied.
//   (S5) Nobody waits for a device: copies out are issued as the array's own ops are, copies in as
//        soon as the part and the output are there. The network's threads only call completions.
//
// Parts go in the order of StageOrder, which takes the servers in turn: all links are busy.
#pragma once

#include <heddle/completion.h>
#include <heddle/engine.h>
#include <heddle/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "kvstore/dist/protocol/placement.h"
#include "kvstore/dist/worker/dist_key.h"

namespace heddle::kvstore::dist {

class PartsCall;

// Places in `parts`, which lie shard by shard: the first part of each shard, the second of each,...
std::vector<std::size_t> StageOrder(std::span<const PlacedPart> parts);

// Which parts of a call have arrived. Threads: any.
class PartArrivals {
 public:
  explicit PartArrivals(std::size_t parts) : count_(parts), parts_(parts) {}

  // `done` is called, without an error, when the part has arrived or will not. Once a part.
  void Await(std::size_t part, Completion done) EXCLUDES(mutex_);
  void Arrived(std::size_t part) EXCLUDES(mutex_);
  // Nothing more arrives.
  void End() EXCLUDES(mutex_);
  bool HasArrived(std::size_t part) const EXCLUDES(mutex_);

 private:
  enum class State : std::uint8_t { kAwaited, kHere, kMissing };
  struct Part {
    State state = State::kAwaited;
    std::optional<Completion> done;
  };

  void Settle(std::size_t part, State state) EXCLUDES(mutex_);

  const std::size_t count_;
  mutable Mutex mutex_;
  std::vector<Part> parts_ GUARDED_BY(mutex_);
};

// What both ways have in common.
class StagedParts {
 public:
  // Worth it, and possible, for an array of the key's shape.
  static bool Suits(const DistKey& key, const NDArray& array);

 protected:
  StagedParts(KeyPtr key, const NDArray& array);

  std::span<const PlacedPart> parts() const { return key_->parts(); }
  std::int64_t FirstByte(std::size_t part) const;
  std::int64_t Bytes(std::size_t part) const;

  const KeyPtr key_;
  const NDArray pinned_;                  // as the array on the GPU; its memory is taken by an op
  const std::vector<std::size_t> order_;  // of the parts
  std::vector<Var> vars_;                 // by part
};

// An array whose parts are sent.
class OutgoingParts : public StagedParts {
 public:
  // Queues the copies of `array`, which lies on a GPU.
  OutgoingParts(KeyPtr key, const NDArray& array, int priority);

  // Written when the first part has been copied, or cannot be.
  const Var& first() const { return vars_[order_.front()]; }
  // Queues what gives the requests of `call`, which awaits them, their values.
  void SupplyTo(const std::shared_ptr<PartsCall>& call, int priority) const;

 private:
  void QueueSupply(const std::shared_ptr<PartsCall>& call, std::size_t part, int priority) const;
};

// An array whose parts are received.
class IncomingParts : public StagedParts {
 public:
  // As `out`, which lies on a GPU.
  IncomingParts(KeyPtr key, const NDArray& out);

  const NDArray& pinned() const { return pinned_; }
  const std::shared_ptr<PartArrivals>& arrivals() const { return arrivals_; }
  // Queues the arrivals, after the op of the call.
  void QueueArrivals(int priority) const;
  // Queues the copies to an array like `out`, after that.
  void CopyTo(const NDArray& out, int priority) const;

 private:
  const std::shared_ptr<PartArrivals> arrivals_;
};

}  // namespace heddle::kvstore::dist
