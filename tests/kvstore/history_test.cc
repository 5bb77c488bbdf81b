// Random histories of push, pull, pushpull and broadcast, checked against the promises of
// docs/consistency.md.
//
// One thread: a model, a number a key, predicts every value and every error exactly.
// Several threads: every call is recorded with the times of its start and its return. A pull tells
// afterwards what the value was, and from that follows whether one order of all calls explains the
// history (the calls of a key are checked by themselves: an order for each makes an order for all).
//   Default updater: every push assigns a number of its own, so each pull names the push it saw.
//   Adding updater:  every push adds a bit of its own, so each pull names the set of pushes it saw.
// Keys come up while the threads run, made by a broadcast or, with the default updater, a push: who
// is refused tells whether the key was there.
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

enum class Fate : std::uint8_t {
  kDone,
  kUnknownKey,  // a push or pull that was refused: the key was not there
  kKnownKey,    // a broadcast that was refused: the key was there
  kNoValueYet,  // a pull that came before the push which makes the key, and found the key alone
};

// What one call did with one key. Times count the events of all threads.
struct Call {
  std::uint64_t start;
  std::uint64_t end;
  std::int64_t pushed = 0;     // of a push or broadcast: its number, or its bit; 0: neither
  std::optional<NDArray> out;  // of a pull
  bool after_last = false;     // the pull of a pushpull comes after its push, the call before it
  std::int64_t seen = 0;       // of a pull, filled in at the end
  bool makes_key = false;      // a broadcast, whose number or bit is the first value
  Fate fate = Fate::kDone;

  bool is_pull() const { return fate == Fate::kDone && pushed == 0; }
};

// The key is not there before.
using KeyHistory = std::vector<Call>;

// A broadcast of several keys that was refused: one of them at least was there.
struct RefusedList {
  std::uint64_t end;
  std::vector<int> keys;
};

// Whether a push or broadcast had begun by then that may have made the key.
bool MayBeThere(const KeyHistory& history, std::uint64_t time) {
  return std::ranges::any_of(
      history, [time](const Call& call) { return call.pushed != 0 && call.start < time; });
}

bool MayHaveFoundAKey(const RefusedList& refused, const std::vector<KeyHistory>& histories) {
  return std::ranges::any_of(refused.keys, [&](int key) {
    return MayBeThere(histories[static_cast<std::size_t>(key)], refused.end);
  });
}

class ManyThreads {
 public:
  static constexpr int kFirstKeys = 2;  // there before the threads start
  static constexpr int kRounds = 3;
  static constexpr int kNewKeys = 2;  // a round; all threads come to them at once
  static constexpr int kKeys = kFirstKeys + kRounds * kNewKeys;
  static constexpr int kThreads = 4;
  static constexpr int kPushesMax = 60;  // a key, so that the bits suffice

  ManyThreads(Engine& engine, KVStore& store, bool adds)
      : engine_(engine), store_(store), adds_(adds) {}

  // The threads call at random; returns the history of each key.
  std::vector<KeyHistory> Run(std::uint64_t seed, int calls) {
    std::vector<KeyHistory> histories(kKeys);
    for (int key = 0; key < kFirstKeys; ++key) {
      const std::int64_t value = NextPush(key);
      store_.Init(key, NewArray(value, 0));
      histories[static_cast<std::size_t>(key)].push_back(
          {.start = 0, .end = 0, .pushed = value, .out = {}, .makes_key = true});
    }
    std::vector<Caller> callers;
    for (std::size_t t = 0; t < kThreads; ++t) callers.emplace_back(seed + t);
    std::vector<std::thread> threads;
    for (Caller& caller : callers) {
      threads.emplace_back([this, &caller, calls] { RunThread(caller, calls); });
    }
    for (std::thread& thread : threads) thread.join();
    for (const Caller& caller : callers) {
      for (const NDArray& out : caller.untouched) EXPECT_EQ(ValueOf(out), -1);
      for (std::size_t key = 0; key < kKeys; ++key) {
        histories[key].insert(histories[key].end(), caller.histories[key].begin(),
                              caller.histories[key].end());
      }
    }
    for (KeyHistory& history : histories) {
      for (Call& call : history) Look(call);
    }
    for (const Caller& caller : callers) {
      for (const RefusedList& refused : caller.refused_lists) {
        EXPECT_TRUE(MayHaveFoundAKey(refused, histories));
      }
    }
    return histories;
  }

 private:
  // One thread, and what it has called.
  struct Caller {
    explicit Caller(std::uint64_t seed) : random(seed) {
      std::fill_n(knows.begin(), kFirstKeys, true);
    }

    Random random;
    std::vector<bool> knows = std::vector<bool>(kKeys);  // that the key is there, from a call
    std::vector<KeyHistory> histories = std::vector<KeyHistory>(kKeys);
    std::vector<RefusedList> refused_lists;
    std::vector<NDArray> untouched;  // outputs of calls that were refused
  };

