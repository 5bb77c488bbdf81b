// The blocks that the engine's hot path works on: ops, their accesses, variables.
//
// An op is one block: header, accesses, an extension (rare), the body. Blocks and variables are
// aligned to 64 bytes, which leaves the low bits of their addresses free.
#pragma once

#include <heddle/device.h>
#include <heddle/engine.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>

#include "engine/block_pool.h"
#include "engine/failure.h"
#include "engine/gpu/gpu_var.h"

namespace heddle::engine {

using internal::AsyncState;
using internal::EngineCore;
using internal::Op;
using internal::VarState;

enum class AccessMode : std::uint8_t {
  kRead = 0,
  kWrite = 1,      // overwrites the variable whole, so cures it
  kReadWrite = 2,  // ordered as a write, needs the old value
  kFence = 3,      // ordered as a write, by the only access of an op without a body; see Tracker
};

// One access of one op, packed into a word: the op's address and the access' index.
class AccessRef {
 public:
  AccessRef() = default;
  AccessRef(Op* op, std::uint32_t index)
      : bits_(reinterpret_cast<std::uintptr_t>(op) | std::uint64_t{index} << kAddressBits) {}

  explicit operator bool() const { return bits_ != 0; }
  Op* op() const { return reinterpret_cast<Op*>(bits_ & kAddressMask); }
  std::uint32_t index() const { return static_cast<std::uint32_t>(bits_ >> kAddressBits); }

  // User addresses have 47 or 48 bits on x86-64 and arm64 unless a program asks for more.
  static constexpr int kAddressBits = 48;
  static constexpr std::uint64_t kAddressMask = (std::uint64_t{1} << kAddressBits) - 1;
  static constexpr std::size_t kAccessesMax = 0xffff;

 private:
  std::uint64_t bits_ = 0;
};
static_assert(sizeof(void*) == 8, "heddle packs addresses into 48 bits");

class Access {
 public:
  Access(VarState* var, AccessMode mode)
      : word_(reinterpret_cast<std::uintptr_t>(var) | static_cast<std::uintptr_t>(mode)) {}

  VarState* var() const { return reinterpret_cast<VarState*>(word_ & ~std::uintptr_t{63}); }
  AccessMode mode() const { return static_cast<AccessMode>(word_ & 3); }
  bool is_write() const { return mode() != AccessMode::kRead; }
  bool granted() const { return (word_ & kGranted) != 0; }
  void set_granted() { word_ |= kGranted; }
  // The first of the op's `writes`, which names the op's failure.
  bool names_failure() const { return (word_ & kNamesFailure) != 0; }
  void set_names_failure() { word_ |= kNamesFailure; }
  // Of a GPU op: its body has said so of this variable, see Tracker::FailAlone.
  bool fails_alone() const { return is_write() && (word_ & kFailsAlone) != 0; }
  void set_fails_alone() { word_ |= kFailsAlone; }
  // Of a GPU op that runs when poisoned: the variable was, when the body looked.
  bool poison_known() const { return (word_ & kPoisonKnown) != 0; }
  void set_poison_known() { word_ |= kPoisonKnown; }
  // Of a read that was queued: what comes before it in the queue is a write.
  bool follows_write() const { return !is_write() && (word_ & kFollowsWrite) != 0; }
  void set_follows_write(bool does = true) {
    word_ = does ? word_ | kFollowsWrite : word_ & ~kFollowsWrite;
  }

  AccessRef next;  // in the variable's queue, while waiting

 private:
  static constexpr std::uintptr_t kGranted = 4;
  static constexpr std::uintptr_t kNamesFailure = 8;
  static constexpr std::uintptr_t kFailsAlone = 16;
  static constexpr std::uintptr_t kFollowsWrite = kFailsAlone;  // reads fail nothing
  static constexpr std::uintptr_t kPoisonKnown = 32;
  std::uintptr_t word_;
};

// For the few ops that need more than the header holds.
struct OpExtension {
  // Null: of an op that has come back through the CompletionRing. Until it has, it may dangle while
  // the op is in flight.
  AsyncState* async = nullptr;
  std::int64_t temporary_bytes = 0;
  // In EngineCore::in_flight_, or gpu_in_flight_.
  static constexpr std::size_t kNotInFlight = ~std::size_t{0};
  std::size_t in_flight_index = kNotInFlight;
};

}  // namespace heddle::engine

namespace heddle::internal {

// Constant once pushed, except `blocked`, `started`, `issued`, the accesses and the extension,
// which the tracker owns.
struct OpHeader {
  BodyFunction function;
  const char* name;
  std::uint64_t ticket;
  std::int32_t priority;
  std::uint32_t epoch;  // of the op that pushed it if `child`; else given when registered
  std::uint16_t access_count;
  std::uint16_t blocked;  // accesses not granted yet
  std::int16_t device_id;
  DeviceType device_type : 2;
  Lane lane : 2;
  bool async : 1;
  bool started : 1;
  bool child : 1;  // pushed by the body of another op
  bool extended : 1;
  bool run_when_poisoned : 1;
  bool marked : 1;  // see clears_error and keeps_failure
  bool start_inline : 1;
  bool issued : 1;  // of a GPU op: its body has returned
  std::uint8_t block_class : 4;

