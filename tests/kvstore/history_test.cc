// Random histories of push, pull, pushpull and broadcast, checked against the promises of
// docs/consistency.md.
//
// One thread: a model, a number a key, predicts every value and every error exactly.
// Several threads: every call is recorded with the times of its start and its return. A pull tells
// afterwards what the value was, and from that follows whether one order of all calls explains the
// history (the calls of a key are checked by themselves: an order for each makes an order for all).
//   Default updater: every push assigns a number of its own, so each pull names the push it saw.
//   Adding updater:  every push adds a bit of its own, so each pull names the set of pushes it saw.
#include <heddle/kvstore.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
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

using Random = std::mt19937_64;

int Draw(Random& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}

// Where the arrays of device `i` lie: where there are GPUs, those of two devices in three on one.
Device AnyDevice(const Engine& engine, int i) {
  return engine.options().gpu_driver != nullptr && i % 3 > 0 ? Gpu(i % 3) : Cpu(i);
}

class HistoryTest : public StoreTest {
 protected:
  const std::uint64_t seed = TestSeed();
};

// ---- One thread

// What a key holds: its value, and the error that pulls report.
struct ModelValue {
  std::int64_t value = 0;
  bool has_value = true;
  std::string error;
};

class Model {
 public:
  explicit Model(bool adds) : adds_(adds) {}

  bool Contains(int key) const { return keys_.count(key) != 0; }
  void Init(int key, std::int64_t value) { keys_[key] = {value, true, ""}; }
  void Push(int key, std::int64_t sum, const std::string& error) {
    const bool is_new = !Contains(key);
    ModelValue& value = keys_[key];
    if (is_new) value.has_value = false;
    if (!error.empty()) {
      value.error = error;
    } else {
      value.value = adds_ ? value.value + sum : sum;
      value.has_value = true;
      value.error.clear();
    }
  }
  void Remove(int key) { keys_.erase(key); }
  const ModelValue& At(int key) const { return keys_.at(key); }

 private:
  bool adds_;
  std::map<int, ModelValue> keys_;
};

// An output, and what it must hold when all is done.
struct Expected {
  NDArray out;
  ModelValue value;
};

class OneThreadHistory {
 public:
  OneThreadHistory(Engine& engine, KVStore& store, bool adds, std::uint64_t seed)
      : engine_(engine), store_(store), random_(seed), model_(adds), adds_(adds) {}

  void Run(int calls) {
    for (int i = 0; i < calls; ++i) Step();
    for (const Expected& expected : expected_) Check(expected);
  }

 private:
  static constexpr int kKeys = 6;
  static constexpr int kDevices = 3;

  int Priority() { return Draw(random_, -3, 3); }
  NDArray NewArray(std::int64_t value) {
    return NDArray::Full({3}, value, DType::kInt64,
                         AnyDevice(engine_, Draw(random_, 0, kDevices - 1)), engine_);
  }

  // Some arrays, their sum, and the first error among them.
  struct Input {
    std::vector<NDArray> arrays;
    std::int64_t sum = 0;
    std::string error;
  };
  Input NewInput() {
    Input input;
    const int count = Draw(random_, 1, 4);
    for (int i = 0; i < count; ++i) {
      const std::int64_t value = Draw(random_, -1000, 1000);
      const NDArray array = NewArray(value);
      if (Draw(random_, 0, 19) == 0) {
        const std::string error = "error " + std::to_string(++errors_);
        engine_.Push({.name = "fail", .writes = {array.var()}},
                     [error] { throw std::runtime_error(error); });
        if (input.error.empty()) input.error = error;
      }
      input.sum += value;
      input.arrays.push_back(array);
    }
    return input;
  }
  std::vector<NDArray> NewOutputs() {
    std::vector<NDArray> outs;
    const int count = Draw(random_, 1, 3);
    for (int i = 0; i < count; ++i) outs.push_back(NewArray(-77));
    return outs;
  }
  void Expect(const std::vector<NDArray>& outs, int key) {
    for (const NDArray& out : outs) expected_.push_back({out, model_.At(key)});
  }