  NDArray NewArray(std::int64_t value, int device) {
    return NDArray::Full({5}, value, DType::kInt64, AnyDevice(engine_, device), engine_);
  }

  // All elements of an output come from the same pushes.
  static std::int64_t ValueOf(const NDArray& out) {
    const std::vector<std::int64_t> values = out.ToVector<std::int64_t>();
    EXPECT_EQ(values, std::vector<std::int64_t>(values.size(), values[0]));
    return values[0];
  }
  static void Look(Call& call) {
    if (!call.out) return;
    try {
      call.seen = ValueOf(*call.out);
    } catch (const InvalidArgument&) {
      call.fate = Fate::kNoValueYet;
    }
  }

  // A number or a bit that no other push of the key has; 0 if there are no more.
  std::int64_t NextPush(int key) {
    const int number = pushes_[static_cast<std::size_t>(key)].fetch_add(1);
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

  void RunThread(Caller& caller, int calls) {
    for (int round = 0; round < kRounds; ++round) {
      const int first_new = kFirstKeys + round * kNewKeys;
      ++arrived_;
      while (arrived_.load() < kThreads * (round + 1)) std::this_thread::yield();
      MeetNewKeys(caller, first_new);
      for (int i = 1; i < calls / kRounds; ++i) Step(caller, first_new + kNewKeys);
    }
  }

  void MeetNewKeys(Caller& caller, int first) {
    const int key = first + Draw(caller.random, 0, 1);
    const int other = first + first + 1 - key;
    switch (Draw(caller.random, 0, 7)) {
      case 0:
        return Push(caller, {key}, /*pulls=*/false);
      case 1:
        return Pull(caller, {key});
      case 2:
      case 3:
      case 4:
        return Broadcast(caller, {key});
      default:
        return Broadcast(caller, {key, other});
    }
  }

  void Step(Caller& caller, int key_count) {
    const std::vector<int> keys = SomeKeys(caller, key_count);
    switch (Draw(caller.random, 0, 5)) {
      case 0:
      case 1:
        return Push(caller, keys, /*pulls=*/false);
      case 2:
        return Push(caller, keys, /*pulls=*/true);
      case 3:
        return Broadcast(caller, {keys[0]});
      default:
        return Pull(caller, keys);
    }
  }

  // One of the first `count` keys, or several that the thread knows, so that all of them are there.
  static std::vector<int> SomeKeys(Caller& caller, int count) {
    std::vector<int> keys;
    const bool one = Draw(caller.random, 0, 3) != 0;
    for (int key = 0; key < count; ++key) {
      if (one || caller.knows[static_cast<std::size_t>(key)]) keys.push_back(key);
    }
    std::ranges::shuffle(keys, caller.random);
    keys.resize(std::min<std::size_t>(keys.size(), one ? 1 : 3));
    return keys;
  }

  // The numbers or bits of a push of each key; none if they are used up.
  std::vector<std::int64_t> NextPushes(const std::vector<int>& keys) {
    std::vector<std::int64_t> pushed;
    for (const int key : keys) pushed.push_back(NextPush(key));
    if (std::ranges::count(pushed, 0) > 0) pushed.clear();
    return pushed;
  }
  std::vector<NDArray> NewOutputs(Caller& caller, const std::vector<int>& keys) {
    std::vector<NDArray> outs;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      outs.push_back(NewArray(-1, Draw(caller.random, 0, 2)));
    }
    return outs;
  }

  // With `pulls`: a pushpull.
  void Push(Caller& caller, const std::vector<int>& keys, bool pulls) {
    const std::vector<std::int64_t> pushed = NextPushes(keys);
    if (pushed.empty()) return Pull(caller, keys);
    std::vector<std::vector<NDArray>> parts;
    for (const std::int64_t value : pushed) parts.push_back(Parts(caller.random, value));
    const std::vector<NDArray> outs = pulls ? NewOutputs(caller, keys) : std::vector<NDArray>();
    const int priority = Priority(caller);
    const auto call = [&] {
      pulls ? store_.PushPull(keys, parts, outs, priority) : store_.Push(keys, parts, priority);
    };
    const bool refused = Note<UnknownKey>(caller, {keys, pushed, outs}, Fate::kUnknownKey, call);
    // The default updater makes the key.
    EXPECT_FALSE(refused && (!adds_ || keys.size() > 1));
  }

  void Pull(Caller& caller, const std::vector<int>& keys) {
    const std::vector<NDArray> outs = NewOutputs(caller, keys);
    const int priority = Priority(caller);
    const bool refused = Note<UnknownKey>(caller, {keys, {}, outs}, Fate::kUnknownKey,
                                          [&] { store_.Pull(keys, outs, priority); });
    EXPECT_FALSE(refused && keys.size() > 1);
  }

