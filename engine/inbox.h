// Where pushing threads leave their ops: a ring of slots whose tickets are the order of all pushes.
//
// A push writes one slot and touches no variable and no queue; the one thread that holds the
// engine's lock empties the ring in ticket order. The ticket is taken by one atomic addition, so
// the order respects each thread's own and every happens-before between pushes.
//
// A slot holds an address, two bits that say of what, the parity of the lap, and the op's priority:
// the consumer never writes slots, and a slot is full exactly when its parity is that of the
// ticket's lap.
//
// The consumer may stop at a slot, and leave those behind it for later, if none of these comes
// first. For priorities below 0 producers see to that: each compares its op with the one before,
// and says so if its own is above.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "base/check.h"
#include "base/prefetch.h"
#include "base/system_memory.h"
#include "engine/op.h"

namespace heddle::engine {

enum class MessageKind : std::uint8_t {
  kOp = 0,       // an Op to register
  kDropped = 1,  // a VarState whose last handle is gone
  kGpuOp = 2,    // an Op of a GPU to register
  kFence = 3,    // the Op of a ClearError to register
};

class Inbox {
 public:
  struct Message {
    MessageKind kind;
    void* address;  // null: none yet
  };

  Inbox() : slots_(static_cast<Slot*>(TakeFromSystem(kBytes))) {
    if (slots_ == nullptr) throw std::bad_alloc();
    // The memory is zero already. This takes all of its pages now: an engine that is given few ops
    // would need hours to touch them, and its process would grow all that time.
    std::memset(static_cast<void*>(slots_.get()), 0, kBytes);
  }

  // Producers, any thread. TakeTicket, then Publish or PublishDrop; before these wait while
  // !HasSlot(ticket).
  // seq_cst: pairs with the recheck of tail() by an executor that is about to sleep. Acquire and
  // release at the least: what was written before a ticket was taken, who has a later one sees.
  std::uint64_t TakeTicket() { return tail_.fetch_add(1, std::memory_order_seq_cst); }
  // An op's. It says that it is below 0 first, so who has a later ticket knows.
  std::uint64_t TakeTicket(int priority) {
    if (priority < 0 && !below_zero_.load(std::memory_order_relaxed)) [[unlikely]]
      below_zero_.store(true, std::memory_order_relaxed);
    return TakeTicket();
  }
  bool HasSlot(std::uint64_t ticket) const {
    // acquire; pairs with the release in Advance: the slot's old content has been read
    return ticket - head_published_.load(std::memory_order_acquire) < kSlots;
  }
  void Publish(std::uint64_t ticket, void* op, MessageKind kind, int priority) {
    const int level = std::clamp(priority, kLevelMin, kLevelMax);
    // Before the slot: whoever finds that its op is not above this one, and says nothing, passes on
    // what is said here.
    if (below_zero_.load(std::memory_order_relaxed) && LevelBefore(ticket, kLevelMin) < level) {
      NoteRise(ticket);
    }
    Store(ticket, op, kind, level);
  }
  // Of the same priority as what came before; if that is not known, of the highest, so that what
  // comes next need not be compared with it.
  void PublishDrop(std::uint64_t ticket, void* var) {
    const bool compare = below_zero_.load(std::memory_order_relaxed);
    const int level = compare ? LevelBefore(ticket, kLevelMax) : 0;
    if (level == kLevelMax) NoteRise(ticket);
    Store(ticket, var, MessageKind::kDropped, level);
  }
  std::uint64_t tail() const { return tail_.load(std::memory_order_seq_cst); }

  // The consumer, under the engine's lock. `head` is the ticket that it takes next; it keeps that
  // itself, beside what else it changes with every op.
  Message At(std::uint64_t head) const {
    const std::uint64_t word = Word(head);
    if (!IsOf(word, head)) return {MessageKind::kOp, nullptr};
    return {static_cast<MessageKind>(word >> 1 & 3), reinterpret_cast<void*>(word & kAddress)};
  }
  // May an op of this priority, which is below 0, run before all that lies in the ring? False: one
  // of those may be above it.
  // Not inlined: where all priorities are 0 it only would be in the way.
  [[gnu::noinline]] bool NothingComesBefore(int priority, std::uint64_t head) const {
    const std::uint64_t word = Word(head);
    if (!IsOf(word, head)) return true;
    return head >= last_rise_.load(std::memory_order_relaxed) && LevelOf(word) <= priority;
  }
  void Advance(std::uint64_t* head) {
    // A slot some way ahead is the next block needed: fetching it now hides the trip from the
    // pusher's core.
    if (const void* block = At(*head + kPrefetchDistance).address) {
      PrefetchForWrite(block);
      PrefetchForWrite(static_cast<const std::byte*>(block) + kBlockAlign);
    }
    if ((++*head & (kPublishEvery - 1)) == 0) PublishHead(*head);
  }
  // Lets producers see every slot that is free.
  void PublishHead(std::uint64_t head) { head_published_.store(head, std::memory_order_release); }

