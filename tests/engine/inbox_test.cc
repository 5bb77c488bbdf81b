// The ring of pushed ops by itself: the consumer may stop at a slot only if nothing behind it comes
// first.
#include "engine/inbox.h"

#include <heddle/engine.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/pause.h"
#include "tests/engine/support.h"

namespace heddle::engine_test {
namespace {

using engine::Inbox;
using engine::MessageKind;

// Whatever is published here: the ring hands addresses on, and fetches what lies there.
alignas(64) std::array<std::byte, 128> block;

void PushTo(Inbox& inbox, int priority) {
  inbox.Publish(inbox.TakeTicket(priority), block.data(), MessageKind::kOp, priority);
}

TEST(InboxTest, WhatFallsMayBeLeftThere) {
  Inbox inbox;
  std::uint64_t head = 0;
  EXPECT_TRUE(inbox.NothingComesBefore(-5, head)) << "nothing is there";
  for (const int priority : {-5, -5, -7, INT_MIN}) PushTo(inbox, priority);
  inbox.Advance(&head);  // the first op may be above what came before it
  EXPECT_TRUE(inbox.NothingComesBefore(-5, head));
  EXPECT_FALSE(inbox.NothingComesBefore(-6, head)) << "below the head";
  inbox.Advance(&head);
  EXPECT_TRUE(inbox.NothingComesBefore(-7, head));
  PushTo(inbox, -6);
  EXPECT_FALSE(inbox.NothingComesBefore(-7, head));
  for (int i = 0; i < 2; ++i) inbox.Advance(&head);  // the head is what has risen
  EXPECT_TRUE(inbox.NothingComesBefore(-6, head));
}

TEST(InboxTest, WhatIsNotWrittenYetMayBeAnything) {
  Inbox inbox;
  std::uint64_t head = 0;
  PushTo(inbox, -1);
  inbox.Advance(&head);
  PushTo(inbox, -9);
  const std::uint64_t late = inbox.TakeTicket(-3);
  PushTo(inbox, -5);
  EXPECT_FALSE(inbox.NothingComesBefore(-9, head)) << "-5 has been pushed";
  inbox.Publish(late, block.data(), MessageKind::kOp, -3);
  EXPECT_FALSE(inbox.NothingComesBefore(-9, head));
}

// Threads push, mostly falling priorities; one looks, and knows which of their pushes have
// returned.
TEST(InboxTest, TellsOfNothingAboveUnlessThereIsNone) {
  constexpr int kThreads = 3;
  constexpr std::uint64_t kPushes = 30'000;
  constexpr std::uint64_t kAhead = 64;
  struct Pushed {
    std::atomic<int> priority{0};
    std::atomic<int> thread{-1};
  };
  const auto inbox = std::make_unique<Inbox>();
  std::vector<Pushed> pushed(kPushes + kThreads);
  struct alignas(64) Returned {
    std::atomic<std::uint64_t> count{0};  // one more than the ticket of the last
  };
  std::array<Returned, kThreads> returned;
  std::atomic<std::uint64_t> consumed{0};
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread, random = std::mt19937_64(BaseSeed() + thread)]() mutable {
      std::uint64_t ticket = 0;
      while (ticket + 1 < kPushes) {
        // Not all at once: a slot that is not written yet may hold anything, and so no stop is
        // good.
        for (auto pauses = random() % 400; pauses > 0; --pauses) Pause();
        // Falls by one every 16 pushes of all threads, and begins anew after 1024.
        int priority = -10 - static_cast<int>(inbox->LooseTail() / 16 % 64);
        if (random() % 64 == 0) priority += static_cast<int>(random() % 8);
        ticket = inbox->TakeTicket(priority);
        while (ticket > consumed.load(std::memory_order_acquire) + kAhead) {
          std::this_thread::yield();
        }
        const bool drops = random() % 8 == 0;
        pushed[ticket].priority.store(drops ? INT_MIN : priority, std::memory_order_relaxed);
        pushed[ticket].thread.store(thread, std::memory_order_relaxed);
        if (drops) {
          inbox->PublishDrop(ticket, block.data());
        } else {
          inbox->Publish(ticket, block.data(), MessageKind::kOp, priority);
        }
        returned[thread].count.store(ticket + 1, std::memory_order_release);
      }
    });
  }
  std::mt19937_64 random(BaseSeed());
  std::uint64_t head = 0;
  std::uint64_t stops = 0, skipped = 0;
  while (head < kPushes) {
    std::array<std::uint64_t, kThreads> known;
    for (int thread = 0; thread < kThreads; ++thread) {
      known[thread] = returned[thread].count.load(std::memory_order_acquire);
    }
    const std::uint64_t end = *std::ranges::max_element(known);
    if (inbox->At(head).address == nullptr) {  // behind it nothing can be found
      std::this_thread::yield();
      continue;
    }
    // What an executor that has just taken this op would ask.
    const int priority = head > 0 ? pushed[head - 1].priority.load(std::memory_order_relaxed) : -1;
    if (priority > INT_MIN && inbox->NothingComesBefore(priority, head)) {
      ++stops;
      for (std::uint64_t ticket = head; ticket < end; ++ticket) {
        const int thread = pushed[ticket].thread.load(std::memory_order_relaxed);
        if (thread < 0 || ticket >= known[thread]) continue;
        skipped += pushed[ticket].priority.load(std::memory_order_relaxed) > priority;
      }
    }
    if (random() % 8 == 0) {
      inbox->Advance(&head);
      consumed.store(head, std::memory_order_release);
    }
  }
  EXPECT_EQ(skipped, 0U) << "seed " << BaseSeed();
  EXPECT_GT(stops, 0U);
}

}  // namespace
}  // namespace heddle::engine_test