  void Broadcast(Caller& caller, const std::vector<int>& keys) {
    const std::vector<std::int64_t> pushed = NextPushes(keys);
    if (pushed.empty()) return Pull(caller, keys);
    std::vector<NDArray> values;
    for (const std::int64_t value : pushed) {
      values.push_back(NewArray(value, Draw(caller.random, 0, 2)));
    }
    const std::vector<NDArray> outs = NewOutputs(caller, keys);
    const int priority = Priority(caller);
    Note<InvalidArgument>(caller, {keys, pushed, outs}, Fate::kKnownKey,
                          [&] { store_.Broadcast(keys, values, outs, priority); });
  }

  static int Priority(Caller& caller) { return Draw(caller.random, -2, 2); }

  struct ListCall {
    const std::vector<int>& keys;
    const std::vector<std::int64_t> pushed;  // a key, or none
    const std::vector<NDArray>& outs;        // a key, or none
  };

  // Makes the call and notes it for each of its keys. True: it was refused with an Error, which
  // means `if_refused`.
  template <class Error, class F>
  bool Note(Caller& caller, const ListCall& list, Fate if_refused, F&& call) {
    const std::uint64_t start = clock_.fetch_add(1);
    bool refused = false;
    try {
      call();
    } catch (const Error&) {
      refused = true;
    }
    const std::uint64_t end = clock_.fetch_add(1);
    if (refused) {
      caller.untouched.insert(caller.untouched.end(), list.outs.begin(), list.outs.end());
      if (list.keys.size() > 1) {
        caller.refused_lists.push_back({end, list.keys});
        return true;
      }
    }
    const bool is_broadcast = if_refused == Fate::kKnownKey;
    for (std::size_t i = 0; i < list.keys.size(); ++i) {
      const auto key = static_cast<std::size_t>(list.keys[i]);
      KeyHistory& history = caller.histories[key];
      if (!refused || is_broadcast) caller.knows[key] = true;
      if (refused) {
        history.push_back({.start = start, .end = end, .out = {}, .fate = if_refused});
        continue;
      }
      const bool pushes = !list.pushed.empty();
      if (pushes) {
        history.push_back({.start = start,
                           .end = end,
                           .pushed = list.pushed[i],
                           .out = {},
                           .makes_key = is_broadcast});
      }
      if (list.outs.empty()) continue;
      history.push_back({.start = start, .end = end, .out = list.outs[i], .after_last = pushes});
    }
    return refused;
  }

  Engine& engine_;
  KVStore& store_;
  const bool adds_;
  std::atomic<std::uint64_t> clock_{1};
  std::atomic<int> arrived_{0};
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
    for (std::size_t a = 0; a < size_; ++a) {
      for (std::size_t b = 0; b < size_; ++b) {
        if (a != b && KeyTellsOrder(history[a], history[b])) Add(a, b);
      }
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
  // Whether `a` comes before `b` because of what they found of the key, which never goes again. A
  // push that makes it shows the key to others before it gives it the value.
  static bool KeyTellsOrder(const Call& a, const Call& b) {
    if (a.fate == Fate::kUnknownKey || a.makes_key) return b.fate != Fate::kUnknownKey;
    return a.fate == Fate::kNoValueYet && b.fate == Fate::kDone;
  }

  std::size_t size_;
  std::vector<std::vector<bool>> before_;
};

// Each broadcast that was refused can have found the key.
bool ExplainsRefusals(const KeyHistory& history) {
  return std::ranges::all_of(history, [&history](const Call& call) {
    return call.fate != Fate::kKnownKey || MayBeThere(history, call.end);
  });
}

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
      if (!history[pull].is_pull()) continue;
      const auto seen = push_of.find(history[pull].seen);
      if (seen == push_of.end()) return false;  // nobody pushed that
      for (const auto& [number, push] : push_of) {
        if (push == seen->second) {
          grows |= order.Add(push, pull);
        } else {
          if (order.Before(push, pull)) grows |= order.Add(push, seen->second);
          if (order.Before(seen->second, push)) grows |= order.Add(pull, push);
        }
      }
    }
  }
  return !order.HasCycle() && ExplainsRefusals(history);
}

