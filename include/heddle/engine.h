// The dependency engine: runs ops asynchronously, ordered by the variables that they read and
// write.
//
//   heddle::Engine engine;
//   heddle::Var x = engine.NewVar("x"), y = engine.NewVar("y");
//   engine.Push({.name = "load", .writes = {x}}, [&] { Load(buffer); });
//   engine.Push({.name = "add", .reads = {x, y}, .writes = {y}, .priority = 2},
//               [&] { Add(buffer, sum); });
//   engine.WaitForVar(y);
//
// docs/consistency.md lists the promises and the test that shows each.
#pragma once

#include <heddle/completion.h>
#include <heddle/device.h>
#include <heddle/error.h>
#include <heddle/gpu.h>
#include <heddle/var.h>
#include <heddle/wait_poller.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace heddle {

namespace internal {
class GpuDriver;
class WaitChecks;
}  // namespace internal

// Lanes of a device. CPU workers serve all lanes in one order; GPUs have streams for each. kCopy is
// for copies within and into a device, kCopyOut for those out of it, which run beside them.
enum class Lane : std::uint8_t { kNormal, kCopy, kComm, kCopyOut };

// The name of a kind of op, for errors and traces. A string literal is kept by address; any other
// string is interned for the life of the process, so use a bounded set of names. A const char array
// that is neither a literal nor static does not compile: pass a std::string_view of it.
class OpName {
 public:
  constexpr OpName() = default;
  template <std::size_t kSize>
  consteval OpName(const char (&literal)[kSize]) : text_(literal) {}  // NOLINT
  template <std::size_t kSize>
  OpName(char (&buffer)[kSize]) : text_(Intern(buffer)) {}  // NOLINT
  template <class Text>
  requires(std::is_convertible_v<const Text&, std::string_view> && !std::is_array_v<Text>)
      OpName(const Text& text)  // NOLINT(google-explicit-constructor)
      : text_(Intern(text)) {}

  constexpr const char* c_str() const { return text_; }

 private:
  static const char* Intern(std::string_view text);
  const char* text_ = "op";
};

// What an op is. A variable may stand in both lists (read-modify) or several times (counts once);
// in `writes` alone it means that the op overwrites it whole.
struct OpOptions {
  OpName name = {};
  VarList reads = {};
  VarList writes = {};
  Device device = Cpu();
  Lane lane = Lane::kNormal;
  int priority = 0;                  // higher first
  bool run_when_poisoned = false;    // run although an input failed; the body looks at FailureOf
  std::int64_t temporary_bytes = 0;  // counts against max_pending_bytes until the body has returned
  // If the op is ready when it is pushed, its body runs inside the push, on the pushing thread and
  // past num_workers and the ready ops, instead of on a worker: for short bodies that start a
  // transfer. The push first registers what was pushed before. No effect inside an op, under a
  // NoWaitScope (so not in a WaitPoller either) and on the seeded engine.
  bool start_inline = false;
};

// A point in time, given as one or as a duration from now. A duration too long for the clock to
// count, such as std::chrono::hours::max(), never passes.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;
  template <class Rep, class Period>
  Deadline(std::chrono::duration<Rep, Period> from_now)  // NOLINT(google-explicit-constructor)
      : time_(After(from_now)) {}
  Deadline(Clock::time_point time) : time_(time) {}  // NOLINT(google-explicit-constructor)
  Clock::time_point time() const { return time_; }

 private:
  template <class Duration>
  static Clock::time_point After(Duration from_now) {
    // Compared as double, which holds what no whole number of nanoseconds does.
    constexpr double kFar = 1LL << 62;
    const double ticks = std::chrono::duration<double, Clock::period>(from_now).count();
    if (ticks >= kFar) return Clock::time_point::max();
    if (!(ticks > -kFar)) return Clock::time_point::min();
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(from_now);
  }

  Clock::time_point time_;
};

// Where the threads of a threaded engine come from.
enum class WorkerHost : std::uint8_t {
  kTbb,      // one thread; the others as tasks in a oneTBB arena, shared politely with the program
  kThreads,  // plain threads of the engine's own; always these if built for the thread sanitizer
};

