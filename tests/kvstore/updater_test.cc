// Updaters of the caller's own: when they run, on which thread, and what they may do.
#include <heddle/kvstore.h>

#include <atomic>
#include <chrono>
#include <latch>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kvstore/gpu_setups.h"
#include "tests/kvstore/support.h"
#include "tests/message_of.h"

namespace heddle::kvstore_test {
namespace {

class UpdaterTest : public StoreTest {};

TEST_P(UpdaterTest, RunsOnThePushingThreadOnceAKeyAndPushBeforePushReturns) {
  store->Init({"a", "b"}, {Full(0), Full(0)});
  std::vector<std::pair<Key, std::thread::id>> calls;
  store->SetUpdater([&](KeyRef key, const NDArray&, const NDArray&) {
    calls.emplace_back(key.ToKey(), std::this_thread::get_id());
  });
  store->Push("a", OnFour(1));
  const auto me = std::this_thread::get_id();
  EXPECT_EQ(calls, (std::vector<std::pair<Key, std::thread::id>>{{"a", me}}));
  calls.clear();
  store->Push({"b", "a"}, {Full(1), Full(1)});
  EXPECT_EQ(calls, (std::vector<std::pair<Key, std::thread::id>>{{"b", me}, {"a", me}}));
}

TEST_P(UpdaterTest, StringAndIntegerKeysReachItAsTheyAre) {
  Key seen;
  const Updater note = [&seen](KeyRef key, const NDArray&, const NDArray&) { seen = key.ToKey(); };
  store->Init(-7, Full(0));
  store->SetUpdater(note);
  store->Push(-7, Full(1));
  EXPECT_EQ(seen, Key(-7));
  const auto strings = NewStore();
  strings->Init("-7", Full(0));
  strings->SetUpdater(note);
  strings->Push("-7", Full(1));
  EXPECT_EQ(seen, Key("-7"));
}

TEST_P(UpdaterTest, GetsTheSumAndTheStoredValue) {
  store->Init("k", Full(10));
  std::vector<float> input_seen;
  std::vector<float> stored_seen;
  store->SetUpdater([&](KeyRef, const NDArray& input, const NDArray& stored) {
    input_seen = input.ToVector<float>();  // reads and waits
    stored_seen = stored.ToVector<float>();
    stored += input;
    stored.WaitToRead();
  });
  store->Push("k", OnFour(2));
  EXPECT_EQ(input_seen, All(8));
  EXPECT_EQ(stored_seen, All(10));
  EXPECT_EQ(Pulled(*store, "k"), All(18));
}

TEST_P(UpdaterTest, ItsOpsComeBeforeEverythingPushedLater) {
  store->Init("k", Full(4));
  store->SetUpdater(
      [](KeyRef, const NDArray& input, const NDArray& stored) { stored += input * 2; });
  NDArray gradient = Full(1);
  Hold writer(engine, {gradient.var()}, {gradient.var()});
  NDArray before = Full(0);
  NDArray after = Full(0);
  store->Pull("k", before);
  store->Push("k", gradient);  // cannot run yet
  store->Pull("k", after);
  writer.Release();
  EXPECT_EQ(before.ToVector<float>(), All(4));
  EXPECT_EQ(after.ToVector<float>(), All(6));
}

TEST_P(UpdaterTest, NeverTouchesThePushedArray) {
  store->Init("k", Full(0));
  store->SetUpdater([](KeyRef, const NDArray& input, const NDArray& stored) {
    input *= 5;
    stored += input;
  });
  NDArray gradient = Full(1);
  store->Push("k", gradient);
  EXPECT_EQ(gradient.ToVector<float>(), All(1));
  EXPECT_EQ(Pulled(*store, "k"), All(5));
}

TEST_P(UpdaterTest, ItsExceptionLeavesPush) {
  store->Init({"a", "b"}, {Full(1), Full(1)});
  bool throws = true;
  store->SetUpdater([&](KeyRef key, const NDArray& input, const NDArray& stored) {
    if (throws && key == KeyRef("b")) throw std::runtime_error("refused");
    stored += input;
  });
  EXPECT_EQ(MessageOf<std::runtime_error>([&] {
              store->Push({"a", "b"}, {Full(1), Full(1)});
            }),
            "refused");
  EXPECT_EQ(Pulled(*store, "a"), All(2));
  EXPECT_EQ(Pulled(*store, "b"), All(1));
  throws = false;
  store->Push("b", Full(1));
  EXPECT_EQ(Pulled(*store, "b"), All(2));
}

TEST_P(UpdaterTest, AFailedInputReachesItsWaits) {
  store->Init("k", Full(1));
  store->SetUpdater([](KeyRef, const NDArray& input, const NDArray& stored) {
    stored += input;
    input.WaitToRead();
  });
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { store->Push("k", Poisoned("bad gradient")); }),
            "bad gradient");
  NDArray out = Full(0);
  store->Pull("k", out);
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { out.WaitToRead(); }), "bad gradient");
  store->Push("k", Full(1));
  EXPECT_EQ(Pulled(*store, "k"), All(2));
}

