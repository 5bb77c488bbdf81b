// The queues of a variable by themselves: what no calls of the engine bring about for certain.
#include "engine/tracker.h"

#include <cstddef>
#include <cstdint>
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

// A wait may be for a number that another thread's fence has got since.
TEST(TrackerTest, AWithdrawnFenceEndsTheWaitsForItsNumber) {
  for (const bool reads_end_first : {false, true}) {
    Tracker tracker;
    VarState x;
    x.waiters = 1;
    OneVarOp read(x, AccessMode::kRead, 1), write(x, AccessMode::kWrite, 2);
    OneVarOp fence(x, AccessMode::kFence, 3), read_behind(x, AccessMode::kRead, 4);
    std::vector<Op*> ready;
    int told = 0;
    const auto on_ready = [&](Op* op) { ready.push_back(op); };
    const auto on_write = [&](VarState*) { ++told; };
    const auto finish = [&](OneVarOp& op) {
      tracker.Finish(op.get(), nullptr, on_ready, on_write, [](VarState*) {});
    };
    EXPECT_TRUE(tracker.Register(read.get()));
    EXPECT_FALSE(tracker.Register(write.get()));
    EXPECT_FALSE(tracker.Register(fence.get()));
    EXPECT_FALSE(tracker.Register(read_behind.get()));
    EXPECT_EQ(x.writes_registered, 2u);
    EXPECT_EQ(x.last_fences, 1u);
    if (reads_end_first) {
      finish(read);
      finish(write);
      finish(fence);  // not withdrawn in time: a write as any other
      EXPECT_EQ(told, 2);
    } else {
      tracker.Withdraw(&x, 3, on_ready, on_write);
      EXPECT_EQ(told, 0) << "the write before it has not finished";
      finish(read);
      finish(write);
      EXPECT_EQ(ready, (std::vector<Op*>{write.get(), fence.get(), read_behind.get()}));
      EXPECT_GE(told, 1);
      EXPECT_EQ(x.readers, 2u);
      finish(fence);
    }
    EXPECT_EQ(x.writes_finished, 2u);
    finish(read_behind);
    EXPECT_TRUE(x.Idle());
  }
}

// Of a fence that only reads hold up: nothing else would tell of it.
TEST(TrackerTest, AFenceThatIsWithdrawnInFrontTellsAtOnce) {
  Tracker tracker;
  VarState x;
  x.waiters = 1;
  OneVarOp read(x, AccessMode::kRead, 1), fence(x, AccessMode::kFence, 2);
  std::vector<Op*> ready;
  int told = 0;
  const auto on_ready = [&](Op* op) { ready.push_back(op); };
  const auto on_write = [&](VarState*) { ++told; };
  EXPECT_TRUE(tracker.Register(read.get()));
  EXPECT_FALSE(tracker.Register(fence.get()));
  tracker.Withdraw(&x, 7, on_ready, on_write);  // of no such op
  EXPECT_TRUE(ready.empty());
  tracker.Withdraw(&x, 2, on_ready, on_write);
  EXPECT_EQ(ready, std::vector<Op*>{fence.get()});
  EXPECT_EQ(told, 1);
  EXPECT_EQ(x.writes_finished, 1u);
  for (OneVarOp* op : {&fence, &read}) {
    tracker.Finish(op->get(), nullptr, on_ready, on_write, [](VarState*) {});
  }
  EXPECT_TRUE(x.Idle());
  EXPECT_EQ(x.version, 0u);
}

}  // namespace
}  // namespace heddle::engine