struct EngineOptions {
  // "threaded"; "serial": ops run in the outermost Push, on the pushing thread; "seeded": ops run
  // only inside waits, in an order that `seed` picks among the ready ones.
  std::string type = "threaded";
  int num_workers = 0;  // 0: one per CPU that affinity and the cgroup quota allow
  WorkerHost worker_host = WorkerHost::kTbb;
  std::uint64_t seed = 0;
  std::int64_t max_pending_ops = 1 << 20;
  std::int64_t max_pending_bytes = std::int64_t{4} << 30;
  // A ready op that this many ops of higher priority, pushed after it, have overtaken runs next; 0
  // never. Those pushed before it may count, too. Where ops of k more priorities than its own wait
  // for their turn so as well, up to k more go first; ops of its own priority, one after the other.
  int ageing = 1000;
  // Logs the blocked chain when nothing has finished for so long while ops are pending; 0 never.
  std::chrono::milliseconds watchdog{30'000};
  // An op whose body touches an NDArray that the op does not declare, or writes one that it
  // declares as read only, fails with AccessError. Costs time: for tests and for hunting bugs.
  bool check_access = false;
  GpuOptions gpu = {};
  // Null: CUDA, if it is built in. Tests put a simulated device here.
  std::shared_ptr<internal::GpuDriver> gpu_driver = nullptr;
  // Empty: no trace. Engines of one process that got the name from HEDDLE_TRACE each write to a
  // file of their own: run.trace, run.2.trace, ...
  std::string trace_file;
  std::int64_t trace_bytes_max = std::int64_t{256} << 20;

  // The defaults, changed by HEDDLE_ENGINE, HEDDLE_NUM_WORKERS, HEDDLE_WORKER_HOST (tbb, threads),
  // HEDDLE_SEED, HEDDLE_MAX_PENDING_OPS, HEDDLE_MAX_PENDING_BYTES, HEDDLE_AGEING,
  // HEDDLE_WATCHDOG_MS, HEDDLE_CHECK_ACCESS, HEDDLE_GPU_ISSUED_AHEAD, HEDDLE_TRACE and
  // HEDDLE_TRACE_BYTES_MAX: see docs/settings.md. Throws InvalidArgument, a line for each variable
  // that is wrong.
  static EngineOptions FromEnvironment();
};

// Why a variable is poisoned.
struct Failure {
  std::string op;       // the op that failed first
  std::string var;      // the first variable that this op writes; empty if none
  std::string message;  // what() of its exception
};

struct EngineStats {
  std::uint64_t pushed = 0;            // ops, since the start
  std::uint64_t done = 0;              // finished, failed and skipped ones included
  std::uint64_t failed = 0;            // failed or skipped because an input had failed
  std::uint64_t running = 0;           // bodies executing, and async ops not yet completed
  std::uint64_t pending_bytes = 0;     // temporary bytes of pending ops
  std::uint64_t late_completions = 0;  // calls of a completion after the first
};

namespace internal {

class EngineCore;
struct Op;
enum class BodyAction { kRun, kFinish, kDrop };
// Runs the body in `storage` (kRun) and destroys it, also when it throws; or only destroys it
// (kDrop). That of a GPU op, whose captures live until the device is done, is destroyed by kDrop or
// by kFinish, which calls its Finish() before, if it has one. `async` is the op's completion state,
// null for synchronous ops.
using BodyFunction = void (*)(void* storage, BodyAction action, AsyncState* async);

enum class PushMode { kWaitForRoom, kTry };

struct NewOp {
  Op* op;  // null: no room (PushMode::kTry)
  void* storage;
};
// Validates the options and waits for room. Bodies up to kBodyBytesMax bytes are stored in the op.
enum class BodyKind { kSync, kAsync, kGpu };
NewOp BeginPush(EngineCore& core, const OpOptions& options, std::size_t body_bytes,
                BodyFunction function, bool async, PushMode mode);
std::uint64_t CommitPush(EngineCore& core, Op* op) noexcept;  // the op's ticket
NewOp BeginGpuPush(EngineCore& core, const OpOptions& options, std::size_t body_bytes,
                   BodyFunction function, PushMode mode);
std::uint64_t CommitGpuPush(EngineCore& core, Op* op) noexcept;
GpuStream StreamOf(AsyncState* async) noexcept;  // of a GPU op whose body runs
void AbandonPush(EngineCore& core, Op* op) noexcept;
[[noreturn]] void ThrowNullBody(const OpOptions& options);

// For its scope, a push of this thread that waits for room gives up at `deadline`.
class RoomDeadline {
 public:
  explicit RoomDeadline(const Deadline& deadline) noexcept;
  ~RoomDeadline();
  RoomDeadline(const RoomDeadline&) = delete;
  RoomDeadline& operator=(const RoomDeadline&) = delete;
};

inline constexpr std::size_t kBodyBytesMax = 256;

// How a body of type Body lies in an op: in place, or behind a pointer if large or over-aligned.
template <class Body, BodyKind kKind>
struct StoredBody {
  static constexpr bool kInPlace = sizeof(Body) <= kBodyBytesMax && alignof(Body) <= alignof(void*);
  static constexpr std::size_t kBytes = kInPlace ? sizeof(Body) : sizeof(Body*);

