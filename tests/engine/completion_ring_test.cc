#include "engine/completion_ring.h"

#include <heddle/engine.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "engine/completion_batch.h"
#include "tests/engine/support.h"
#include "tests/sanitized.h"

namespace heddle::engine_test {
namespace {

using engine::CompletionRing;
using internal::Op;

// The ring looks at no op: any aligned addresses will do.
Op* AddressOf(std::uint64_t number) { return reinterpret_cast<Op*>((number + 1) * 64); }
std::uint64_t NumberOf(Op* op) { return reinterpret_cast<std::uintptr_t>(op) / 64 - 1; }

TEST(CompletionRingTest, HandsOutInTicketOrderAndWaitsForTheSlotThatIsNotWritten) {
  CompletionRing ring;
  std::uint64_t head = 0, first = 0, second = 0;
  EXPECT_EQ(ring.Take(&head), nullptr);
  ASSERT_TRUE(ring.TryTakeTicket(&first));
  ASSERT_TRUE(ring.TryTakeTicket(&second));
  ring.Publish(second, AddressOf(2));
  EXPECT_EQ(ring.Take(&head), nullptr);
  EXPECT_FALSE(ring.LooksFilled(head));
  EXPECT_EQ(ring.tail(), 2U);
  ring.Publish(first, AddressOf(1));
  EXPECT_TRUE(ring.LooksFilled(head));
  EXPECT_EQ(ring.Take(&head), AddressOf(1));
  EXPECT_EQ(ring.Take(&head), AddressOf(2));
  EXPECT_EQ(ring.Take(&head), nullptr);
  EXPECT_EQ(head, ring.tail());
}

TEST(CompletionRingTest, GivesNoTicketWhileItIsFull) {
  CompletionRing ring;
  std::uint64_t head = 0, ticket = 0;
  for (int lap = 0; lap < 3; ++lap) {
    for (std::uint64_t i = 0; i < CompletionRing::kSlots; ++i) {
      ASSERT_TRUE(ring.TryTakeTicket(&ticket));
      ring.Publish(ticket, AddressOf(ticket));
    }
    EXPECT_FALSE(ring.TryTakeTicket(&ticket));
    for (std::uint64_t i = 0; i < CompletionRing::kSlots; ++i) {
      const std::uint64_t expected = head;
      ASSERT_EQ(ring.Take(&head), AddressOf(expected));
    }
    EXPECT_EQ(ring.Take(&head), nullptr);
  }
}

TEST(CompletionRingTest, EachOpOfManyProducersComesOnceAndInTheOrderOfItsProducer) {
  constexpr std::uint64_t kProducers = 3;
  constexpr auto kEach = static_cast<std::uint64_t>(Scaled(20'000));
  CompletionRing ring;
  std::vector<std::thread> threads;
  for (std::uint64_t producer = 0; producer < kProducers; ++producer) {
    threads.emplace_back([&ring, producer] {
      for (std::uint64_t i = 0; i < kEach; ++i) {
        std::uint64_t ticket = 0;
        while (!ring.TryTakeTicket(&ticket)) std::this_thread::yield();
        ring.Publish(ticket, AddressOf(i * kProducers + producer));
      }
    });
  }
  std::vector<std::uint64_t> next(kProducers, 0);
  std::uint64_t head = 0;
  while (head < kProducers * kEach) {
    Op* op = ring.Take(&head);
    if (op == nullptr) {
      std::this_thread::yield();
      continue;
    }
    const std::uint64_t number = NumberOf(op);
    ASSERT_EQ(number / kProducers, next[number % kProducers]++);
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ring.Take(&head), nullptr);
}

class CompletionsTest : public EveryEngine {};
INSTANTIATE_TEST_SUITE_P(All, CompletionsTest, testing::ValuesIn(AllConfigs()), ConfigLabel);

// In a batch nobody need take anything before its end, so the ring overflows; those that fail go
// another way anyway.
TEST_P(CompletionsTest, MoreThanTheRingHoldsAllFinish) {
  constexpr std::size_t kThreads = 3;
  constexpr std::size_t kOps = 3 * CompletionRing::kSlots;
  Engine engine(GetParam().options);
  std::mt19937_64 random(BaseSeed());
  std::vector<Var> vars;
  std::vector<std::optional<Completion>> done(kOps);
  std::vector<char> fails(kOps, 0);
  std::atomic<std::size_t> started = 0;
  for (std::size_t i = 0; i < kOps; ++i) {
    vars.push_back(engine.NewVar());
    fails[i] = static_cast<char>(random() % 16 == 0);
    engine.PushAsync({.writes = {vars[i]}}, [&done, &started, i](Completion its) {
      done[i] = std::move(its);
      ++started;
    });
  }
  while (started < kOps) {  // serial and seeded engines start ops in waits
    EXPECT_THROW(engine.WaitForAll(std::chrono::milliseconds(1)), TimeoutError);
  }
  std::vector<std::thread> threads;
  for (std::size_t first = 0; first < kThreads; ++first) {
    threads.emplace_back([&, first] {
      const engine::CompletionBatch batch;
      for (std::size_t i = first; i < kOps; i += kThreads) {
        const Completion own = *std::exchange(done[i], std::nullopt);
        fails[i] != 0 ? own(std::make_exception_ptr(std::runtime_error("made to fail"))) : own();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::size_t i = 0; i < kOps; ++i) {
    if (fails[i] != 0) {
      EXPECT_THROW(engine.WaitForVar(vars[i]), std::runtime_error);
    } else {
      engine.WaitForVar(vars[i]);
    }
    EXPECT_EQ(engine.version(vars[i]), 1U);
  }
  EXPECT_EQ(engine.stats().running, 0U);
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
}

// Threads that complete race with the body's end, with other handles and with the engine's.
TEST_P(CompletionsTest, HandlesMayOutliveTheOpAndTheEngine) {
  std::vector<Completion> kept;
  {
    Engine engine(GetParam().options);
    const Var var = engine.NewVar();
    for (int i = 0; i < Scaled(500); ++i) {
      std::optional<Completion> taken;
      std::atomic<bool> filled = false;
      std::thread completer([&] {
        while (!filled.load(std::memory_order_acquire)) std::this_thread::yield();
        (*taken)();
      });
      engine.PushAsync({.writes = {var}, .start_inline = i % 2 == 0},
                       [&, i](const Completion& done) {
                         taken = done;
                         if (i % 16 == 0) kept.push_back(done);
                         filled.store(true, std::memory_order_release);
                       });
      engine.WaitForVar(var);
      completer.join();
    }
  }
  for (const Completion& late : kept) late();  // counts for nothing
}

}  // namespace
}  // namespace heddle::engine_test
