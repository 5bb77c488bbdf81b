// The queues of a variable by themselves: what no calls of the engine bring about for certain.
#include "engine/tracker.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <vector>

#include <gtest/gtest.h>

namespace heddle::engine {
namespace {

using internal::Op;
using internal::VarState;

// An op of one variable.
class OneVarOp {
 public:
  OneVarOp(VarState& var, AccessMode mode, std::uint64_t ticket) : op_(new (memory_) Op) {
    op_->ticket = ticket;
    op_->access_count = 1;
    op_->async = op_->extended = op_->marked = op_->run_when_poisoned = false;
    new (&op_->access(0)) Access(&var, mode);
  }
  OneVarOp(const OneVarOp&) = delete;
  OneVarOp& operator=(const OneVarOp&) = delete;

  Op* get() { return op_; }

 private:
  alignas(kBlockAlign) std::byte memory_[2 * kBlockAlign];
  Op* const op_;
};

// A tracker of one variable, and what it has told.
class OneVar {
 public:
  Tracker tracker;
  VarState x;
  std::vector<Op*> ready, passed;
  int told = 0;  // of x

  OneVar() { x.waiters = 1; }
  bool Register(OneVarOp& op) { return tracker.Register(op.get()); }
  void Finish(OneVarOp& op) {
    tracker.Finish(op.get(), nullptr, /*skipped=*/false, on_ready, on_write, on_fence,
                   [](VarState*) {});
  }
  void Withdraw(WaitFence& fence) { tracker.Withdraw(fence, on_ready, on_write, on_fence); }