TEST_P(UpdaterTest, TwoThreadsNeverInterleaveInTheUpdateOfAKey) {
  if (MergesOnGpus()) GTEST_SKIP() << "its op is one of the CPUs";
  store->Init({"a", "b"}, {Full(0), Full(0)});
  std::atomic<int> inside_a{0};
  std::atomic<int> overlaps{0};
  store->SetUpdater([&](KeyRef key, const NDArray& input, const NDArray& stored) {
    std::atomic<int> none{0};
    std::atomic<int>& inside = key == KeyRef("a") ? inside_a : none;
    if (inside.fetch_add(1) != 0) ++overlaps;
    // Read, then write: a lost update if another thread comes between.
    const NDArray old = stored.Copy();
    std::this_thread::yield();
    engine.Push({.name = "add", .reads = {old.var(), input.var()}, .writes = {stored.var()}},
                [old, input, stored] {
                  for (std::int64_t i = 0; i < stored.size(); ++i) {
                    stored.data<float>()[i] =
                        old.data<const float>()[i] + input.data<const float>()[i];
                  }
                });
    inside.fetch_sub(1);
  });
  constexpr int kPushes = 100;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const NDArray one = Full(1);
      for (int i = 0; i < kPushes; ++i) {
        // Opposite orders of the keys: the locks of the keys must not depend on each other.
        if (t % 2 == 0) {
          store->Push({"a", "b"}, {one, one});
        } else {
          store->Push({"b", "a"}, {one, one});
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(overlaps.load(), 0);
  EXPECT_EQ(Pulled(*store, "a"), All(4 * kPushes));
  EXPECT_EQ(Pulled(*store, "b"), All(4 * kPushes));
}

// The bodies wait for the updater, so nothing in it may wait for them.
TEST_P(UpdaterTest, BodiesOfOpsMayPushTheKeyMeanwhile) {
  store->Init("k", Full(0));
  std::latch entered(1), body_runs(1);
  std::atomic<bool> is_first = true;
  store->SetUpdater([&](KeyRef, const NDArray& input, const NDArray& stored) {
    if (is_first.exchange(false)) {
      entered.count_down();
      body_runs.wait();
    }
    stored += input;
  });
  const NDArray one = Full(1);
  std::thread other([&] {
    entered.wait();
    engine.Push({.name = "pushes"}, [&] {
      body_runs.count_down();
      store->Push("k", one);
    });
    engine.WaitForAll();
  });
  store->Push("k", one);
  other.join();
  EXPECT_EQ(Pulled(*store, "k"), All(2));
}

// That updater may run for ever: it used to be waited for whatever the check said.
TEST_P(UpdaterTest, ACheckLeavesAWaitForTheUpdaterOfAnotherThread) {
  store->Init("k", Full(0));
  std::latch entered(1), left(1);
  std::atomic<bool> is_first = true;
  store->SetUpdater([&](KeyRef, const NDArray& input, const NDArray& stored) {
    if (is_first.exchange(false)) {
      entered.count_down();
      left.wait();
    }
    stored += input;
  });
  const NDArray one = Full(1);
  std::thread other([&] { store->Push("k", one); });
  entered.wait();
  {
    const WaitCheckScope scope(std::chrono::milliseconds(1),
                               [] { throw std::runtime_error("enough"); });
    EXPECT_EQ(MessageOf<std::runtime_error>([&] { store->Push("k", one); }), "enough");
  }
  left.count_down();
  other.join();
  store->Push("k", one);
  EXPECT_EQ(Pulled(*store, "k"), All(2));
}

// Nor for the room that they are to make.
TEST(UpdaterAtTheBound, BodiesOfOpsMayPushTheKeyMeanwhile) {
  for (const std::string type : {"threaded", "serial", "seeded"}) {
    SCOPED_TRACE(type);
    EngineOptions options;
    options.type = type;
    options.num_workers = 1;
    options.max_pending_ops = 4;
    Engine engine(options);
    const auto full = [&](double value) {
      return NDArray::Full({6}, value, DType::kFloat32, Cpu(), engine);
    };
    const auto store = KVStore::Create("local", engine);
    store->Init("k", full(0));
    const NDArray one = full(1);
    one.WaitToRead();
    std::latch body_runs(1);
    bool is_first = true;
    store->SetUpdater([&](KeyRef, const NDArray& input, const NDArray& stored) {
      if (std::exchange(is_first, false)) {
        engine.Push({.name = "pushes"}, [&] {
          body_runs.count_down();
          store->Push("k", one);
        });
        if (type == "threaded") body_runs.wait();
      }
      for (int i = 0; i < 8; ++i) stored += input;
    });
    store->Push("k", one);
    EXPECT_NO_THROW(engine.WaitForAll());
    const NDArray out = full(0);
    store->Pull("k", out);
    EXPECT_EQ(out.ToVector<float>(), std::vector<float>(6, 16));
  }
}

// Such a wait may not be made: with another thread in the body it would never end.
TEST(UpdaterThatWaits, RunsBodiesWhosePushesOfItsKeyAreRefused) {
  EngineOptions options;
  options.type = "seeded";  // bodies run in waits alone
  Engine engine(options);
  const auto full = [&](double value) {
    return NDArray::Full({6}, value, DType::kFloat32, Cpu(), engine);
  };
  const auto store = KVStore::Create("local", engine);
  store->Init("k", full(0));
  store->SetUpdater([](KeyRef, const NDArray& input, const NDArray& stored) {
    stored += input;
    input.WaitToRead();
  });
  const NDArray gradient = full(1);
  std::string message;
  engine.Push({.name = "backward", .reads = {gradient.var()}, .writes = {gradient.var()}},
              [&] { message = MessageOf<InvalidState>([&] { store->Push("k", gradient); }); });
  store->Push("k", gradient);
  EXPECT_NE(message.find("from inside its own updater"), std::string::npos) << message;
  const NDArray out = full(0);
  store->Pull("k", out);
  EXPECT_EQ(out.ToVector<float>(), std::vector<float>(6, 1));
}

TEST(UpdaterAtTheBound, PushesWaitForRoom) {
  EngineOptions options;
  options.num_workers = 1;
  options.max_pending_ops = 8;
  Engine engine(options);
  const auto full = [&](double value) {
    return NDArray::Full({6}, value, DType::kFloat32, Cpu(), engine);
  };
  const auto store = KVStore::Create("local", engine);
  store->Init("k", full(0));
  store->SetUpdater([](KeyRef, const NDArray& input, const NDArray& stored) { stored += input; });
  const NDArray one = full(1);
  one.WaitToRead();
  std::latch may_end(1), started(1);
  engine.Push({.name = "blocks", .reads = {one.var()}, .writes = {one.var()}}, [&] {
    started.count_down();
    may_end.wait();
  });
  started.wait();
  constexpr int kPushes = 100;
  std::atomic<int> pushed = 0;
  std::thread pusher([&] {
    for (; pushed < kPushes; ++pushed) store->Push("k", one);
  });
  while (engine.stats().pushed < 8) std::this_thread::yield();
  // Only for a pusher that does not wait to get on: one that waits cannot.
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_LT(pushed, kPushes / 2);
  may_end.count_down();
  pusher.join();
  const NDArray out = full(0);
  store->Pull("k", out);
  EXPECT_EQ(out.ToVector<float>(), std::vector<float>(6, kPushes));
}

TEST_P(UpdaterTest, MayPushOtherKeysButNotItsOwn) {
  store->Init({"a", "b"}, {Full(0), Full(0)});
  std::string message;
  store->SetUpdater([&](KeyRef key, const NDArray& input, const NDArray& stored) {
    stored += input;
    if (key == KeyRef("b")) return;
    store->Push("b", input);
    message = MessageOf<InvalidState>([&] { store->Push("a", input); });
  });
  store->Push("a", Full(1));
  EXPECT_NE(message.find("'a'"), std::string::npos) << message;
  EXPECT_EQ(Pulled(*store, "a"), All(1));
  EXPECT_EQ(Pulled(*store, "b"), All(1));
}

TEST_P(UpdaterTest, MayNotPushItsOwnKeyByWayOfAnother) {
  store->Init({"a", "b"}, {Full(0), Full(0)});
  std::string message;
  store->SetUpdater([&](KeyRef key, const NDArray& input, const NDArray& stored) {
    stored += input;
    if (key == KeyRef("a")) {
      store->Push("b", input);
    } else {
      message = MessageOf<InvalidState>([&] { store->Push("a", input); });
    }
  });
  store->Push("a", Full(1));
  EXPECT_NE(message.find("'a'"), std::string::npos) << message;
  EXPECT_EQ(Pulled(*store, "a"), All(1));
  EXPECT_EQ(Pulled(*store, "b"), All(1));
}

TEST_P(UpdaterTest, AListWithAKeyWhoseUpdaterRunsIsRefusedWhole) {
  store->Init({"a", "b"}, {Full(0), Full(0)});
  std::string message;
  store->SetUpdater([&](KeyRef key, const NDArray& input, const NDArray& stored) {
    stored += input;
    if (key == KeyRef("b")) return;
    message = MessageOf<InvalidState>([&] { store->Push({"b", "a"}, {input, input}); });
    NDArray out = Full(-1);
    message += MessageOf<InvalidState>([&] {
      store->PushPull({"b", "a"}, {input, input}, {out, out});
    });
  });
  store->Push("a", Full(1));
  EXPECT_NE(message.find("Push: key 'a'"), std::string::npos) << message;
  EXPECT_NE(message.find("PushPull: key 'a'"), std::string::npos) << message;
  EXPECT_EQ(Pulled(*store, "a"), All(1));
  EXPECT_EQ(Pulled(*store, "b"), All(0));
}

TEST_P(UpdaterTest, MayCallTheStoreOtherwise) {
  store->Init("k", Full(1));
  store->SetUpdater([&](KeyRef key, const NDArray& input, const NDArray& stored) {
    const NDArray old(shape, DType::kFloat32, stored.device(), engine);
    store->Pull(key, old);
    stored += input + old;
  });
  store->Push("k", Full(3));
  EXPECT_EQ(Pulled(*store, "k"), All(5));
}

TEST_P(UpdaterTest, NullIsAnErrorAndKeepsTheOldOne) {
  store->Init("k", Full(1));
  store->SetUpdater([](KeyRef, const NDArray& input, const NDArray& stored) { stored += input; });
  ExpectInvalid([&] { store->SetUpdater(nullptr); }, {"SetUpdater", "null"});
  ExpectInvalid([&] { store->SetOptimizer(nullptr); }, {"SetOptimizer", "null"});
  store->Push("k", Full(1));
  EXPECT_EQ(Pulled(*store, "k"), All(2));
}

TEST_P(UpdaterTest, TheLastOfUpdaterAndOptimizerCounts) {
  store->Init("k", Full(1));
  store->SetOptimizer(Sgd());
  store->SetUpdater([](KeyRef, const NDArray& input, const NDArray& stored) { stored += input; });
  store->Push("k", Full(1));
  EXPECT_EQ(Pulled(*store, "k"), All(2));
  store->SetOptimizer(Sgd({.learning_rate = 1}));
  store->Push("k", Full(1));
  EXPECT_EQ(Pulled(*store, "k"), All(1));
}

TEST_P(UpdaterTest, DeviceSpreadsKeysOverDevicesBySizeAndLocalDoesNot) {
  std::vector<Device> devices(4);
  store->SetUpdater([&](KeyRef key, const NDArray& input, const NDArray& stored) {
    EXPECT_EQ(input.device(), stored.device());
    devices[static_cast<std::size_t>(key.number())] = input.device();
    stored += input;
  });
  const std::vector<std::int64_t> sizes = {10, 40, 30, 20};
  std::vector<std::vector<NDArray>> arrays(4);
  for (std::size_t key = 0; key < 4; ++key) {
    for (int d = 1; d <= 2; ++d) {
      arrays[key].push_back(NDArray::Ones({sizes[key]}, DType::kFloat32, On(Cpu(d)), engine));
    }
    store->Init(static_cast<int>(key), arrays[key][0]);
  }
  NDArray before = NDArray::Zeros({40}, DType::kFloat32, On(Cpu()), engine);
  Hold reader(engine, {before.var()}, {});
  store->Pull(1, before);
  store->Push({0, 1, 2, 3}, arrays);
  if (GetParam().store == "local") {
    EXPECT_EQ(devices, (std::vector<Device>(4, Cpu(0))));
  } else {
    // 40 to the first device, 30 to the second, 20 to the second, 10 to the first.
    EXPECT_EQ(devices, (std::vector<Device>{On(Cpu(1)), On(Cpu(1)), On(Cpu(2)), On(Cpu(2))}));
  }
  reader.Release();
  EXPECT_EQ(before.ToVector<float>(), std::vector<float>(40, 1));
  store->Pull({0, 1, 2, 3}, arrays);
  for (const auto& of_key : arrays) {
    for (const NDArray& array : of_key) {
      EXPECT_EQ(array.ToVector<float>(),
                std::vector<float>(static_cast<std::size_t>(array.size()), 3));
    }
  }
}

TEST_P(UpdaterTest, AKeyPushedByOneDeviceStaysWhereItsValueWas) {
  Device seen;
  store->SetUpdater([&](KeyRef, const NDArray& input, const NDArray& stored) {
    seen = input.device();
    stored += input;
  });
  store->Init("k", Full(1, Cpu(3)));
  store->Push("k", Full(1, Cpu(2)));
  store->Push("k", OnFour(1));
  EXPECT_EQ(seen, GetParam().store == "local" ? Cpu(0) : On(Cpu(3)));
  EXPECT_EQ(Pulled(*store, "k"), All(6));
}

INSTANTIATE_TEST_SUITE_P(All, UpdaterTest, testing::ValuesIn(AllSetups()), SetupName);
INSTANTIATE_TEST_SUITE_P(Gpus, UpdaterTest, testing::ValuesIn(GpuSetups()), SetupName);

}  // namespace
}  // namespace heddle::kvstore_test