  void Step() {
    const int key = Draw(random_, 0, kKeys - 1);
    const bool known = model_.Contains(key);
    switch (Draw(random_, 0, 6)) {
      case 0:
      case 1: {
        if (!known && adds_) return;
        const Input input = NewInput();
        store_.Push(key, input.arrays, Priority());
        // The caller overwrites what it pushed.
        for (const NDArray& array : input.arrays) array.Fill(12345);
        model_.Push(key, input.sum, input.error);
        return;
      }
      case 2:
      case 3: {
        const std::vector<NDArray> outs = NewOutputs();
        if (!known) {
          EXPECT_THROW(store_.Pull(key, outs), InvalidArgument);
          return;
        }
        store_.Pull(key, outs, Priority());
        Expect(outs, key);
        return;
      }
      case 4: {
        if (!known && adds_) return;
        const Input input = NewInput();
        const bool in_place = Draw(random_, 0, 1) == 0;
        const std::vector<NDArray> outs = in_place ? input.arrays : NewOutputs();
        if (in_place) {
          store_.PushPull(key, input.arrays, Priority());
        } else {
          store_.PushPull(key, input.arrays, outs, Priority());
        }
        model_.Push(key, input.sum, input.error);
        Expect(outs, key);
        return;
      }
      case 5: {
        const std::vector<NDArray> outs = NewOutputs();
        const std::int64_t value = Draw(random_, -1000, 1000);
        if (known) {
          EXPECT_THROW(store_.Broadcast(key, NewArray(value), outs), InvalidArgument);
          if (Draw(random_, 0, 2) != 0) return;
          store_.Remove(key);
          model_.Remove(key);
        }
        store_.Broadcast(key, NewArray(value), outs, Priority());
        model_.Init(key, value);
        Expect(outs, key);
        return;
      }
      default:
        ListStep();
    }
  }

  // One call over several keys, some named twice, with one output for all of them.
  void ListStep() {
    std::vector<int> keys;
    std::vector<std::vector<NDArray>> lists;
    std::vector<std::vector<NDArray>> outs;
    std::map<int, Input> joined;
    const NDArray shared = NewArray(-77);
    for (int i = Draw(random_, 1, 4); i > 0; --i) {
      const int key = Draw(random_, 0, kKeys - 1);
      if (!model_.Contains(key)) continue;
      const Input input = NewInput();
      Input& all = joined[key];
      all.sum += input.sum;
      if (all.error.empty()) all.error = input.error;
      keys.push_back(key);
      lists.push_back(input.arrays);
      outs.push_back({shared});
    }
    if (keys.empty()) return;
    store_.PushPull(keys, lists, outs, Priority());
    for (const auto& [key, input] : joined) model_.Push(key, input.sum, input.error);
    Expect({shared}, keys.back());
  }

  void Check(const Expected& expected) {
    if (!expected.value.error.empty()) {
      EXPECT_EQ(MessageOf<std::runtime_error>([&] { expected.out.WaitToRead(); }),
                expected.value.error);
    } else {
      EXPECT_EQ(expected.out.ToVector<std::int64_t>(),
                std::vector<std::int64_t>(3, expected.value.value));
    }
  }

  Engine& engine_;
  KVStore& store_;
  Random random_;
  Model model_;
  const bool adds_;
  int errors_ = 0;
  std::vector<Expected> expected_;
};

TEST_P(HistoryTest, OneThreadDefaultUpdater) {
  OneThreadHistory(engine, *store, /*adds=*/false, seed).Run(Times(600));
}

TEST_P(HistoryTest, OneThreadAddingUpdater) {
  store->SetUpdater([](KeyRef, const NDArray& input, const NDArray& stored) { stored += input; });
  OneThreadHistory(engine, *store, /*adds=*/true, seed).Run(Times(600));
}

// ---- Several threads

// One call on one key. Times count the events of all threads.
struct Call {
  std::uint64_t start;
  std::uint64_t end;
  std::int64_t pushed = 0;     // of a push: its number, or its bit; 0: a pull
  std::optional<NDArray> out;  // of a pull
  bool after_last = false;     // the pull of a pushpull comes after its push, the call before it
  std::int64_t seen = 0;       // of a pull, filled in at the end
};