  template <class F>
  static void Construct(void* storage, F&& body) {
    if constexpr (kInPlace) {
      ::new (storage) Body(std::forward<F>(body));
    } else {
      *static_cast<Body**>(storage) = new Body(std::forward<F>(body));
    }
  }

  static void Invoke(void* storage, BodyAction action, [[maybe_unused]] AsyncState* async) {
    Body* const stored =
        kInPlace ? std::launder(static_cast<Body*>(storage)) : *static_cast<Body**>(storage);
    if constexpr (kKind == BodyKind::kGpu) {
      if (action == BodyAction::kRun) {
        (*stored)(StreamOf(async));
        return;
      }
    }
    struct Destroyer {
      Body* body;
      ~Destroyer() {
        if constexpr (kInPlace) {
          body->~Body();
        } else {
          delete body;
        }
      }
    };
    const Destroyer destroyer{stored};
    if (action == BodyAction::kDrop) return;
    if constexpr (kKind == BodyKind::kGpu) {
      if constexpr (requires { stored->Finish(); }) stored->Finish();
    }
    if constexpr (kKind == BodyKind::kAsync) {
      RetainAsync(async);
      (*stored)(Completion::Adopt(async));
    } else if constexpr (kKind == BodyKind::kSync) {
      (*stored)();
    }
  }
};

}  // namespace internal

// Threads: every method may be called from any thread, and from inside op bodies except the waits.
// Waits throw InvalidState inside an op body, naming the op. After Stop, everything that asks for
// work throws InvalidState; accessors answer, vars may be dropped, traces and pollers be ended.
class Engine {
 public:
  explicit Engine(EngineOptions options = {});
  // Stops; errors that nobody saw are logged. In an op of this very engine, whose captures had the
  // last handle, that happens on a thread of its own later. Not on a GPU op's way out.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // The engine that front ends share: made from EngineOptions::FromEnvironment() on first use.
  static Engine& Default();

  // A fresh variable, version 0. Its name appears in errors, dumps and traces.
  Var NewVar(std::string_view name = {});