// Pulls see growing sets of pushes: all that came before, none that came after.
bool ExplainsAdditions(const KeyHistory& history) {
  const Order order(history);
  if (order.HasCycle() || !ExplainsRefusals(history)) return false;
  const auto has = [](std::int64_t set, std::int64_t bits) { return (set & bits) == bits; };
  std::int64_t all = 0;
  for (const Call& call : history) all |= call.pushed;
  for (std::size_t a = 0; a < history.size(); ++a) {
    if (!history[a].is_pull()) continue;
    const std::int64_t seen = history[a].seen;
    if (!has(all, seen)) return false;  // nobody pushed that
    for (std::size_t b = 0; b < history.size(); ++b) {
      const Call& other = history[b];
      if (other.is_pull()) {
        if (!has(seen, other.seen) && !has(other.seen, seen)) return false;
        if (order.Before(b, a) && !has(seen, other.seen)) return false;
        continue;
      }
      if (other.pushed == 0) continue;  // refused
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
  const KeyHistory lost = {{.start = 1, .end = 2, .pushed = 2, .out = {}},
                           {.start = 3, .end = 4, .pushed = 1, .out = {}},
                           {.start = 3, .end = 4, .out = {}, .after_last = true, .seen = 2}};
  EXPECT_FALSE(ExplainsAssignments(lost));
  EXPECT_FALSE(ExplainsAdditions(lost));
}

TEST(HistoryCheckers, FindPullsOfTheFutureAndOfNobody) {
  const KeyHistory future = {{.start = 1, .end = 2, .out = {}, .seen = 1},
                             {.start = 3, .end = 4, .pushed = 1, .out = {}}};
  EXPECT_FALSE(ExplainsAssignments(future));
  EXPECT_FALSE(ExplainsAdditions(future));
  for (const std::int64_t value : {0, 4}) {
    const KeyHistory nobodys = {{.start = 1, .end = 2, .pushed = 1, .out = {}, .makes_key = true},
                                {.start = 3, .end = 4, .out = {}, .seen = value}};
    EXPECT_FALSE(ExplainsAssignments(nobodys));
    EXPECT_FALSE(ExplainsAdditions(nobodys));
  }
}

TEST(HistoryCheckers, AcceptRacesToMakeAKey) {
  const KeyHistory by_broadcast = {
      {.start = 1, .end = 10, .pushed = 1, .out = {}, .makes_key = true},
      {.start = 1, .end = 10, .out = {}, .after_last = true, .seen = 1},
      {.start = 2, .end = 9, .out = {}, .fate = Fate::kKnownKey},
      {.start = 3, .end = 4, .out = {}, .fate = Fate::kUnknownKey},
      {.start = 5, .end = 6, .out = {}, .seen = 1}};
  EXPECT_TRUE(ExplainsAssignments(by_broadcast));
  EXPECT_TRUE(ExplainsAdditions(by_broadcast));
  EXPECT_TRUE(ExplainsAssignments({{.start = 1, .end = 10, .pushed = 1, .out = {}},
                                   {.start = 2, .end = 3, .out = {}, .fate = Fate::kKnownKey},
                                   {.start = 4, .end = 5, .out = {}, .fate = Fate::kNoValueYet},
                                   {.start = 6, .end = 7, .out = {}, .seen = 1}}));
}

TEST(HistoryCheckers, FindKeysThatAreMadeTwiceOrNotAtAll) {
  const auto expect_refused = [](const KeyHistory& history) {
    EXPECT_FALSE(ExplainsAssignments(history));
    EXPECT_FALSE(ExplainsAdditions(history));
  };
  const Call broadcast = {.start = 3, .end = 6, .pushed = 1, .out = {}, .makes_key = true};
  const auto refused = [](std::uint64_t start, Fate fate) {
    return Call{.start = start, .end = start + 1, .out = {}, .fate = fate};
  };
  expect_refused({broadcast, {.start = 3, .end = 6, .pushed = 2, .out = {}, .makes_key = true}});
  expect_refused({broadcast, {.start = 1, .end = 2, .pushed = 2, .out = {}}});  // pushed before
  expect_refused({broadcast, refused(1, Fate::kKnownKey)});
  expect_refused({broadcast, refused(7, Fate::kUnknownKey)});
  expect_refused({broadcast, refused(4, Fate::kNoValueYet)});
  expect_refused({{.start = 1, .end = 9, .pushed = 1, .out = {}, .makes_key = true},
                  refused(2, Fate::kKnownKey),
                  refused(4, Fate::kUnknownKey)});
  // By a push, which need not be the only one.
  const Call push = {.start = 3, .end = 6, .pushed = 1, .out = {}};
  expect_refused({push, refused(1, Fate::kKnownKey)});
  expect_refused({push, refused(7, Fate::kUnknownKey)});
  expect_refused({push, refused(7, Fate::kNoValueYet)});
}

TEST(HistoryCheckers, FindListsThatWereRefusedForNothing) {
  const std::vector<KeyHistory> histories = {{{.start = 5, .end = 6, .pushed = 1, .out = {}}}, {}};
  EXPECT_TRUE(MayHaveFoundAKey({7, {1, 0}}, histories));
  EXPECT_FALSE(MayHaveFoundAKey({4, {1, 0}}, histories));
  EXPECT_FALSE(MayHaveFoundAKey({7, {1}}, histories));
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
