// Where async ops whose completions have been called lie until the tracker takes them.
//
// Like the inbox a ring of slots in the order of tickets, each an op's address and the parity of
// the lap. A completing thread writes a slot and nothing of the op, whose lines stay with the
// executor that ran it; and the executor, which learns all addresses at once, chases no pointers.
// The ring may be full: completions are called where nothing may wait, so they go another way then.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "base/prefetch.h"
#include "engine/op.h"

namespace heddle::engine {

class CompletionRing {
 public:
  CompletionRing() : slots_(static_cast<Slot*>(std::calloc(kSlots, sizeof(Slot)))) {
    if (slots_ == nullptr) throw std::bad_alloc();
  }

  // Producers, any thread. TryTakeTicket, then Publish, which is the last that a producer needs of
  // the ring: the op of a ticket is not finished before.
  // False: the ring is full. seq_cst: pairs with the recheck of tail() by an executor that is about
  // to sleep.
  bool TryTakeTicket(std::uint64_t* ticket) {
    std::uint64_t tail = tail_.load(std::memory_order_relaxed);
    do {
      // acquire; pairs with the release in Take: the slot's old content has been read
      if (tail - head_published_.load(std::memory_order_acquire) >= kSlots) return false;
    } while (!tail_.compare_exchange_weak(tail, tail + 1, std::memory_order_seq_cst,
                                          std::memory_order_relaxed));
    *ticket = tail;
    return true;
  }
  void Publish(std::uint64_t ticket, Op* op) {
    // release; pairs with the acquire in At: the body's effects, and what the caller did before
    slots_[ticket & (kSlots - 1)].word.store(reinterpret_cast<std::uintptr_t>(op) | Parity(ticket),
                                             std::memory_order_release);
  }
  std::uint64_t tail() const { return tail_.load(std::memory_order_seq_cst); }

  // The consumer, under the engine's lock, which guards `head`, the ticket that is taken next.
  // Null: the ring is empty, or its next producer has still to write.
  Op* Take(std::uint64_t* head) {
    Op* op = At(*head);
    if (op == nullptr) return nullptr;
    if (Op* soon = At(*head + kPrefetchDistance)) PrefetchForWrite(soon);
    if ((++*head & (kPublishEvery - 1)) == 0) {
      head_published_.store(*head, std::memory_order_release);
    }
    return op;
  }
  // From any thread: does it look as if Take would find something?
  bool LooksFilled(std::uint64_t head) const { return At(head) != nullptr; }

  static constexpr std::uint64_t kSlots = std::uint64_t{1} << 12;

 private:
  struct Slot {
    std::atomic<std::uint64_t> word;  // 0 bits of fresh zeroed memory: an empty slot of lap 0
  };
  struct FreeSlots {
    void operator()(Slot* slots) const { std::free(slots); }
  };
  static constexpr std::uint64_t kPrefetchDistance = 4;
  static constexpr std::uint64_t kPublishEvery = 32;

  static std::uint64_t Parity(std::uint64_t ticket) { return (ticket / kSlots + 1) & 1; }

  Op* At(std::uint64_t head) const {
    const std::uint64_t word = slots_[head & (kSlots - 1)].word.load(std::memory_order_acquire);
    if (word == 0 || (word & 1) != Parity(head)) return nullptr;
    return reinterpret_cast<Op*>(word & ~std::uint64_t{1});
  }

  const std::unique_ptr<Slot[], FreeSlots> slots_;
  alignas(kNoSharing) std::atomic<std::uint64_t> tail_{0};
  alignas(kNoSharing) std::atomic<std::uint64_t> head_published_{0};
};

}  // namespace heddle::engine