  // Of a fence. Others are of waits for reads, see WaitFence.
  bool clears_error() const { return marked; }
  // Of another op: its body has called KeepFailure.
  bool keeps_failure() const { return marked; }
};

struct alignas(engine::kBlockAlign) Op : OpHeader {
  static constexpr std::size_t kHeaderBytes = sizeof(OpHeader);

  engine::Access* accesses() {
    return reinterpret_cast<engine::Access*>(reinterpret_cast<std::byte*>(this) + kHeaderBytes);
  }
  engine::Access& access(std::uint32_t index) { return accesses()[index]; }
  engine::OpExtension* extension() {
    return reinterpret_cast<engine::OpExtension*>(accesses() + access_count);
  }
  void* body() {
    return reinterpret_cast<std::byte*>(accesses() + access_count) +
           (extended ? sizeof(engine::OpExtension) : 0);
  }
  AsyncState* async_state() { return async ? extension()->async : nullptr; }
  std::int64_t temporary_bytes() { return extended ? extension()->temporary_bytes : 0; }
  // Of an async op: its body has returned, and it has not finished.
  bool in_flight() {
    return async && extension()->in_flight_index != engine::OpExtension::kNotInFlight;
  }
  bool on_gpu() const { return device_type == DeviceType::kGpu; }
  Device device() const { return {device_type, device_id}; }

  static constexpr std::size_t Bytes(std::size_t accesses, bool extended, std::size_t body_bytes) {
    return kHeaderBytes + accesses * sizeof(engine::Access) +
           (extended ? sizeof(engine::OpExtension) : 0) + body_bytes;
  }
};
// More would cost many ops a line of memory.
static_assert(Op::kHeaderBytes == 40);
static_assert(engine::kBlockClasses < 1 << 4);  // OpHeader::block_class

// The first line belongs to the tracker; the second is written when handles come and go, by any
// thread. They lie apart so that a pushing thread that copies handles does not slow the tracker.
struct alignas(engine::kNoSharing) VarState {
  // Invariants, true whenever the tracker's lock is free:
  //   (V1) A granted writer is alone: writer != null implies readers == 0.
  //   (V2) Accesses are granted in push order; only neighbouring reads are granted together.
  //        Except among GPU ops: one is granted as soon as those before it are issued (V4).
  //   (V3) If the queue is not empty, its front cannot be granted yet, or `granting` says that the
  //   tracker
  //        is in the midst of granting a long run of reads.
  //   (V4) While issued GPU ops hold the variable, `writer` is the last granted writer, GpuVar
  //        counts the writers before it, and readers of several writes are counted together. An op
  //        of a CPU is granted only when no writer is left, and a writing one when nobody is.
  Op* writer = nullptr;       // granted
  Op* reader_hint = nullptr;  // one of the granted readers, if known
  engine::AccessRef head;     // waiting accesses, oldest first
  engine::AccessRef tail;
  std::uint32_t readers = 0;            // granted
  std::uint32_t writes_registered = 0;  // with fences that clear errors; wraps
  std::uint32_t writes_finished = 0;
  std::uint32_t wait_fences = 0;  // in the queue
  bool granting = false;
  bool dropped : 1 = false;        // no handle is left: freed when idle
  bool gpu_holds : 1 = false;      // issued GPU ops hold the variable
  bool keeps_failure : 1 = false;  // `failure`, see KeepFailure
  std::uint32_t waiters = 0;       // threads that wait for a write
  std::atomic<std::uint64_t> version{0};
  engine::FailureRecord* failure = nullptr;

  alignas(engine::kNoSharing) std::atomic<std::uint32_t> refs{1};
  EngineCore* core = nullptr;  // holds a reference
  std::uint64_t id = 0;
  VarState* previous = nullptr;  // all variables of the engine
  VarState* next = nullptr;
  const std::string* name = nullptr;    // null: unnamed
  std::uint64_t made_by = kNoTicket;    // of the op whose body made it
  std::unique_ptr<engine::GpuVar> gpu;  // null: no GPU op has named it

  static constexpr std::uint64_t kNoTicket = ~std::uint64_t{0};

  bool Idle() const { return writer == nullptr && readers == 0 && !head && !granting; }
};
static_assert(sizeof(VarState) == 2 * engine::kNoSharing);

}  // namespace heddle::internal

namespace heddle::engine {

// The place of a wait for reads in the order of a variable: a fence that lies on the stack of the
// thread that waits. It is nobody's op: no count, epoch or trace has it.
class WaitFence {
 public:
  explicit WaitFence(VarState* var) : op_(new (memory_) Op{}) {
    op_->name = "wait_for_reads";
    op_->access_count = 1;
    new (&op_->access(0)) Access(var, AccessMode::kFence);
    new (op_->body()) AccessRef;
  }
  WaitFence(const WaitFence&) = delete;
  WaitFence& operator=(const WaitFence&) = delete;

  Op* op() { return op_; }
  bool passed() const { return op_->access(0).granted(); }
  // What was before it in the queue when it entered, or when that was withdrawn: still is, unless
  // the fence is in front.
  static AccessRef& Before(Op* op) { return *static_cast<AccessRef*>(op->body()); }

 private:
  alignas(kBlockAlign) std::byte memory_[Op::Bytes(1, false, sizeof(AccessRef))];
  Op* const op_;
};
static_assert(sizeof(Op) <= Op::Bytes(1, false, sizeof(AccessRef)));

}  // namespace heddle::engine