 private:
  std::function<void(Op*)> on_ready = [this](Op* op) { ready.push_back(op); };
  std::function<void(VarState*)> on_write = [this](VarState*) { ++told; };
  std::function<void(Op*)> on_fence = [this](Op* op) { passed.push_back(op); };
};

TEST(TrackerTest, AFenceWithNothingBeforeItPassesAtOnce) {
  OneVar vars;
  WaitFence wait(&vars.x);
  OneVarOp clear(vars.x, AccessMode::kFence, 1);
  clear.get()->marked = true;
  EXPECT_TRUE(vars.tracker.RegisterFence(wait.op()));
  EXPECT_TRUE(wait.passed());
  EXPECT_TRUE(vars.tracker.RegisterFence(clear.get()));
  EXPECT_TRUE(vars.x.Idle());
  EXPECT_EQ(vars.x.writes_finished, vars.x.writes_registered);
  vars.Withdraw(wait);  // too late, and nothing happens
  EXPECT_TRUE(vars.x.Idle());
}

// None of them holds the variable, so one call takes all that are next.
TEST(TrackerTest, FencesPassWithTheLastAccessBeforeThem) {
  OneVar vars;
  OneVarOp read(vars.x, AccessMode::kRead, 1), clear(vars.x, AccessMode::kFence, 2);
  OneVarOp behind(vars.x, AccessMode::kRead, 3), last(vars.x, AccessMode::kWrite, 4);
  clear.get()->marked = true;
  WaitFence first(&vars.x), second(&vars.x), third(&vars.x);
  EXPECT_TRUE(vars.Register(read));
  EXPECT_FALSE(vars.tracker.RegisterFence(first.op()));
  EXPECT_FALSE(vars.tracker.RegisterFence(clear.get()));
  EXPECT_FALSE(vars.tracker.RegisterFence(second.op()));
  EXPECT_FALSE(vars.Register(behind));
  EXPECT_FALSE(vars.tracker.RegisterFence(third.op()));
  EXPECT_FALSE(vars.Register(last));
  EXPECT_FALSE(first.passed());
  vars.Finish(read);
  EXPECT_TRUE(first.passed());
  EXPECT_TRUE(second.passed());
  EXPECT_FALSE(third.passed());
  EXPECT_EQ(vars.passed, std::vector<Op*>{clear.get()});
  EXPECT_EQ(vars.ready, std::vector<Op*>{behind.get()});
  EXPECT_EQ(vars.told, 3);
  vars.Finish(behind);
  EXPECT_TRUE(third.passed());
  EXPECT_EQ(vars.ready, (std::vector<Op*>{behind.get(), last.get()}));
  vars.Finish(last);
  EXPECT_TRUE(vars.x.Idle());
  EXPECT_EQ(vars.x.writes_registered, 2u);
  EXPECT_EQ(vars.x.writes_finished, 2u);
  EXPECT_EQ(vars.x.version, 1u);
}

// Withdrawn from the front, the middle and the end of the queue, in each order, the others and what
// is between them keep their places.
TEST(TrackerTest, AWithdrawnFenceLeavesTheOthersInTheirPlaces) {
  std::vector<int> order = {0, 1, 2, 3};
  do {
    OneVar vars;
    OneVarOp holder(vars.x, AccessMode::kWrite, 1), write(vars.x, AccessMode::kWrite, 2);
    OneVarOp read(vars.x, AccessMode::kRead, 3);
    WaitFence front(&vars.x), middle(&vars.x), beside(&vars.x), end(&vars.x);
    EXPECT_TRUE(vars.Register(holder));
    vars.tracker.RegisterFence(front.op());
    EXPECT_FALSE(vars.Register(write));
    vars.tracker.RegisterFence(middle.op());
    vars.tracker.RegisterFence(beside.op());
    EXPECT_FALSE(vars.Register(read));
    vars.tracker.RegisterFence(end.op());
    WaitFence* const fences[] = {&front, &middle, &beside, &end};
    const auto queue = [&] {
      std::vector<Op*> ops;
      for (AccessRef ref = vars.x.head; ref; ref = ref.op()->access(ref.index()).next) {
        ops.push_back(ref.op());
      }
      return ops;
    };
    std::vector<Op*> expected = {front.op(),  write.get(), middle.op(),
                                 beside.op(), read.get(),  end.op()};
    for (const int i : order) {
      vars.Withdraw(*fences[i]);
      EXPECT_EQ(std::erase(expected, fences[i]->op()), 1u);
      EXPECT_EQ(queue(), expected);
    }
    EXPECT_EQ(vars.x.wait_fences, 0u);
    OneVarOp last(vars.x, AccessMode::kWrite, 5);
    EXPECT_FALSE(vars.Register(last));
    for (OneVarOp* op : {&holder, &write, &read, &last}) vars.Finish(*op);
    EXPECT_EQ(vars.ready, (std::vector<Op*>{write.get(), read.get(), last.get()}));
    EXPECT_TRUE(vars.x.Idle());
  } while (std::next_permutation(order.begin(), order.end()));
}

// Of a fence that only reads hold up: nothing else would grant those behind it.
TEST(TrackerTest, AFenceThatIsWithdrawnInFrontLetsTheReadsBehindItGo) {
  OneVar vars;
  OneVarOp read(vars.x, AccessMode::kRead, 1), behind(vars.x, AccessMode::kRead, 2);
  WaitFence fence(&vars.x);
  EXPECT_TRUE(vars.Register(read));
  EXPECT_FALSE(vars.tracker.RegisterFence(fence.op()));
  EXPECT_FALSE(vars.Register(behind));
  vars.Withdraw(fence);
  EXPECT_FALSE(fence.passed());
  EXPECT_EQ(vars.ready, std::vector<Op*>{behind.get()});
  vars.Finish(behind);
  vars.Finish(read);
  EXPECT_TRUE(vars.x.Idle());
  EXPECT_EQ(vars.x.version, 0u);
}

// While a long run of reads is granted piece by piece, a withdrawal may empty the queue behind it.
TEST(TrackerTest, AWithdrawalWhileReadsAreGrantedPieceByPiece) {
  constexpr int kReads = 300;
  OneVar vars;
  OneVarOp holder(vars.x, AccessMode::kWrite, 1), last(vars.x, AccessMode::kWrite, 400);
  OneVarOp behind(vars.x, AccessMode::kRead, 401);
  std::vector<std::unique_ptr<WaitFence>> fences;
  EXPECT_TRUE(vars.Register(holder));
  for (int i = 0; i < kReads; ++i) {
    fences.push_back(std::make_unique<WaitFence>(&vars.x));
    vars.tracker.RegisterFence(fences.back()->op());
  }
  vars.Finish(holder);
  EXPECT_TRUE(vars.tracker.has_more_to_grant());
  for (const auto& fence : fences) vars.Withdraw(*fence);
  EXPECT_FALSE(vars.x.head);
  EXPECT_TRUE(vars.Register(last));
  EXPECT_FALSE(vars.Register(behind));
  const auto nothing = [](auto*) {};
  vars.tracker.GrantMore([](Op*) { FAIL() << "beside the writer"; }, nothing, nothing, nothing);
  vars.Finish(last);
  EXPECT_EQ(vars.ready, std::vector<Op*>{behind.get()});
}

}  // namespace
}  // namespace heddle::engine