  // Queues body(). Returns once the op is queued: it never waits for inputs, only for room when
  // more than max_pending_ops are pending (and not from inside an op, nor under a NoWaitScope).
  // Returns the op's ticket, by which DumpState and traces name it: tickets rise in the order of
  // all pushes, in which ops take their places at their variables. Errors: InvalidArgument (null
  // body, empty var or one of another engine, device not built in), InvalidState (stopped). Nothing
  // is queued then.
  template <class F>
  std::uint64_t Push(const OpOptions& options, F&& body) {
    return Enqueue<F, kSync>(options, std::forward<F>(body), internal::PushMode::kWaitForRoom);
  }
  // Like Push, but waits for room until `deadline` at most: TimeoutError then, which names the op
  // that holds it up, and nothing is queued.
  template <class F>
  std::uint64_t Push(const OpOptions& options, F&& body, Deadline deadline) {
    const internal::RoomDeadline scope(deadline);
    return Push(options, std::forward<F>(body));
  }
  // Like Push, but returns false instead of waiting for room.
  template <class F>
  [[nodiscard]] bool TryPush(const OpOptions& options, F&& body) {
    return Enqueue<F, kSync>(options, std::forward<F>(body), internal::PushMode::kTry) != kNoRoom;
  }
  // Queues body(completion): the op finishes when the body has returned and the completion was
  // called.
  template <class F>
  std::uint64_t PushAsync(const OpOptions& options, F&& body) {
    return Enqueue<F, kAsync>(options, std::forward<F>(body), internal::PushMode::kWaitForRoom);
  }
  template <class F>
  std::uint64_t PushAsync(const OpOptions& options, F&& body, Deadline deadline) {
    const internal::RoomDeadline scope(deadline);
    return PushAsync(options, std::forward<F>(body));
  }
  template <class F>
  [[nodiscard]] bool TryPushAsync(const OpOptions& options, F&& body) {
    return Enqueue<F, kAsync>(options, std::forward<F>(body), internal::PushMode::kTry) != kNoRoom;
  }
  // Queues body(GpuStream) for options.device, a gpu(i). The body runs on a thread of the engine,
  // as soon as the ops before it on its variables have finished or, if of GPUs, have been issued;
  // it issues work on the stream, which waits for theirs, and returns without waiting for it. The
  // op finishes when all that it issued is done; what the body captures lives until then. An
  // exception of the body, or a launch that failed, fails it; an error that the device reports
  // later fails it, all that comes after it and all other ops of that device, for good.
  // A body with a method Finish() has it called when all is done and nothing has failed, on a
  // thread of the engine or one in a call of it. Like destructors of captures it is a part of the
  // op: it pushes as a body does, waits throw. What it throws fails the op, and what has been
  // issued behind it, what runs when poisoned included: its body could not look at that.
  // start_inline has no effect. Errors: as Push; InvalidArgument for a device that is not a GPU or
  // not there; std::system_error where there is no thread to be had for the first such push.
  template <class F>
  std::uint64_t PushGpu(const OpOptions& options, F&& body) {
    return Enqueue<F, kGpu>(options, std::forward<F>(body), internal::PushMode::kWaitForRoom);
  }
  template <class F>
  std::uint64_t PushGpu(const OpOptions& options, F&& body, Deadline deadline) {
    const internal::RoomDeadline scope(deadline);
    return PushGpu(options, std::forward<F>(body));
  }
  template <class F>
  [[nodiscard]] bool TryPushGpu(const OpOptions& options, F&& body) {
    return Enqueue<F, kGpu>(options, std::forward<F>(body), internal::PushMode::kTry) != kNoRoom;
  }

  // Returns when all writes of `var` that were pushed before are done, and throws the error of the
  // variable if it is poisoned. All that they did is visible to the caller. With a deadline:
  // TimeoutError, also of other waits. The thread then leaves bodies of ops to the workers; where
  // there are none it runs one after the other, and looks at the deadline in between.
  void WaitForVar(const Var& var);
  void WaitForVar(const Var& var, Deadline deadline);
  // Like WaitForVar, and waits for pending reads too: afterwards the caller may overwrite what it
  // guards.
  void WaitForReadsAndWrites(const Var& var);
  void WaitForReadsAndWrites(const Var& var, Deadline deadline);
  // Returns when everything pushed before, and what the bodies of those ops push, is done. What
  // other threads push counts by itself, also if they push it for an async op, which they complete
  // then: it is waited for if it was pushed before the call.
  // Throws the unreported error of the op pushed earliest, each once; the rest stay for the next
  // call, up to 10 000. For a further one the earliest that another wait has thrown is left out,
  // or if none has been, the earliest, which is logged as at Stop.
  void WaitForAll();
  void WaitForAll(Deadline deadline);

  // Refuses further pushes from outside, runs everything pending, then ends the workers.
  // Repeatable.
  void Stop();
  void Stop(Deadline deadline);  // TimeoutError: still stopping; may be called again

  // Completed writes of `var`, failed and skipped ones included.
  std::uint64_t version(const Var& var) const;
  // Why `var` is poisoned now; nothing if it is not.
  std::optional<Failure> FailureOf(const Var& var) const;
  // The exception that poisons `var` now; null if none. An op that rethrows it passes the same
  // failure on, rather than making a new one. For bodies pushed with run_when_poisoned.
  std::exception_ptr ErrorOf(const Var& var) const;
  // Cures `var`, in order like a write pushed now; does not count as one.
  void ClearError(const Var& var);

  // Lets threads that wait run `poller` while async ops are in flight; see WaitPoller. False: the
  // engine has one already, and is left as it was.
  [[nodiscard]] bool AddPoller(WaitPoller& poller);
  // Returns when no thread of the engine is in `poller`, nor will be. Nothing happens if it was not
  // added. Throws InvalidState inside its RunOne.
  void RemovePoller(WaitPoller& poller);

  // Splits [0, count) into blocks of `grain` and calls body(begin, end) for each, on this thread,
  // on threads that wait for the op, and on idle workers, until all are done. The blocks do not
  // depend on the number of workers. The first exception is rethrown once all started blocks have
  // ended. For use inside op bodies; elsewhere it works too, but must not wait for ops either:
  // whoever runs blocks has the place of a worker.
  void ParallelFor(std::int64_t count, std::int64_t grain,
                   const std::function<void(std::int64_t begin, std::int64_t end)>& body);