using KeyHistory = std::vector<Call>;

class ManyThreads {
 public:
  static constexpr int kKeys = 4;
  static constexpr int kThreads = 4;
  static constexpr int kPushesMax = 60;  // a key, so that the bits suffice

  ManyThreads(Engine& engine, KVStore& store, bool adds)
      : engine_(engine), store_(store), adds_(adds) {}

  // The threads call at random; returns the history of each key.
  std::vector<KeyHistory> Run(std::uint64_t seed, int calls) {
    for (int key = 0; key < kKeys; ++key) store_.Init(key, NewArray(0, 0));
    std::vector<std::vector<KeyHistory>> of_thread(kThreads, std::vector<KeyHistory>(kKeys));
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        Random random(seed + t);
        for (int i = 0; i < calls; ++i) Step(random, of_thread[t]);
      });
    }
    for (std::thread& thread : threads) thread.join();
    std::vector<KeyHistory> histories(kKeys);
    for (const std::vector<KeyHistory>& by_key : of_thread) {
      for (std::size_t key = 0; key < kKeys; ++key) {
        histories[key].insert(histories[key].end(), by_key[key].begin(), by_key[key].end());
      }
    }
    for (KeyHistory& history : histories) {
      for (Call& call : history) {
        if (call.out) call.seen = ValueOf(*call.out);
      }
    }
    return histories;
  }

 private:
  NDArray NewArray(std::int64_t value, int device) {
    return NDArray::Full({5}, value, DType::kInt64, AnyDevice(engine_, device), engine_);
  }

  // All elements of an output come from the same pushes.
  static std::int64_t ValueOf(const NDArray& out) {
    const std::vector<std::int64_t> values = out.ToVector<std::int64_t>();
    EXPECT_EQ(values, std::vector<std::int64_t>(values.size(), values[0]));
    return values[0];
  }

  // A number or a bit that no other push of the key has; 0 if there are no more.
  std::int64_t NextPush(std::size_t key) {
    const int number = pushes_[key].fetch_add(1);
    if (number >= kPushesMax) return 0;
    return adds_ ? std::int64_t{1} << number : number + 1;
  }

  // Up to three arrays on different devices that sum up to `value`.
  std::vector<NDArray> Parts(Random& random, std::int64_t value) {
    std::vector<NDArray> parts;
    for (int i = Draw(random, 0, 2); i > 0; --i) {
      const std::int64_t part = Draw(random, -100, 100);
      parts.push_back(NewArray(part, i));
      value -= part;
    }
    parts.push_back(NewArray(value, 0));
    return parts;
  }

  void Step(Random& random, std::vector<KeyHistory>& histories) {
    const int key = Draw(random, 0, kKeys - 1);
    KeyHistory& history = histories[static_cast<std::size_t>(key)];
    const int priority = Draw(random, -2, 2);
    const int kind = Draw(random, 0, 4);
    const std::int64_t pushed = kind <= 2 ? NextPush(static_cast<std::size_t>(key)) : 0;
    const NDArray out = NewArray(-1, Draw(random, 0, 2));
    if (pushed == 0) {
      const std::uint64_t start = clock_.fetch_add(1);
      store_.Pull(key, out, priority);
      history.push_back({.start = start, .end = clock_.fetch_add(1), .out = out});
      return;
    }
    const std::vector<NDArray> parts = Parts(random, pushed);
    const std::uint64_t start = clock_.fetch_add(1);
    if (kind <= 1) {
      store_.Push(key, parts, priority);
    } else {
      store_.PushPull(key, parts, out, priority);
    }
    const std::uint64_t end = clock_.fetch_add(1);
    history.push_back({.start = start, .end = end, .pushed = pushed, .out = {}});
    if (kind > 1) history.push_back({.start = start, .end = end, .out = out, .after_last = true});
  }

  Engine& engine_;
  KVStore& store_;
  const bool adds_;
  std::atomic<std::uint64_t> clock_{1};
  std::atomic<int> pushes_[kKeys] = {};
};