  // From any thread: may be late.
  std::uint64_t LooseTail() const { return tail_.load(std::memory_order_relaxed); }

  static constexpr std::uint64_t kSlots = std::uint64_t{1} << 18;

 private:
  // From the lowest bit: the parity, two of the kind, the rest of the address, and 16 of the
  // priority. A program gets no address of more than 48 bits unless it asks for one, or for tags.
  struct Slot {
    std::atomic<std::uint64_t> word;  // 0 bits of fresh zeroed memory: an empty slot of lap 0
  };
  static constexpr int kAddressBits = 48;
  static constexpr std::uint64_t kAddress = (std::uint64_t{1} << kAddressBits) - 8;
  // Priorities as slots have them. The ends stand for what is beyond, too.
  static constexpr int kLevelMin = -(1 << 15);
  static constexpr int kLevelMax = (1 << 15) - 1;
  struct FreeSlots {
    void operator()(Slot* slots) const { ReturnToSystem(slots, kBytes); }
  };
  static constexpr std::int64_t kBytes = kSlots * sizeof(Slot);
  static constexpr std::uint64_t kPrefetchDistance = 6;
  static constexpr std::uint64_t kPublishEvery = 32;

  static std::uint64_t Parity(std::uint64_t ticket) { return (ticket / kSlots + 1) & 1; }
  static bool IsOf(std::uint64_t word, std::uint64_t ticket) {
    return word != 0 && (word & 1) == Parity(ticket);
  }
  static int LevelOf(std::uint64_t word) { return static_cast<std::int16_t>(word >> kAddressBits); }
  std::uint64_t Word(std::uint64_t ticket) const {
    // acquire; pairs with the release in Store: the op's block is visible
    return slots_[ticket & (kSlots - 1)].word.load(std::memory_order_acquire);
  }
  void Store(std::uint64_t ticket, void* address, MessageKind kind, int level) {
    DCHECK((reinterpret_cast<std::uintptr_t>(address) & ~kAddress) == 0);
    std::uint64_t word = reinterpret_cast<std::uintptr_t>(address) |
                         static_cast<std::uint64_t>(kind) << 1 | Parity(ticket);
    // A branch, so that the usual slot does not wait for its level.
    if (level != 0) [[unlikely]]
      word |= static_cast<std::uint64_t>(level) << kAddressBits;
    slots_[ticket & (kSlots - 1)].word.store(word, std::memory_order_release);
  }
  // Of the slot before, or `unknown` if that is not written yet.
  int LevelBefore(std::uint64_t ticket, int unknown) const {
    const std::uint64_t before = Word(ticket - 1);
    return IsOf(before, ticket - 1) ? LevelOf(before) : unknown;
  }
  // Says that the op of this ticket is, or may be, above the one before.
  void NoteRise(std::uint64_t ticket) {
    std::uint64_t last = last_rise_.load(std::memory_order_relaxed);
    while (last < ticket &&
           !last_rise_.compare_exchange_weak(last, ticket, std::memory_order_relaxed)) {
    }
  }

  const std::unique_ptr<Slot[], FreeSlots> slots_;
  std::atomic<bool> below_zero_{false};  // an op below priority 0 has been pushed, ever
  // The latest ticket whose op may be above the one before it: from a head at or behind it on, no
  // slot is above the one before.
  alignas(kNoSharing) std::atomic<std::uint64_t> last_rise_{0};
  alignas(kNoSharing) std::atomic<std::uint64_t> tail_{0};
  alignas(kNoSharing) std::atomic<std::uint64_t> head_published_{0};
};

}  // namespace heddle::engine