  // Every pending op, a line each: name, state, variables, and whom it waits for.
  std::string DumpState() const;
  EngineStats stats() const;
  const EngineOptions& options() const;  // num_workers as resolved

  // Records every op from now on as binary records in `file` (see docs/trace.md).
  void StartTrace(const std::string& file);
  void StopTrace();

 private:
  static constexpr internal::BodyKind kSync = internal::BodyKind::kSync;
  static constexpr internal::BodyKind kAsync = internal::BodyKind::kAsync;
  static constexpr internal::BodyKind kGpu = internal::BodyKind::kGpu;

  template <class Body, internal::BodyKind kKind>
  static constexpr bool Takes() {
    if constexpr (kKind == kAsync) return std::is_invocable_v<Body&, Completion>;
    if constexpr (kKind == kGpu) return std::is_invocable_v<Body&, GpuStream>;
    return std::is_invocable_v<Body&>;
  }

  static constexpr std::uint64_t kNoRoom = ~std::uint64_t{0};  // instead of a ticket

  template <class F, internal::BodyKind kKind>
  std::uint64_t Enqueue(const OpOptions& options, F&& body, internal::PushMode mode) {
    using Body = std::decay_t<F>;
    using Stored = internal::StoredBody<Body, kKind>;
    static_assert(Takes<Body, kKind>(),
                  "Push takes a body(), PushAsync a body(heddle::Completion), PushGpu a "
                  "body(heddle::GpuStream)");
    if constexpr (requires { body == nullptr; }) {
      if (body == nullptr) internal::ThrowNullBody(options);
    }
    internal::NewOp fresh;
    if constexpr (kKind == kGpu) {
      fresh = internal::BeginGpuPush(*core_, options, Stored::kBytes, &Stored::Invoke, mode);
    } else {
      fresh = internal::BeginPush(*core_, options, Stored::kBytes, &Stored::Invoke, kKind == kAsync,
                                  mode);
    }
    if (fresh.op == nullptr) return kNoRoom;
    if constexpr (Stored::kInPlace && std::is_nothrow_constructible_v<Body, F&&>) {
      Stored::Construct(fresh.storage, std::forward<F>(body));
    } else {
      try {
        Stored::Construct(fresh.storage, std::forward<F>(body));
      } catch (...) {
        internal::AbandonPush(*core_, fresh.op);
        throw;
      }
    }
    if constexpr (kKind == kGpu) {
      return internal::CommitGpuPush(*core_, fresh.op);
    } else {
      return internal::CommitPush(*core_, fresh.op);
    }
  }

  internal::EngineCore* core_;
};

// While one lives, waits of its thread call `check` at least every `interval`, bodies aside. An
// exception of it leaves the wait, which then has changed nothing. For hosts that take signals in
// code of their own. Scopes nest, the innermost counts. `check` may do anything but wait.
//
// A push that waits for room, or on the serial engine for its turn, or between ops that it runs,
// may be in the middle of a call that pushes several ops, all of which have to come. So an
// exception ends that and is kept, at the end of the scope by the outer one: later pushes enter
// beyond the bound and leave ops to the thread that runs some, the next wait throws it, or the host
// takes it.
class WaitCheckScope {
 public:
  using Check = void (*)();
  WaitCheckScope(std::chrono::milliseconds interval, Check check);
  ~WaitCheckScope();
  WaitCheckScope(const WaitCheckScope&) = delete;
  WaitCheckScope& operator=(const WaitCheckScope&) = delete;

  // What was kept, which is kept no longer; null: nothing.
  std::exception_ptr TakeError() { return std::exchange(error_, nullptr); }

 private:
  friend class internal::WaitChecks;
  const std::chrono::milliseconds interval_;
  const Check check_;
  WaitCheckScope* const outer_;
  std::exception_ptr error_;
};

// While one lives, pushes of its thread never wait for room nor run a body, and its waits never run
// a WaitPoller. For threads that must not block, such as those that complete async ops. Scopes
// nest.
class NoWaitScope {
 public:
  NoWaitScope();
  ~NoWaitScope();
  NoWaitScope(const NoWaitScope&) = delete;
  NoWaitScope& operator=(const NoWaitScope&) = delete;
};

}  // namespace heddle