// Which calls must come before which; grows by Add and stays transitive.
class Order {
 public:
  explicit Order(const KeyHistory& history)
      : size_(history.size()), before_(size_, std::vector<bool>(size_)) {
    for (std::size_t a = 0; a < size_; ++a) {
      for (std::size_t b = 0; b < size_; ++b) before_[a][b] = history[a].end < history[b].start;
    }
    for (std::size_t a = 1; a < size_; ++a) {
      if (history[a].after_last) Add(a - 1, a);
    }
  }

  bool Before(std::size_t a, std::size_t b) const { return before_[a][b]; }

  // False: it was known.
  bool Add(std::size_t a, std::size_t b) {
    if (before_[a][b]) return false;
    for (std::size_t x = 0; x < size_; ++x) {
      if (x != a && !before_[x][a]) continue;
      before_[x][b] = true;
      for (std::size_t y = 0; y < size_; ++y) {
        if (before_[b][y]) before_[x][y] = true;
      }
    }
    return true;
  }

  bool HasCycle() const {
    for (std::size_t a = 0; a < size_; ++a) {
      if (before_[a][a]) return true;
    }
    return false;
  }

 private:
  std::size_t size_;
  std::vector<std::vector<bool>> before_;
};

// A pull follows the push that it saw, and every other push comes before that push or after the
// pull.
bool ExplainsAssignments(const KeyHistory& history) {
  Order order(history);
  std::map<std::int64_t, std::size_t> push_of;
  for (std::size_t i = 0; i < history.size(); ++i) {
    if (history[i].pushed != 0) push_of[history[i].pushed] = i;
  }
  bool grows = true;
  while (grows && !order.HasCycle()) {
    grows = false;
    for (std::size_t pull = 0; pull < history.size(); ++pull) {
      if (history[pull].pushed != 0) continue;
      const auto seen = push_of.find(history[pull].seen);
      if (seen == push_of.end() && history[pull].seen != 0) return false;  // nobody pushed that
      for (const auto& [number, push] : push_of) {
        if (seen == push_of.end()) {  // the initial value
          grows |= order.Add(pull, push);
        } else if (push == seen->second) {
          grows |= order.Add(push, pull);
        } else {
          if (order.Before(push, pull)) grows |= order.Add(push, seen->second);
          if (order.Before(seen->second, push)) grows |= order.Add(pull, push);
        }
      }
    }
  }
  return !order.HasCycle();
}

// Pulls see growing sets of pushes: all that came before, none that came after.
bool ExplainsAdditions(const KeyHistory& history) {
  const Order order(history);
  const auto has = [](std::int64_t set, std::int64_t bits) { return (set & bits) == bits; };
  for (std::size_t a = 0; a < history.size(); ++a) {
    if (history[a].pushed != 0) continue;
    const std::int64_t seen = history[a].seen;
    for (std::size_t b = 0; b < history.size(); ++b) {
      const Call& other = history[b];
      if (other.pushed == 0) {
        if (!has(seen, other.seen) && !has(other.seen, seen)) return false;
        if (order.Before(b, a) && !has(seen, other.seen)) return false;
        continue;
      }
      if (order.Before(b, a) && !has(seen, other.pushed)) return false;
      if (order.Before(a, b) && has(seen, other.pushed)) return false;
      for (std::size_t c = 0; c < history.size(); ++c) {
        if (history[c].pushed != 0 && order.Before(b, c) && has(seen, history[c].pushed) &&
            !has(seen, other.pushed)) {
          return false;
        }
      }
    }
  }
  return true;
}

TEST_P(HistoryTest, ManyThreadsDefaultUpdater) {
  for (const KeyHistory& history : ManyThreads(engine, *store, /*adds=*/false).Run(seed, 120)) {
    EXPECT_TRUE(ExplainsAssignments(history));
  }
}

TEST_P(HistoryTest, ManyThreadsAddingUpdater) {
  store->SetUpdater([](KeyRef, const NDArray& input, const NDArray& stored) { stored += input; });
  for (const KeyHistory& history : ManyThreads(engine, *store, /*adds=*/true).Run(seed, 120)) {
    EXPECT_TRUE(ExplainsAdditions(history));
  }
}

