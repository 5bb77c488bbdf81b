// The GIL, and how threads end with the interpreter.
//
// A thread that asks for the GIL of an interpreter that is finalising is ended by Python 3.11 to
// 3.13, which unwinds its stack; frames of C++ cannot take that, and the process would abort. So
// once the interpreter is ending (EndThreads), a thread that is about to come back from heddle to
// Python stays where it is. It holds no lock there. Daemon threads end this way: all others have
// ended by then. Python code with frames of heddle beneath it may ask for the GIL at any time, and
// cannot be kept from it: what ends the interpreter waits for it (AwaitUpdaters, AwaitRunningOps).
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include <nanobind/nanobind.h>

namespace heddle::python {

namespace nb = nanobind;

// From now on threads other than this one stay in heddle when they leave it. Waits for those that
// are on their way. With the GIL.
void EndThreads();

// Waits for the code that other threads run under a Locked, or under a RunningOp that is no
// Locked's, for half a minute at most. Without the GIL, in a Blocking: throws what the handler of a
// signal raises.
void AwaitUpdaters();
void AwaitRunningOps();

// Announces that the thread is about to ask for the GIL. False: it must not ask.
class Entrance {
 public:
  Entrance();
  ~Entrance();
  Entrance(const Entrance&) = delete;
  Entrance& operator=(const Entrance&) = delete;
  explicit operator bool() const { return is_open_; }

 private:
  bool is_open_;
};

// Holds no GIL while it lives.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked();
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* const state_;
};

// While one lives, its thread works for an op, in Python, and comes back to it: what ends the
// interpreter waits for ops.
class RunningOp {
 public:
  enum class Of : std::uint8_t { kOp, kUpdater };
  explicit RunningOp(Of of = Of::kOp);
  ~RunningOp();
  RunningOp(const RunningOp&) = delete;
  RunningOp& operator=(const RunningOp&) = delete;

 private:
  std::atomic<int>& count_;
};

// Holds the GIL while it lives, for an updater, which may call heddle. InvalidState once the
// interpreter is ending.
class Locked {
 public:
  Locked();
  ~Locked();
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  std::optional<RunningOp> running_;
  std::optional<nb::gil_scoped_acquire> held_;
};

}  // namespace heddle::python
