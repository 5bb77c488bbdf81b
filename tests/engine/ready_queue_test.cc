// The ready queue by itself, against a sorted list: also with more priorities than it keeps empty
// levels for, pushed in their order as the layers of a network are, or in any.
#include "engine/ready_queue.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/engine/support.h"

namespace heddle::engine_test {
namespace {

using engine::ReadyQueue;
using internal::Op;

class ReadyOps {
 public:
  explicit ReadyOps(std::size_t count) : ops_(std::make_unique<Op[]>(count)), count_(count) {}

  // In the order of their tickets.
  Op* Next(int priority) {
    Op* op = &ops_[made_];
    op->ticket = made_++;
    op->priority = priority;
    return op;
  }
  bool any_left() const { return made_ < count_; }

 private:
  std::unique_ptr<Op[]> ops_;
  std::size_t count_;
  std::uint64_t made_ = 0;
};

// The most urgent, and of these the oldest.
std::vector<Op*>::iterator FirstOf(std::vector<Op*>& expected) {
  return std::min_element(expected.begin(), expected.end(), [](const Op* a, const Op* b) {
    return a->priority != b->priority ? a->priority > b->priority : a->ticket < b->ticket;
  });
}

TEST(ReadyQueue, GivesTheMostUrgentAndOldestWhateverTheOrderOfPushes) {
  constexpr std::size_t kOps = 20'000;
  std::mt19937_64 random(BaseSeed());
  SCOPED_TRACE("HEDDLE_TEST_SEED=" + std::to_string(BaseSeed()));
  ReadyQueue queue(/*ageing=*/0);
  ReadyOps ops(kOps);
  std::vector<Op*> expected;
  std::vector<Op*> held;  // to be pushed late, out of the order of their tickets
  while (ops.any_left()) {
    const int base = static_cast<int>(random() % 2000) - 1000;
    const int step = static_cast<int>(random() % 5) - 2;  // rising, falling, or all the same
    const std::size_t burst = random() % 60;
    for (std::size_t i = 0; i < burst && ops.any_left(); ++i) {
      Op* op = ops.Next(base + step * static_cast<int>(i));
      if (random() % 8 == 0) {
        held.push_back(op);
        continue;
      }
      queue.Push(op);
      expected.push_back(op);
    }
    if (random() % 4 == 0) {
      for (Op* op : held) {
        queue.Push(op);
        expected.push_back(op);
      }
      held.clear();
    }
    // Sometimes until nothing is left.
    const std::size_t takes = random() % 3 == 0 ? expected.size() : random() % 60;
    for (std::size_t i = 0; i < takes && !expected.empty(); ++i) {
      ASSERT_EQ(queue.size(), expected.size());
      const auto first = FirstOf(expected);
      ASSERT_EQ(queue.top_priority(), (*first)->priority);
      if (random() % 8 == 0) {
        const auto any = expected.begin() + static_cast<std::ptrdiff_t>(random() % expected.size());
        queue.Remove(*any);
        expected.erase(any);
      } else {
        ASSERT_EQ(queue.Pop(), *first);
        expected.erase(first);
      }
    }
  }
}

// What the header promises of ageing, with levels that come, go and are passed over.
TEST(ReadyQueue, NoOpIsOvertakenMoreOftenThanAgeingAllows) {
  constexpr std::size_t kOps = 20'000;
  constexpr std::uint64_t kAgeing = 7, kPriorities = 12;
  std::mt19937_64 random(BaseSeed());
  SCOPED_TRACE("HEDDLE_TEST_SEED=" + std::to_string(BaseSeed()));
  ReadyQueue queue(static_cast<int>(kAgeing));
  ReadyOps ops(kOps);
  struct Waiting {
    Op* op;
    std::uint64_t takes_before;
    std::uint64_t older;
  };
  std::vector<Waiting> waiting;
  std::uint64_t takes = 0;
  while (ops.any_left() || !queue.empty()) {
    const std::size_t burst = ops.any_left() ? random() % 30 : 0;
    for (std::size_t i = 0; i < burst && ops.any_left(); ++i) {
      Op* op = ops.Next(static_cast<int>(random() % kPriorities));
      const auto older = std::count_if(waiting.begin(), waiting.end(), [op](const Waiting& other) {
        return other.op->priority == op->priority;
      });
      waiting.push_back({op, takes, static_cast<std::uint64_t>(older)});
      queue.Push(op);
    }
    for (std::size_t i = random() % 30; i > 0 && !queue.empty(); --i) {
      if (random() % 4 == 0 && !queue.ageing_due()) {
        queue.CountOvertake(queue.top_priority() + static_cast<int>(random() % 2));
        ++takes;
        continue;
      }
      auto taken = waiting.begin() + static_cast<std::ptrdiff_t>(random() % waiting.size());
      if (random() % 8 == 0) {
        queue.Remove(taken->op);
      } else {
        ++takes;
        const Op* op = queue.Pop();
        taken = std::find_if(waiting.begin(), waiting.end(),
                             [op](const Waiting& of) { return of.op == op; });
        ASSERT_NE(taken, waiting.end());
      }
      waiting.erase(taken);
    }
    for (const Waiting& of : waiting) {
      ASSERT_LE(takes - of.takes_before, (of.older + 1) * (kAgeing + kPriorities));
    }
  }
  EXPECT_TRUE(waiting.empty());
}

// Each take looked at every priority once ageing had begun: a minute. The bound is generous.
TEST(ReadyQueue, ATakeCostsNoMoreWithManyPriorities) {
  constexpr std::size_t kOps = 100'000;
  ReadyQueue queue(/*ageing=*/100);
  ReadyOps ops(kOps);
  for (int priority = 0; ops.any_left(); ++priority) queue.Push(ops.Next(priority));
  const auto before = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < kOps; ++i) queue.Pop();
  EXPECT_TRUE(queue.empty());
  EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(5));
}

}  // namespace
}  // namespace heddle::engine_test
