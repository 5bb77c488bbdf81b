// Where pushing threads leave their ops: a ring of slots whose tickets are the order of all pushes.
//
// A push writes one slot and touches no variable and no queue; the one thread that holds the
// engine's lock empties the ring in ticket order. The ticket is taken by one atomic addition, so
// the order respects each thread's own and every happens-before between pushes.
//
// A slot holds an address, two bits that say of what, and the parity of the lap: the consumer never
// writes slots, and a slot is full exactly when its parity is that of the ticket's lap.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "base/prefetch.h"
#include "base/system_memory.h"
#include "engine/op.h"

namespace heddle::engine {

enum class MessageKind : std::uint8_t {
  kOp = 0,       // an Op to register
  kDropped = 1,  // a VarState whose last handle is gone
  kGpuOp = 2,    // an Op of a GPU to register
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

  // Producers, any thread. TakeTicket, then Publish; before Publish wait while !HasSlot(ticket).
  // seq_cst: pairs with the recheck of tail() by an executor that is about to sleep.
  std::uint64_t TakeTicket() { return tail_.fetch_add(1, std::memory_order_seq_cst); }
  bool HasSlot(std::uint64_t ticket) const {
    // acquire; pairs with the release in Advance: the slot's old content has been read
    return ticket - head_published_.load(std::memory_order_acquire) < kSlots;
  }
  void Publish(std::uint64_t ticket, void* address, MessageKind kind) {
    const std::uint64_t word = reinterpret_cast<std::uintptr_t>(address) |
                               static_cast<std::uint64_t>(kind) << 1 | Parity(ticket);
    // release; pairs with the acquire in At: the op's block is visible
    slots_[ticket & (kSlots - 1)].word.store(word, std::memory_order_release);
  }
  std::uint64_t tail() const { return tail_.load(std::memory_order_seq_cst); }

  // The consumer, under the engine's lock. `head` is the ticket that it takes next; it keeps that
  // itself, beside what else it changes with every op.
  Message At(std::uint64_t head) const {
    const std::uint64_t word = slots_[head & (kSlots - 1)].word.load(std::memory_order_acquire);
    if (word == 0 || (word & 1) != Parity(head)) return {MessageKind::kOp, nullptr};
    return {static_cast<MessageKind>(word >> 1 & 3),
            reinterpret_cast<void*>(word & ~std::uint64_t{7})};
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
  struct Slot {
    std::atomic<std::uint64_t> word;  // 0 bits of fresh zeroed memory: an empty slot of lap 0
  };
  struct FreeSlots {
    void operator()(Slot* slots) const { ReturnToSystem(slots, kBytes); }
  };
  static constexpr std::int64_t kBytes = kSlots * sizeof(Slot);
  static constexpr std::uint64_t kPrefetchDistance = 6;
  static constexpr std::uint64_t kPublishEvery = 32;

  static std::uint64_t Parity(std::uint64_t ticket) { return (ticket / kSlots + 1) & 1; }

  const std::unique_ptr<Slot[], FreeSlots> slots_;
  alignas(kNoSharing) std::atomic<std::uint64_t> tail_{0};
  alignas(kNoSharing) std::atomic<std::uint64_t> head_published_{0};
};

}  // namespace heddle::engine
