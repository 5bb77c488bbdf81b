// Why ops fail, and what the engine remembers of it.
#pragma once

#include <heddle/engine.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <set>
#include <string>

namespace heddle::engine {

// An exception with its message. what() is the program's own code, which must not run under the
// engine's lock: so whoever catches the exception asks for it at once.
struct Thrown {
  explicit Thrown(std::exception_ptr exception);

  std::exception_ptr error;
  std::string message;
};

// What all pointers to one exception have in common, to look it up by.
const void* AddressOf(const std::exception_ptr& error) noexcept;

// Why variables are poisoned: the first op that failed. Guarded by the tracker's lock, counted by
// `refs`. When nobody refers to it any more it is not freed at once: what its exception owns may
// use the engine as it goes. See Tracker::TakeUnused.
struct FailureRecord {
  std::uint64_t ticket = 0;
  std::exception_ptr error{};
  Failure failure{};
  int refs = 0;
  bool unreported = false;        // WaitForAll has still to throw it
  bool seen = false;              // by any wait
  bool unheard = false;           // to be logged when it is freed
  FailureRecord* next = nullptr;  // of those that nobody refers to
};

// The failures that WaitForAll has still to throw, each of which it refers to. Plain state: whoever
// holds the engine's lock works on it.
class Unreported {
 public:
  static constexpr std::size_t kMax = 10'000;

  bool full() const { return unseen_.size() + seen_.size() >= kMax; }
  // Not when full. Takes over one of the references to `failure`, which no wait has seen yet.
  void Add(FailureRecord* failure);
  // A wait throws `failure`, whether it is among these or not.
  void See(FailureRecord* failure);
  // These hand a reference over. The one whose op was pushed earliest; null: there is none.
  FailureRecord* TakeEarliest();
  // The one to go for another, where there is one: the earliest that a wait has seen, or else the
  // earliest.
  FailureRecord* TakeLeastWanted();
  // Null: waits have seen all of them.
  FailureRecord* EarliestUnseen() const { return unseen_.empty() ? nullptr : *unseen_.begin(); }

 private:
  struct Earlier {
    bool operator()(const FailureRecord* a, const FailureRecord* b) const {
      return a->ticket < b->ticket;
    }
  };
  // GPU ops fail for single variables, so several may have one ticket.
  using Failures = std::multiset<FailureRecord*, Earlier>;
  static FailureRecord* TakeFirst(Failures& failures);

  Failures unseen_;
  Failures seen_;
};

}  // namespace heddle::engine