TEST_P(HistoryTest, ManyThreadsPushingANewKey) {
  // Who comes first creates the key; nobody's push is lost.
  std::vector<std::thread> threads;
  std::atomic<int> ready{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const NDArray value = Full(t + 1, Cpu(t));
      const NDArray out = Full(0);
      ++ready;
      while (ready.load() < 4) std::this_thread::yield();
      store->PushPull("k", value, out);
      EXPECT_GE(out.ToVector<float>()[0], 1);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::vector<float> last = Pulled(*store, "k");
  EXPECT_GE(last[0], 1);
  EXPECT_EQ(last, All(last[0]));
}

INSTANTIATE_TEST_SUITE_P(All, HistoryTest, testing::ValuesIn(AllSetups()), SetupName);
INSTANTIATE_TEST_SUITE_P(Gpus, HistoryTest, testing::ValuesIn(GpuSetups()), SetupName);

// ---- The checkers find what they are for

TEST(HistoryCheckers, AcceptOverlappingCallsInAnyOrder) {
  EXPECT_TRUE(ExplainsAssignments({{.start = 1, .end = 10, .pushed = 1, .out = {}},
                                   {.start = 2, .end = 9, .pushed = 2, .out = {}},
                                   {.start = 3, .end = 4, .out = {}, .seen = 2},
                                   {.start = 5, .end = 6, .out = {}, .seen = 1}}));
  EXPECT_TRUE(ExplainsAdditions({{.start = 1, .end = 10, .pushed = 1, .out = {}},
                                 {.start = 2, .end = 9, .pushed = 2, .out = {}},
                                 {.start = 3, .end = 4, .out = {}, .seen = 2},
                                 {.start = 5, .end = 6, .out = {}, .seen = 3}}));
}

TEST(HistoryCheckers, FindStalePulls) {
  const KeyHistory stale = {{.start = 1, .end = 2, .pushed = 1, .out = {}},
                            {.start = 3, .end = 4, .pushed = 2, .out = {}},
                            {.start = 5, .end = 6, .out = {}, .seen = 1}};
  EXPECT_FALSE(ExplainsAssignments(stale));
  EXPECT_FALSE(ExplainsAdditions(stale));
  const KeyHistory lost = {{.start = 1, .end = 2, .pushed = 1, .out = {}},
                           {.start = 1, .end = 2, .out = {}, .after_last = true, .seen = 0}};
  EXPECT_FALSE(ExplainsAssignments(lost));
  EXPECT_FALSE(ExplainsAdditions(lost));
}

TEST(HistoryCheckers, FindPullsOfTheFutureAndOfNobody) {
  const KeyHistory future = {{.start = 1, .end = 2, .out = {}, .seen = 1},
                             {.start = 3, .end = 4, .pushed = 1, .out = {}}};
  EXPECT_FALSE(ExplainsAssignments(future));
  EXPECT_FALSE(ExplainsAdditions(future));
  EXPECT_FALSE(ExplainsAssignments({{.start = 1, .end = 2, .out = {}, .seen = 5}}));
}

TEST(HistoryCheckers, FindTwoPullsThatDisagree) {
  // Both pushes overlap everything, but no order of them shows 1, 2 and 1 again.
  EXPECT_FALSE(ExplainsAssignments({{.start = 1, .end = 20, .pushed = 1, .out = {}},
                                    {.start = 1, .end = 20, .pushed = 2, .out = {}},
                                    {.start = 3, .end = 4, .out = {}, .seen = 1},
                                    {.start = 5, .end = 6, .out = {}, .seen = 2},
                                    {.start = 7, .end = 8, .out = {}, .seen = 1}}));
  EXPECT_FALSE(ExplainsAdditions({{.start = 1, .end = 20, .pushed = 1, .out = {}},
                                  {.start = 1, .end = 20, .pushed = 2, .out = {}},
                                  {.start = 3, .end = 4, .out = {}, .seen = 1},
                                  {.start = 3, .end = 4, .out = {}, .seen = 2}}));
}

}  // namespace
}  // namespace heddle::kvstore_test
