// Gradients on GPUs that fail when all that follows them has been issued: what was made of them,
// and of what was made of them, is no value. Kernels wait for a latch until then; waits have a
// deadline, so that what hangs fails.
#include <heddle/engine.h>
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>
#include <heddle/optimizer.h>

#include <chrono>
#include <functional>
#include <latch>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kvstore/gpu_store_fixture.h"

namespace heddle::kvstore_test {
namespace {

using engine_test::SimGpu;

constexpr std::chrono::seconds kSoon{60};

// How pushes reach the values of a store.
struct Way {
  const char* name;
  std::function<void(KVStore& store)> set_up;
  bool is_list = false;       // of an array on each GPU
  bool several_keys = false;  // in a call
};

void SetSgd(KVStore& store) { store.SetOptimizer(Sgd({.learning_rate = 1})); }
void SetAdding(KVStore& store) {
  store.SetUpdater(
      [](KeyRef, const NDArray& input, const NDArray& stored) { stored += input * 2; });
}
void SetCodes(KVStore& store) {
  SetSgd(store);
  store.SetGradientCompression({.type = "2bit", .threshold = 0.5});
}

std::vector<Way> Ways() {
  return {
      {"assigned", [](KVStore&) {}},
      {"assigned_keys", [](KVStore&) {}, false, true},
      {"optimizer", &SetSgd},
      {"optimizer_lists", &SetSgd, true},
      {"optimizer_keys", &SetSgd, false, true},
      {"codes", &SetCodes, true},
      {"updater", &SetAdding},
      {"updater_lists", &SetAdding, true},
  };
}

class GpuLateFailureStoreTest : public GpuStoreTest, public testing::WithParamInterface<Way> {
 protected:
  void SetUp() override {
    store_->Init(keys_, {Ones(), Ones()});
    GetParam().set_up(*store_);
    Push(Ones());
    engine_->WaitForAll();
  }

  NDArray Ones() const { return Full({4, 2}, 1, Gpu(0)); }
  NDArray Failed() const {
    NDArray bad = Ones();
    engine_->PushGpu({.name = "fail", .writes = {bad.var()}, .device = Gpu(0)},
                     [](GpuStream) { throw std::runtime_error("early"); });
    return bad;
  }
  // Fails when its kernel has ended.
  NDArray FailingLate() {
    struct Body {
      std::shared_ptr<std::latch> end;
      void operator()(GpuStream stream) const {
        SimGpu::Launch(stream, [end = end] { end->wait(); });
      }
      void Finish() const { throw std::runtime_error("late"); }
    };
    NDArray bad = Ones();
    engine_->PushGpu({.name = "backward", .writes = {bad.var()}, .device = Gpu(0)}, Body{end_});
    return bad;
  }
  void Push(const NDArray& gradient) {
    std::vector<NDArray> list = {gradient};
    if (GetParam().is_list) list.push_back(Full({4, 2}, 1, Gpu(1)));
    if (GetParam().several_keys) {
      store_->Push(keys_, {list, {Ones()}});
    } else {
      store_->Push(1, list);
    }
  }
  NDArray Pulled() {
    NDArray out = Full({4, 2}, -1, Gpu(0));
    store_->Pull(1, out);
    return out;
  }
  // Lets the gradient fail once all that `out` waits for has been issued.
  void EndWhenIssued(const NDArray& out) {
    engine_->PushGpu({.name = "issued",
                      .reads = {out.var()},
                      .writes = {engine_->NewVar()},
                      .device = Gpu(1),
                      .run_when_poisoned = true},
                     [issued = issued_](GpuStream) { issued->count_down(); });
    issued_->wait();
    end_->count_down();
  }
  static void ExpectError(const NDArray& out, const char* message) {
    EXPECT_THAT([&] { out.WaitToRead(kSoon); },
                testing::ThrowsMessage<std::runtime_error>(message));
  }
  // Until Reset, which cures it.
  void ExpectSpoilt() {
    Push(Ones());
    ExpectError(Pulled(), "late");
    store_->Reset(1, Ones());
    EXPECT_THAT(Pulled().ToVector<float>(), testing::Each(1.0F));
    Push(Ones());
    Pulled().WaitToRead(kSoon);
  }

  const std::shared_ptr<std::latch> end_ = std::make_shared<std::latch>(1);
  const std::shared_ptr<std::latch> issued_ = std::make_shared<std::latch>(1);
  const std::vector<Key> keys_ = {Key(1), Key(2)};
  std::unique_ptr<KVStore> store_ = KVStore::Create("device", *engine_);
};
INSTANTIATE_TEST_SUITE_P(All, GpuLateFailureStoreTest, testing::ValuesIn(Ways()),
                         [](const testing::TestParamInfo<Way>& info) { return info.param.name; });

TEST_P(GpuLateFailureStoreTest, SpoilsTheValueThatItWasAppliedTo) {
  Push(FailingLate());
  const NDArray out = Pulled();
  EndWhenIssued(out);
  ExpectError(out, "late");
  ExpectSpoilt();
}

TEST_P(GpuLateFailureStoreTest, IsNotCuredByAPushBehindIt) {
  Push(FailingLate());
  Push(Ones());
  const NDArray out = Pulled();
  EndWhenIssued(out);
  ExpectError(out, "late");
  ExpectSpoilt();
}

// Which leaves the value as it was: spoilt.
TEST_P(GpuLateFailureStoreTest, IsNotCuredByAPushWhoseInputHasFailed) {
  Push(FailingLate());
  Push(Failed());
  const NDArray out = Pulled();
  EndWhenIssued(out);
  ExpectError(out, "late");
  ExpectSpoilt();
}

TEST_P(GpuLateFailureStoreTest, IsCuredByAResetBehindIt) {
  const NDArray fresh = Ones();
  fresh.WaitToRead(kSoon);  // as Reset does, when its stream may be held up
  Push(FailingLate());
  store_->Reset(1, fresh);
  const NDArray out = Pulled();
  EndWhenIssued(out);
  EXPECT_THAT(out.ToVector<float>(), testing::Each(1.0F));
}

}  // namespace
}  // namespace heddle::kvstore_test
