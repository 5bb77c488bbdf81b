// The values of a server against a local store that sums the same lists: the same bits, however
// arrays are cut.
#include "kvstore/dist/server/array_parts.h"

#include <heddle/kvstore.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "kvstore/compression/compressor.h"
#include "kvstore/optimizer/foreign.h"
#include "kvstore/optimizer/update_rule.h"
#include "tests/kvstore/support.h"
#include "tests/message_of.h"

namespace heddle::kvstore::dist {
namespace {

// Bytes of a vector as a transport delivers them.
Payload Received(std::vector<std::byte> bytes) {
  auto owner = std::make_shared<std::vector<std::byte>>(std::move(bytes));
  Payload payload(owner, {owner->data(), owner->size()});
  payload.set_owned_alone();
  return payload;
}

std::vector<std::byte> BytesOf(const NDArray& array) {
  array.WaitToRead();
  std::vector<std::byte> bytes(static_cast<std::size_t>(array.bytes()));
  std::memcpy(bytes.data(), array.const_data(), bytes.size());
  return bytes;
}

std::vector<std::byte> BytesOf(const Payload& payload) {
  std::vector<std::byte> bytes;
  for (auto run : payload.runs()) bytes.insert(bytes.end(), run.begin(), run.end());
  return bytes;
}

struct Cut {
  std::int64_t begin;
  std::int64_t end;
};

class ArrayPartsTest : public ::testing::Test {
 protected:
  void Push(const PartId& id, std::span<const Message> pushes, const UpdateBy& by) {
    for (std::size_t i = 0; i < pushes.size(); ++i) {
      ASSERT_NO_THROW(parts_.Check(id, pushes[i]));
      parts_.Add(id, pushes[i], i == 0);
    }
    std::exception_ptr error;
    if (!parts_.Update(id, by, &error)) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ended_.erase(id) > 0; });
    }
    ASSERT_EQ(error, nullptr);
  }

  Engine engine_{EngineOptions::FromEnvironment()};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<PartId> ended_;
  ArrayParts parts_{engine_,
                    [this](const PartId& id, std::exception_ptr error) {
                      EXPECT_EQ(error, nullptr);
                      const std::lock_guard lock(mutex_);
                      ended_.insert(id);
                      changed_.notify_all();
                    },
                    /*passed=*/nullptr};
};

NDArray RandomArray(std::int64_t count, DType dtype, std::mt19937_64& random, Engine& engine) {
  std::vector<float> values(static_cast<std::size_t>(count));
  std::uniform_real_distribution<float> uniform(-2, 2);
  for (float& value : values) value = uniform(random);
  return NDArray::FromVector(values, {count}, dtype, Cpu(), engine);
}

TEST_F(ArrayPartsTest, SumsAndUpdatesHaveTheBitsOfALocalStore) {
  const std::uint64_t seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const auto pick = [&](int count) { return static_cast<int>(random() % count); };
  std::uint32_t store_number = 0;
  for (int trial = 0; trial < 60; ++trial) {
    const DType dtype =
        std::vector{DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64}[pick(4)];
    const std::int64_t count = pick(3) == 0 ? 40'000 : 1 + pick(9000);
    const std::string name =
        std::vector<std::string>{"", "sgd", "adam", "nag", "sgld", "signum"}[pick(6)];
    const bool multi = pick(2) == 0 && (dtype == DType::kFloat16 || dtype == DType::kBFloat16);
    const std::uint32_t store = store_number++;
    SCOPED_TRACE(::testing::Message() << "trial " << trial << " " << Name(dtype) << " " << count
                                      << " optimizer '" << name << "' multi " << multi);
    auto local = KVStore::Create("local", engine_);
    std::uint64_t version = 0;
    double rate = 0;
    double decay = 0;
    if (!name.empty()) {
      std::vector<std::pair<std::string_view, double>> parameters = {{"learning_rate", 0.25}};
      if (multi) parameters.emplace_back("multi_precision", 1);
      const OptimizerPtr optimizer = MakeOptimizer(name, parameters);
      local->SetOptimizer(optimizer);
      version = std::uint64_t{1} << 32;
      parts_.SetOptimizer(store, version, MakeOptimizer(name, parameters), false);
      rate = 0.25;
      decay = optimizer->Get("weight_decay");
    }
    const NDArray start = RandomArray(count, dtype, random, engine_);
    local->Init("a", start);
    std::vector<Cut> cuts;
    for (std::int64_t begin = 0; begin < count;) {
      const std::int64_t end = std::min<std::int64_t>(count, begin + 4096 * (1 + pick(4)));
      cuts.push_back({begin, end});
      begin = end;
    }
    const auto bytes_of = [&](const NDArray& array, const Cut& cut) {
      return Received(BytesOf(array.Slice(cut.begin, cut.end)));
    };
    for (std::size_t i = 0; i < cuts.size(); ++i) {
      parts_.Create({store, static_cast<std::uint32_t>(i), 1},
                    {Key("a"), Shape{count}, dtype, false, static_cast<std::uint32_t>(cuts.size()),
                     cuts[i].begin, cuts[i].end},
                    bytes_of(start, cuts[i]));
    }
    // Pulled, or pushed by who keeps it; and what it was then.
    std::vector<std::pair<Payload, std::vector<std::byte>>> kept;
    for (int round = 0; round < 4; ++round) {
      std::vector<NDArray> gradients;
      for (int worker = 0, workers = 1 + pick(4); worker < workers; ++worker) {
        gradients.push_back(RandomArray(count, dtype, random, engine_));
      }
      local->Push("a", gradients);
      NDArray out({count}, dtype, Cpu(), engine_);
      local->Pull("a", out);
      const std::vector<std::byte> expected = BytesOf(out);
      for (std::size_t i = 0; i < cuts.size(); ++i) {
        const PartId id{store, static_cast<std::uint32_t>(i), 1};
        std::vector<Message> pushes;
        for (const NDArray& gradient : gradients) {
          Message push{.kind = Kind::kPush, .dtype = dtype, .part = id};
          push.payload = bytes_of(gradient, cuts[i]);
          if (pick(3) == 0) {
            push.payload = Payload(push.payload.owner(), push.payload.runs()[0]);
            kept.emplace_back(push.payload, BytesOf(push.payload));
          }
          pushes.push_back(std::move(push));
        }
        Push(id, pushes, {version, UpdateRates{rate, decay}});
        const Payload value = parts_.Read(id, {.kind = Kind::kPull, .dtype = dtype, .part = id});
        std::vector<std::byte> now = BytesOf(value);
        const std::size_t at = static_cast<std::size_t>(cuts[i].begin) * SizeOf(dtype);
        ASSERT_EQ(std::memcmp(now.data(), expected.data() + at, now.size()), 0)
            << "round " << round << " part " << i;
        kept.emplace_back(value, std::move(now));
      }
    }
    for (const auto& [payload, bytes] : kept) ASSERT_EQ(BytesOf(payload), bytes);
  }
}

TEST_F(ArrayPartsTest, AResetKeepsTheSumThatHasBegun) {
  const PartId id{0, 0, 1};
  const auto payload = [&](float value) {
    return Received(BytesOf(NDArray::Full({1}, value, DType::kFloat32, Cpu(), engine_)));
  };
  parts_.Create(id, {Key("w"), Shape{1}, DType::kFloat32, false, 1, 0, 1}, payload(5));
  Message push{.kind = Kind::kPush, .part = id};
  push.payload = payload(2);
  parts_.Add(id, push, /*first=*/true);
  parts_.Reset(id, payload(9));
  push.payload = payload(3);
  parts_.Add(id, push, /*first=*/false);
  std::exception_ptr error;
  ASSERT_TRUE(parts_.Update(id, {}, &error));
  ASSERT_EQ(error, nullptr);
  EXPECT_EQ(BytesOf(parts_.Read(id, {.kind = Kind::kPull, .part = id})), BytesOf(payload(5)));
}

// Also before the first one of a part, which therefore has had no variable of its own by then.
TEST_F(ArrayPartsTest, AnUpdateBehindAnOpOnTheStatesWaitsForIt) {
  const std::uint64_t version = std::uint64_t{1} << 32;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::string> ran;
  const auto note = [&](const std::string& what) {
    const std::lock_guard lock(mutex);
    ran.push_back(what);
    changed.notify_all();
  };
  const auto run = [&](const ServerUpdate& update) {
    if (ToString(update.key) == "'a'") {  // whatever need not wait for it runs meanwhile
      std::unique_lock lock(mutex);
      changed.wait_for(lock, std::chrono::milliseconds(300), [&] { return !ran.empty(); });
    }
    note(ToString(update.key));
  };
  parts_.SetOptimizer(0, version, Sgd({}), false, {.update = run});
  const Payload value = Received(std::vector<std::byte>(4));
  std::exception_ptr error;
  const auto update = [&](const PartId& id) {
    Message push{.kind = Kind::kPush, .part = id};
    push.payload = value;
    parts_.Add(id, push, /*first=*/true);
    EXPECT_FALSE(parts_.Update(id, {version, {}}, &error));
  };
  for (const char* const key : {"a", "b"}) {
    parts_.Create({0, 0, static_cast<std::uint64_t>(key[0])},
                  {Key(key), Shape{1}, DType::kFloat32, false, 1, 0, 1}, value);
  }
  update({0, 0, 'a'});
  engine_.Push({.name = "states", .writes = {parts_.states()}}, [&] { note("states"); });
  update({0, 0, 'b'});
  engine_.WaitForAll();
  EXPECT_EQ(ran, (std::vector<std::string>{"'a'", "states", "'b'"}));
}

TEST_F(ArrayPartsTest, ParametersThatChangeForEverTakeNoMemory) {
  constexpr std::uint64_t kFirst = std::uint64_t{1} << 32;
  constexpr std::uint64_t kLast = kFirst + ArrayParts::kParametersMax + 10;
  const PartId id{0, 0, 'w'};
  const float zero = 0, one = 1;
  const auto payload_of = [](const float& number) {
    const auto* const bytes = reinterpret_cast<const std::byte*>(&number);
    return Received({bytes, bytes + sizeof number});
  };
  parts_.Create(id, {Key("w"), Shape{1}, DType::kFloat32, false, 1, 0, 1}, payload_of(zero));
  for (std::uint64_t version = kFirst; version <= kLast; ++version) {
    const auto rescale = static_cast<double>(version - kFirst + 1);
    parts_.SetOptimizer(0, version, Sgd({.learning_rate = 1, .rescale_grad = rescale}),
                        /*keeps_states=*/version > kFirst);
  }
  // The scale of an update of that version.
  const auto scale = [&](std::uint64_t version) {
    Message push{.kind = Kind::kPush, .part = id};
    push.payload = payload_of(one);
    const auto value = [&] {
      float read = 0;
      std::memcpy(&read, BytesOf(parts_.Read(id, {.kind = Kind::kPull, .part = id})).data(),
                  sizeof read);
      return read;
    };
    const float before = value();
    Push(id, {&push, 1}, {version, {}});
    return before - value();
  };
  EXPECT_EQ(scale(kFirst), 1);
  EXPECT_EQ(scale(kFirst + 5), 12) << "of the first that is left";
  EXPECT_EQ(scale(kFirst + 11), 12);
  EXPECT_EQ(scale(kFirst + 12), 13);
  EXPECT_EQ(scale(kLast), kLast - kFirst + 1);
}

// So that which updates hold the receiving thread up follows from what they took.
TEST(UpdatePace, IsThatOfTheLastUpdates) {
  using std::chrono::microseconds;
  UpdatePace pace;
  EXPECT_FALSE(pace.Takes(1, microseconds(1'000'000)));  // none has been seen
  pace.Note(1000, microseconds(1));
  EXPECT_TRUE(pace.Takes(200'000, microseconds(200)));
  EXPECT_FALSE(pace.Takes(202'000, microseconds(200)));
  pace.Note(1000, microseconds(9));  // twice as slow on the whole
  EXPECT_TRUE(pace.Takes(99'000, microseconds(200)));
  EXPECT_FALSE(pace.Takes(101'000, microseconds(200)));
  for (int i = 0; i < 100; ++i) pace.Note(1000, microseconds(1));
  EXPECT_TRUE(pace.Takes(199'000, microseconds(200)));
}

TEST_F(ArrayPartsTest, RowSparsePartsHaveTheRowsOfALocalStore) {
  const std::uint64_t seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  constexpr std::int64_t kRows = 50;
  constexpr std::int64_t kWidth = 3;
  const Shape shape{kRows, kWidth};
  const auto random_rows = [&] {
    std::vector<std::int64_t> ids;
    std::vector<float> rows;
    for (std::int64_t id = 0; id < kRows; ++id) {
      if (random() % 4 != 0) continue;
      ids.push_back(id);
      for (int i = 0; i < kWidth; ++i) rows.push_back(static_cast<float>(random() % 1000) / 8);
    }
    return RowVectors<float>{std::move(ids), std::move(rows)};
  };
  const auto array_of = [&](const RowVectors<float>& rows) {
    return RowSparseNDArray::FromVectors<float>(rows.row_ids, rows.rows, shape, DType::kFloat32,
                                                Cpu(), engine_);
  };
  const auto bytes_of = [&](const RowVectors<float>& all, const Cut& cut) {
    std::vector<std::byte> ids;
    std::vector<std::byte> rows;
    const auto add = [](std::vector<std::byte>& to, const void* from, std::size_t bytes) {
      const auto* first = static_cast<const std::byte*>(from);
      to.insert(to.end(), first, first + bytes);
    };
    for (std::size_t i = 0; i < all.row_ids.size(); ++i) {
      if (all.row_ids[i] < cut.begin || all.row_ids[i] >= cut.end) continue;
      add(ids, &all.row_ids[i], 8);
      add(rows, &all.rows[i * kWidth], kWidth * 4);
    }
    ids.insert(ids.end(), rows.begin(), rows.end());
    return Received(std::move(ids));
  };
  const std::vector<Cut> cuts = {{0, 17}, {17, 34}, {34, 50}};
  // The noise of sgld goes by the places of elements in the whole array.
  const std::vector<OptimizerPtr> optimizers = {nullptr,
                                                Sgd({.learning_rate = 0.5, .momentum = 0.9}),
                                                MakeOptimizer("sgld", {{"learning_rate", 0.5}})};
  for (std::uint32_t store = 0; store < optimizers.size(); ++store) {
    const OptimizerPtr& optimizer = optimizers[store];
    SCOPED_TRACE(optimizer != nullptr ? optimizer->name() : "no optimizer");
    auto local = KVStore::Create("local", engine_);
    std::uint64_t version = 0;
    if (optimizer != nullptr) {
      local->SetOptimizer(optimizer);
      version = std::uint64_t{1} << 32;
      parts_.SetOptimizer(store, version, optimizer, false);
    }
    const RowVectors<float> start = random_rows();
    local->Init("a", array_of(start));
    for (std::uint32_t i = 0; i < cuts.size(); ++i) {
      parts_.Create({store, i, 1},
                    {Key("a"), shape, DType::kFloat32, true, 3, cuts[i].begin, cuts[i].end},
                    bytes_of(start, cuts[i]));
    }
    for (int round = 0; round < 5; ++round) {
      const std::vector<RowVectors<float>> gradients = {random_rows(), random_rows(),
                                                        random_rows()};
      std::vector<RowSparseNDArray> arrays;
      for (const auto& gradient : gradients) arrays.push_back(array_of(gradient));
      local->Push("a", arrays);
      RowSparseNDArray out(shape, DType::kFloat32, Cpu(), engine_);
      local->Pull("a", out, 0, /*ignore_sparse=*/false);
      const RowVectors<float> expected = out.ToVectors<float>();
      for (std::uint32_t i = 0; i < cuts.size(); ++i) {
        const PartId id{store, i, 1};
        std::vector<Message> pushes;
        for (const auto& gradient : gradients) {
          Message push{.kind = Kind::kPush, .flags = kFlagRowSparse, .part = id};
          push.payload = bytes_of(gradient, cuts[i]);
          pushes.push_back(std::move(push));
        }
        Push(id, pushes, {version, UpdateRates{0.5, 0}});
        EXPECT_EQ(BytesOf(parts_.Read(id, {.kind = Kind::kPull, .part = id})),
                  BytesOf(bytes_of(expected, cuts[i])));
        Message rows{.kind = Kind::kRowPull, .part = id};
        const std::int64_t wanted[] = {cuts[i].begin, cuts[i].end - 1};
        std::vector<std::byte> ids(sizeof(wanted));
        std::memcpy(ids.data(), wanted, sizeof(wanted));
        rows.payload = Received(ids);
        ASSERT_NO_THROW(parts_.Check(id, rows));
        const std::vector<std::byte> got = BytesOf(parts_.Read(id, rows));
        ASSERT_EQ(got.size(), 2 * (8 + kWidth * 4));
        const std::vector<float> dense = out.ToVector<float>();
        for (int k = 0; k < 2; ++k) {
          EXPECT_EQ(
              std::memcmp(got.data() + 16 + k * kWidth * 4, &dense[wanted[k] * kWidth], kWidth * 4),
              0);
        }
      }
    }
  }
}

// What docs/wire.md says that a part of a dense array is sent of row-sparse rows.
Payload WindowsOf(const RowVectors<float>& all, std::int64_t row_size, const Cut& cut, DType dtype,
                  Engine& engine) {
  std::vector<std::int64_t> ids;
  std::vector<float> windows;
  const std::int64_t width = std::min(row_size, cut.end - cut.begin);
  for (std::size_t i = 0; i < all.row_ids.size(); ++i) {
    const std::int64_t begin = all.row_ids[i] * row_size;
    if (begin >= cut.end || begin + row_size <= cut.begin) continue;
    ids.push_back(all.row_ids[i]);
    const std::int64_t from = std::min(std::max(begin, cut.begin), begin + row_size - width);
    const auto* const row = all.rows.data() + i * static_cast<std::size_t>(row_size);
    windows.insert(windows.end(), row + (from - begin), row + (from - begin) + width);
  }
  std::vector<std::byte> bytes(ids.size() * 8);
  if (ids.empty()) return Received(std::move(bytes));
  std::memcpy(bytes.data(), ids.data(), bytes.size());
  const auto count = static_cast<std::int64_t>(windows.size());
  const std::vector<std::byte> values =
      BytesOf(NDArray::FromVector(windows, {count}, dtype, Cpu(), engine));
  bytes.insert(bytes.end(), values.begin(), values.end());
  return Received(std::move(bytes));
}

// Row-sparse gradients of dense values, the parts of which begin and end within rows, and of which
// some lie within one row.
TEST_F(ArrayPartsTest, RowSparseGradientsOfDensePartsHaveTheBitsOfALocalStore) {
  const std::uint64_t seed = kvstore_test::TestSeed();
  std::mt19937_64 random(seed);
  const auto pick = [&](int count) { return static_cast<int>(random() % count); };
  using Parameters = std::vector<std::pair<std::string_view, double>>;
  const std::vector<std::pair<std::string, Parameters>> rules = {
      {"", {}},
      {"sgd", {{"learning_rate", 0.25}, {"momentum", 0.5}, {"lazy_update", 1}}},
      {"sgd", {{"learning_rate", 0.25}, {"momentum", 0.5}, {"lazy_update", 0}}},
      {"adam", {{"learning_rate", 0.25}, {"lazy_update", 1}}},
      {"adagrad", {{"learning_rate", 0.25}}},
      {"ftrl", {{"learning_rate", 0.25}}},
      {"sgld", {{"learning_rate", 0.25}}}};
  for (std::uint32_t store = 0; store < 80; ++store) {
    const DType dtype =
        std::vector{DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64}[pick(4)];
    const std::int64_t row_size = std::vector{1, 3, 64, 300, 5000, 20'000}[pick(6)];
    const std::int64_t rows = 1 + pick(static_cast<int>(40'000 / row_size) + 2);
    const Shape shape{rows, row_size};
    const auto& [name, given] = rules[static_cast<std::size_t>(pick(7))];
    Parameters parameters = given;
    if (!name.empty() && SizeOf(dtype) == 2 && pick(2) == 0) {
      parameters.emplace_back("multi_precision", 1);
    }
    SCOPED_TRACE(::testing::Message() << "store " << store << " " << Name(dtype) << " " << rows
                                      << " rows of " << row_size << " '" << name << "'");
    const auto random_rows = [&](int one_in) {
      RowVectors<float> all;
      for (std::int64_t id = 0; id < rows; ++id) {
        if (pick(one_in) != 0) continue;
        all.row_ids.push_back(id);
        for (std::int64_t i = 0; i < row_size; ++i) {
          all.rows.push_back(static_cast<float>(pick(2001) - 1000) / 7);
        }
      }
      return all;
    };
    auto local = KVStore::Create("local", engine_);
    UpdateBy by;
    if (!name.empty()) {
      const OptimizerPtr optimizer = MakeOptimizer(name, parameters);
      local->SetOptimizer(optimizer);
      by.version = std::uint64_t{1} << 32;
      if (pick(2) == 0) {  // else the optimizer's own, which are the same
        by.rates = UpdateRates{optimizer->Get("learning_rate"), optimizer->Get("weight_decay")};
      }
      parts_.SetOptimizer(store, by.version, MakeOptimizer(name, parameters), false);
    }
    const NDArray start = RandomArray(shape.size(), dtype, random, engine_);
    local->Init("a", start.Reshape(shape));
    std::vector<Cut> cuts;
    for (std::int64_t begin = 0; begin < shape.size();) {
      const std::int64_t end = std::min(shape.size(), begin + 4096 * (1 + pick(4)));
      cuts.push_back({begin, end});
      begin = end;
    }
    for (std::uint32_t i = 0; i < cuts.size(); ++i) {
      parts_.Create({store, i, 1},
                    {Key("a"), shape, dtype, false, static_cast<std::uint32_t>(cuts.size()),
                     cuts[i].begin, cuts[i].end},
                    Received(BytesOf(start.Slice(cuts[i].begin, cuts[i].end))));
    }
    std::vector<Payload> kept;  // what is being sent is never written
    for (int round = 0; round < 4; ++round) {
      std::vector<RowVectors<float>> gradients;
      std::vector<RowSparseNDArray> arrays;
      for (int worker = 0, workers = 1 + pick(4); worker < workers; ++worker) {
        gradients.push_back(random_rows(std::vector{2, 5, 50, 1'000'000}[pick(4)]));
        arrays.push_back(RowSparseNDArray::FromVectors<float>(
            gradients.back().row_ids, gradients.back().rows, shape, dtype, Cpu(), engine_));
      }
      local->Push("a", arrays);
      NDArray out(shape, dtype, Cpu(), engine_);
      local->Pull("a", out);
      const std::vector<std::byte> expected = BytesOf(out);
      for (std::uint32_t i = 0; i < cuts.size(); ++i) {
        const PartId id{store, i, 1};
        std::vector<Message> pushes;
        for (const RowVectors<float>& gradient : gradients) {
          Message push{.kind = Kind::kPush, .flags = kFlagRowSparse, .dtype = dtype, .part = id};
          push.payload = WindowsOf(gradient, row_size, cuts[i], dtype, engine_);
          pushes.push_back(std::move(push));
        }
        Push(id, pushes, by);
        kept.push_back(parts_.Read(id, {.kind = Kind::kPull, .dtype = dtype, .part = id}));
        const std::vector<std::byte> now = BytesOf(kept.back());
        const std::size_t at = static_cast<std::size_t>(cuts[i].begin) * SizeOf(dtype);
        ASSERT_EQ(std::memcmp(now.data(), expected.data() + at, now.size()), 0)
            << "round " << round << " part " << i;
      }
    }
  }
}

// Workers whose gradients are of different kinds: the sum is that of the dense arrays.
TEST_F(ArrayPartsTest, SumsOfBothKindsAreThoseOfDenseArrays) {
  const Shape shape{100, 50};
  const Cut cut{0, shape.size()};
  std::mt19937_64 random(kvstore_test::TestSeed());
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const PartId id{0, static_cast<std::uint32_t>(dtype), 1};
    const NDArray zeros = NDArray::Zeros(shape, dtype, Cpu(), engine_);
    parts_.Create(id, {Key("a"), shape, dtype, false, 1, 0, shape.size()},
                  Received(BytesOf(zeros)));
    for (int round = 0; round < 20; ++round) {
      std::vector<NDArray> summed;
      std::vector<Message> pushes;
      for (int worker = 0; worker < 4; ++worker) {
        Message push{.kind = Kind::kPush, .dtype = dtype, .part = id};
        if (random() % 2 == 0) {
          summed.push_back(RandomArray(shape.size(), dtype, random, engine_));
          push.payload = Received(BytesOf(summed.back()));
        } else {
          RowVectors<float> all{{3, 4, 99}, {}};
          all.row_ids[0] = static_cast<std::int64_t>(random() % 4);
          for (int i = 0; i < 150; ++i) all.rows.push_back(static_cast<float>(random() % 99) / 7);
          const auto rows = RowSparseNDArray::FromVectors<float>(all.row_ids, all.rows, shape,
                                                                 dtype, Cpu(), engine_);
          summed.push_back(NDArray(shape, dtype, Cpu(), engine_));
          rows.CopyTo(summed.back());
          push.flags = kFlagRowSparse;
          push.payload = WindowsOf(all, 50, cut, dtype, engine_);
          summed.back() = summed.back().Reshape({shape.size()});
        }
        pushes.push_back(std::move(push));
      }
      Push(id, pushes, {});
      NDArray sum({shape.size()}, dtype, Cpu(), engine_);
      Sum(std::span<const NDArray>(summed), sum);
      EXPECT_EQ(BytesOf(parts_.Read(id, {.kind = Kind::kPull, .dtype = dtype, .part = id})),
                BytesOf(sum));
    }
  }
  Message codes{.kind = Kind::kPush, .flags = kFlagCompressed, .part = {0, 0, 1}};
  Message rows{.kind = Kind::kPush, .flags = kFlagRowSparse, .part = {0, 0, 1}};
  parts_.SetCompression(0, MakeCompressor({.type = "2bit", .threshold = 0.5}));
  parts_.Add(rows.part, rows, /*first=*/true);
  EXPECT_THROW(parts_.Add(codes.part, codes, /*first=*/false), InvalidArgument);
}

TEST_F(ArrayPartsTest, CodesAreSummedAsALocalStoreDoes) {
  const CompressionOptions options{.type = "2bit", .threshold = 0.5};
  const auto compressor = MakeCompressor(options);
  constexpr std::int64_t kCount = 5000;
  auto local = KVStore::Create("local", engine_);
  local->SetGradientCompression(options);
  parts_.SetCompression(0, compressor);
  const NDArray zeros = NDArray::Zeros({kCount}, DType::kFloat32, Cpu(), engine_);
  local->Init("a", zeros);
  const PartId id{0, 0, 1};
  parts_.Create(id, {Key("a"), Shape{kCount}, DType::kFloat32, false, 1, 0, kCount},
                Received(BytesOf(zeros)));
  std::mt19937_64 random(1);
  std::vector<std::vector<float>> residuals(2, std::vector<float>(kCount));
  for (int round = 0; round < 4; ++round) {
    const std::vector<NDArray> gradients = {RandomArray(kCount, DType::kFloat32, random, engine_),
                                            RandomArray(kCount, DType::kFloat32, random, engine_)};
    local->Push("a", gradients);
    NDArray out({kCount}, DType::kFloat32, Cpu(), engine_);
    local->Pull("a", out);
    std::vector<Message> pushes;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      std::vector<std::byte> code(static_cast<std::size_t>(compressor->CodeBytes(kCount)));
      compressor->Compress(DType::kFloat32, gradients[i].const_data(), residuals[i].data(),
                           code.data(), kCount);
      Message push{.kind = Kind::kPush, .flags = kFlagCompressed, .part = id};
      push.payload = Received(std::move(code));
      pushes.push_back(std::move(push));
    }
    Push(id, pushes, {});
    EXPECT_EQ(BytesOf(parts_.Read(id, {.kind = Kind::kPull, .part = id})), BytesOf(out));
  }
}

// What Check has taken may be held for a while.
TEST_F(ArrayPartsTest, CodesOfAnotherLengthAreNotRead) {
  const PartId id{0, 0, 1};
  parts_.Create(id, {Key("w"), Shape{64}, DType::kFloat32, false, 1, 0, 64},
                Received(std::vector<std::byte>(256)));
  parts_.SetCompression(0, MakeCompressor({.type = "1bit", .threshold = 0.5}));
  Message push{.kind = Kind::kPush, .flags = kFlagCompressed, .part = id};
  push.payload = Received(std::vector<std::byte>(8));
  EXPECT_NO_THROW(parts_.Check(id, push));
  parts_.SetCompression(0, MakeCompressor({.type = "2bit", .threshold = 0.5}));
  EXPECT_EQ(MessageOf([&] { parts_.Add(id, push, /*first=*/true); }),
            "key 'w', part 0 of 1: expected 16 bytes of codes, got 8");
}

TEST_F(ArrayPartsTest, CodesOfACompressionThatIsDroppedAreNotRead) {
  const PartId id{0, 0, 1};
  parts_.Create(id, {Key("w"), Shape{64}, DType::kFloat32, false, 1, 0, 64},
                Received(std::vector<std::byte>(256)));
  parts_.SetCompression(0, MakeCompressor({.type = "1bit", .threshold = 0.5}));
  Message push{.kind = Kind::kPush, .flags = kFlagCompressed, .part = id};
  push.payload = Received(std::vector<std::byte>(8));
  EXPECT_NO_THROW(parts_.Check(id, push));
  parts_.SetCompression(0, nullptr);
  const std::string refusal =
      "key 'w', part 0 of 1: got codes, expected none before compression is set";
  EXPECT_EQ(MessageOf([&] { parts_.Check(id, push); }), refusal);
  EXPECT_EQ(MessageOf([&] { parts_.Add(id, push, /*first=*/true); }), refusal);
}

// A worker that does not keep to the protocol may say any.
TEST_F(ArrayPartsTest, AVersionOfNoOptimizerIsThatOfTheDefaultUpdater) {
  const PartId id{0, 0, 1};
  const auto floats = [&](float value) {
    return Received(BytesOf(NDArray::Full({3}, value, DType::kFloat32, Cpu(), engine_)));
  };
  parts_.Create(id, {Key("w"), Shape{3}, DType::kFloat32, false, 1, 0, 3}, floats(0));
  EXPECT_FALSE(parts_.UpdatesWhole(id, 1));
  PassResult result;
  EXPECT_EQ(MessageOf<InvalidState>([&] {
              parts_.RunPass({&id, 1}, {.version = 1}, 0, {}, &result);
            }),
            "key 'w': the optimizer of its update has been taken back");
  const Message push{.kind = Kind::kPush, .part = id, .payload = floats(7)};
  Push(id, {&push, 1}, {.version = 1});
  EXPECT_EQ(BytesOf(parts_.Read(id, {.kind = Kind::kPull, .part = id})), BytesOf(floats(7)));
}

TEST_F(ArrayPartsTest, StatesOfAnOptimizerThatIsDroppedAreNotThoseOfTheNextOne) {
  const std::uint64_t version = std::uint64_t{1} << 32;
  const PartId id{0, 0, 1};
  const auto floats = [&](float value) {
    return Received(BytesOf(NDArray::Full({3}, value, DType::kFloat32, Cpu(), engine_)));
  };
  const auto pushed = [&] {
    const Message push{.kind = Kind::kPush, .part = id, .payload = floats(1)};
    Push(id, {&push, 1}, {.version = version, .rates = UpdateRates{.learning_rate = 1}});
    return BytesOf(parts_.Read(id, {.kind = Kind::kPull, .part = id}));
  };
  const auto saved = [&] { return parts_.SaveStates(0, std::nullopt).first.parts.size(); };
  parts_.Create(id, {Key("w"), Shape{3}, DType::kFloat32, false, 1, 0, 3}, floats(0));
  parts_.SetOptimizer(0, version, Sgd({.momentum = 0.5}), false);
  EXPECT_EQ(pushed(), BytesOf(floats(-1)));
  EXPECT_EQ(saved(), 1U);
  parts_.DropOptimizer(0, version);
  EXPECT_EQ(saved(), 0U);
  EXPECT_EQ(pushed(), BytesOf(floats(1))) << "the default updater's";
  parts_.SetOptimizer(0, version, Sgd({.momentum = 0.25}), false);
  EXPECT_EQ(saved(), 0U);
  EXPECT_EQ(pushed(), BytesOf(floats(0)));
}

// By the name alone, since the optimizer is the server's own: when a life begins beside another,
// and when the last one ends.
TEST_F(ArrayPartsTest, WhatAnOptimizerKeepsOfAKeyIsForgottenByItsLives) {
  int forgotten = 0;
  parts_.SetOptimizer(0, std::uint64_t{1} << 32, MakeForeignOptimizer("own", {}), false,
                      {.update = [](const ServerUpdate&) {},
                       .forget =
                           [&](KeyRef key) {
                             EXPECT_EQ(key.text(), "w");
                             ++forgotten;
                           }});
  const auto forgotten_now = [&] {
    engine_.WaitForAll();
    return std::exchange(forgotten, 0);
  };
  const auto create = [&](std::uint32_t part, std::uint64_t life, const char* name = "w") {
    const std::int64_t begin = 2 * part;
    parts_.Create({0, part, life},
                  {Key(name), Shape{4}, DType::kFloat32, false, 2, begin, begin + 2},
                  Received(std::vector<std::byte>(8)));
  };
  create(0, 1);
  create(1, 1);
  create(0, 5, "x");
  EXPECT_EQ(forgotten_now(), 0);
  create(0, 2);
  create(1, 2);
  EXPECT_EQ(forgotten_now(), 2) << "for each part";
  parts_.Remove({0, 0, 1});
  parts_.Remove({0, 1, 1});
  EXPECT_EQ(forgotten_now(), 0);
  parts_.Remove({0, 0, 2});
  EXPECT_EQ(forgotten_now(), 1);
  create(0, 3);
  EXPECT_EQ(forgotten_now(), 1) << "beside the part that is left";
  parts_.Remove({0, 1, 2});
  EXPECT_EQ(forgotten_now(), 0);
  parts_.Remove({0, 0, 3});
  EXPECT_EQ(forgotten_now(), 1);
}

// Whether an optimizer of the server's own has to forget a key is known without a look at the
// others.
TEST_F(ArrayPartsTest, AKeyCostsAsMuchHoweverManyThereAre) {
  parts_.SetOptimizer(0, std::uint64_t{1} << 32, MakeForeignOptimizer("own", {}), false,
                      {.update = [](const ServerUpdate&) {}, .forget = [](KeyRef) {}});
  constexpr std::uint64_t kKeys = 20'000, kTimed = 2000;
  const auto create = [&](std::uint64_t first) {
    const auto start = std::chrono::steady_clock::now();
    for (std::uint64_t key = first; key < first + kTimed; ++key) {
      parts_.Create(
          {0, 0, key},
          {Key(static_cast<std::int64_t>(key)), Shape{1}, DType::kFloat32, false, 1, 0, 1},
          Received(std::vector<std::byte>(4)));
    }
    return std::chrono::steady_clock::now() - start;
  };
  const auto first = create(0);
  std::uint64_t key = kTimed;
  for (; key + 3 * kTimed < kKeys; key += kTimed) create(key);
  // The machine may pause in one of them.
  const auto last = std::min({create(key), create(key + kTimed), create(key + 2 * kTimed)});
  EXPECT_LT(last, 8 * first + std::chrono::milliseconds(50));
}

TEST_F(ArrayPartsTest, StatesThatDoNotFitAreRefusedAndChangeNothing) {
  const std::uint64_t version = std::uint64_t{1} << 32;
  parts_.SetOptimizer(0, version, Sgd({.momentum = 0.5}), false);
  parts_.SetOptimizer(1, version, Sgd({.momentum = 0.5, .multi_precision = true}), false);
  parts_.SetOptimizer(2, version, MakeOptimizer("groupadagrad", {}), false);
  const auto create = [&](std::uint32_t store, std::uint32_t part, const PartInfo& info) {
    const auto elements = static_cast<std::size_t>(info.row_sparse ? 0 : info.end - info.begin);
    parts_.Create({store, part, 1}, info,
                  Received(std::vector<std::byte>(elements * SizeOf(info.dtype))));
  };
  const PartInfo dense{Key("w"), Shape{3, 2}, DType::kFloat32, false, 1, 0, 6};
  const PartInfo cut{Key("w"), Shape{10'000}, DType::kFloat32, false, 3, 8192, 10'000};
  const PartInfo rows{Key("w"), Shape{9, 2}, DType::kFloat32, true, 2, 4, 9};
  const PartInfo half{Key("w"), Shape{6}, DType::kBFloat16, false, 1, 0, 6};
  create(0, 0, dense);
  create(0, 1, cut);
  create(0, 2, rows);
  create(1, 0, half);
  create(1, 1, dense);
  create(2, 0, dense);
  create(2, 2, rows);
  // "": taken.
  const auto load = [&](std::uint32_t store, std::uint32_t part, const PartInfo& info,
                        const PartStates::Array& array, std::int64_t sent = -1) -> std::string {
    StatesBody states;
    PartStates& state = states.parts.emplace_back();
    state.part = {store, part, 1};
    state.info = info;
    state.numbers.resize(internal::kUpdateNumbersMax);
    state.arrays = {array};
    const auto count = static_cast<std::size_t>(sent < 0 ? array.elements : sent);
    try {
      parts_.LoadStates(store, states,
                        Received(std::vector<std::byte>(count * SizeOf(array.dtype))));
    } catch (const InvalidArgument& refused) {
      return refused.what();
    }
    return "";
  };
  constexpr DType kFloat = DType::kFloat32;
  const std::string begin = "loading the optimizer's states: key 'w', part 0 of 1: array ";
  EXPECT_EQ(load(0, 0, dense, {"0", kFloat, 1'000'000}),
            begin + "'0': expected 6 elements of float32, got 1000000 of float32");
  EXPECT_EQ(load(0, 0, dense, {"0", kFloat, 5}),
            begin + "'0': expected 6 elements of float32, got 5 of float32");
  EXPECT_EQ(load(0, 0, dense, {"0", DType::kFloat64, 6}),
            begin + "'0': expected 6 elements of float32, got 6 of float64");
  for (const char* const name : {"1", "9", "/", ":", "", "00", "master"}) {
    EXPECT_EQ(load(0, 0, dense, {name, kFloat, 6}),
              begin + "'" + name + "': expected a number below 1");
  }
  EXPECT_EQ(load(0, 0, dense, {"0", kFloat, 6}, /*sent=*/5),
            "loading the optimizer's states: arrays are missing");
  EXPECT_EQ(load(1, 0, half, {"master", DType::kBFloat16, 6}),
            begin + "'master': expected 6 elements of float32, got 6 of bfloat16");
  EXPECT_EQ(load(1, 0, half, {"0", DType::kBFloat16, 6}),
            begin + "'0': expected 6 elements of float32, got 6 of bfloat16");
  EXPECT_EQ(load(1, 0, half, {"1", kFloat, 6}),
            begin + "'1': expected 'master' or a number below 1");
  EXPECT_EQ(load(1, 1, dense, {"master", kFloat, 6}),
            "loading the optimizer's states: key 'w', part 1 of 1: array 'master': expected a "
            "number below 1");
  EXPECT_EQ(load(2, 0, dense, {"0", kFloat, 6}),
            begin + "'0': expected 3 elements of float32, got 6 of float32");
  for (const std::uint32_t store : {0u, 1u, 2u}) {
    EXPECT_TRUE(parts_.SaveStates(store, std::nullopt).first.parts.empty()) << store;
  }
  EXPECT_EQ(load(0, 0, dense, {"0", kFloat, 6}), "");
  EXPECT_EQ(load(0, 1, cut, {"0", kFloat, 10'000 - 8192}), "");
  EXPECT_EQ(load(0, 2, rows, {"0", kFloat, 5 * 2}), "");
  EXPECT_EQ(load(1, 0, half, {"master", kFloat, 6}), "");
  EXPECT_EQ(load(1, 0, half, {"0", kFloat, 6}), "");
  EXPECT_EQ(load(2, 0, dense, {"0", kFloat, 3}), "");
  EXPECT_EQ(load(2, 2, rows, {"0", kFloat, 5}), "");
}

TEST_F(ArrayPartsTest, WhatDoesNotFitIsRefusedByName) {
  const PartId id{0, 0, 1};
  parts_.Create(id, {Key("w"), Shape{4}, DType::kFloat32, false, 1, 0, 4},
                Received(std::vector<std::byte>(16)));
  const auto message_of = [&](Message message) -> std::string {
    try {
      parts_.Check(id, message);
    } catch (const InvalidArgument& invalid) {
      return invalid.what();
    }
    return "";
  };
  Message push{.kind = Kind::kPush, .part = id};
  push.payload = Received(std::vector<std::byte>(12));
  EXPECT_EQ(message_of(push), "key 'w', part 0 of 1: expected 16 bytes, got 12");
  push.payload = Received(std::vector<std::byte>(16));
  EXPECT_EQ(message_of(push), "");
  push.dtype = DType::kFloat16;
  EXPECT_EQ(message_of(push), "key 'w', part 0 of 1: expected dtype float32, got float16");
  push.flags = kFlagRowSparse;
  EXPECT_EQ(message_of(push), "key 'w', part 0 of 1: expected a multiple of 12 bytes, got 16");
  const auto rows = [](const std::vector<std::int64_t>& ids) {
    std::vector<std::byte> bytes(ids.size() * 12);
    std::memcpy(bytes.data(), ids.data(), ids.size() * 8);
    return Received(std::move(bytes));
  };
  push.dtype = DType::kFloat32;
  push.payload = rows({0, 4});
  EXPECT_EQ(message_of(push), "key 'w', part 0 of 1: expected row ids in [0, 4), got 0 to 4");
  push.payload = rows({2, 2});
  EXPECT_EQ(message_of(push), "key 'w', part 0 of 1: expected row ids that are sorted and unique");
  push.payload = rows({0, 3});
  EXPECT_EQ(message_of(push), "");
  push.kind = Kind::kReset;
  EXPECT_EQ(message_of(push),
            "key 'w', part 0 of 1: expected a dense array, as the value is, got a row-sparse one");
  push.kind = Kind::kPush;
  push.payload = Received(std::vector<std::byte>(16));
  push.flags = kFlagCompressed;
  push.dtype = DType::kFloat32;
  EXPECT_EQ(message_of(push),
            "key 'w', part 0 of 1: got codes, expected none before compression is set");
  push.kind = Kind::kReset;
  EXPECT_EQ(message_of(push), "key 'w', part 0 of 1: expected elements, got codes");
}

TEST_F(ArrayPartsTest, AFirstValueThatDoesNotFitIsRefused) {
  const auto create = [&](bool row_sparse, std::vector<std::byte> value) {
    return MessageOf([&] {
      parts_.Create({0, 0, 1}, {Key("w"), Shape{4}, DType::kFloat32, row_sparse, 1, 0, 4},
                    Received(std::move(value)));
    });
  };
  EXPECT_EQ(create(false, {}), "key 'w', part 0 of 1: expected 16 bytes, got 0");
  EXPECT_EQ(create(false, std::vector<std::byte>(12)),
            "key 'w', part 0 of 1: expected 16 bytes, got 12");
  EXPECT_EQ(create(true, std::vector<std::byte>(13)),
            "key 'w', part 0 of 1: expected a multiple of 12 bytes, got 13");
  EXPECT_EQ(create(true, std::vector<std::byte>(24)),
            "key 'w', part 0 of 1: expected row ids that are sorted and unique");
  parts_.Create({0, 0, 1}, {Key("w"), Shape{4}, DType::kFloat32, false, 1, 0, 4},
                Received(std::vector<std::byte>(16)));
}

// A row and its id would have no bytes, modulo 2^64.
TEST_F(ArrayPartsTest, AnArrayWhoseBytesCannotBeCountedIsRefused) {
  const auto create = [&](const Shape& shape, DType dtype, bool row_sparse) {
    return MessageOf([&] {
      parts_.Create({0, 0, 1}, {Key("w"), shape, dtype, row_sparse, 1, 0, 1}, Payload());
    });
  };
  EXPECT_EQ(create({1, (std::int64_t{1} << 61) - 1}, DType::kFloat64, true),
            "key 'w': expected at most 2^63 - 1 bytes of an array, and of a row and its id, got "
            "float64 of shape (1, 2305843009213693951)");
  EXPECT_EQ(create({1, (std::int64_t{1} << 62) - 2}, DType::kFloat32, true),
            "key 'w': expected at most 2^63 - 1 bytes of an array, and of a row and its id, got "
            "float32 of shape (1, 4611686018427387902)");
  EXPECT_EQ(create({std::int64_t{1} << 61}, DType::kFloat64, false),
            "key 'w': expected at most 2^63 - 1 bytes of an array, and of a row and its id, got "
            "float64 of shape (2305843009213693952,)");
}

TEST_F(ArrayPartsTest, PartsThatLieElsewhereOrContradictOthersAreRefused) {
  const PlacementOptions placement{.num_servers = 2, .cut_bytes = 1000, .slice_bytes = 1 << 14};
  parts_.SetPlacement(placement, /*self=*/1);
  const Key key("w");
  const std::uint64_t id = KeyId(KeyRef(key));
  const Shape shape{20'000};
  const std::vector<PlacedPart> placed = PlaceKey(id, shape, DType::kFloat32, false, placement);
  const auto num_parts = static_cast<std::uint32_t>(placed.size());
  std::vector<PlacedPart> here;
  std::vector<PlacedPart> elsewhere;
  for (const PlacedPart& part : placed) (part.server == 1 ? here : elsewhere).push_back(part);
  ASSERT_GT(here.size(), 1u);
  const auto create = [&](std::uint32_t part, const Shape& whole, std::uint32_t parts,
                          std::int64_t begin, std::int64_t end) -> std::string {
    try {
      parts_.Create({0, part, id}, {key, whole, DType::kFloat32, false, parts, begin, end},
                    Received(std::vector<std::byte>(static_cast<std::size_t>(end - begin) * 4)));
    } catch (const InvalidArgument& refused) {
      return refused.what();
    }
    return "";
  };
  const PlacedPart& away = elsewhere[0];
  EXPECT_TRUE(create(away.part, shape, num_parts, away.begin, away.end)
                  .starts_with("key 'w': expected a part of server 1, got part "));
  EXPECT_TRUE(create(num_parts, shape, num_parts, here[0].begin, here[0].end)
                  .starts_with("key 'w': expected a part of server 1"));
  EXPECT_TRUE(create(here[0].part, shape, num_parts, here[0].begin, here[0].end - 4)
                  .starts_with("key 'w': expected a part of server 1"));
  EXPECT_TRUE(create(here[0].part, shape, num_parts + 1, here[0].begin, here[0].end)
                  .starts_with("key 'w': expected an array that is cut as the job's are"));
  EXPECT_EQ(create(here[0].part, shape, num_parts, here[0].begin, here[0].end), "");
  const std::string other = "key 'w': expected a part of the array that the others are of";
  const std::int64_t far = std::int64_t{1} << 39;
  EXPECT_TRUE(
      create(here[1].part, {std::int64_t{1} << 40}, num_parts, far, far + 4096).starts_with(other));
  EXPECT_TRUE(create(here[1].part, shape, 1, 0, 20'000).starts_with(other));
  EXPECT_EQ(create(here[1].part, shape, num_parts, here[1].begin, here[1].end), "");
  // Once they are gone the key may be another array, that is not cut.
  for (std::size_t i = 0; i < 2; ++i) parts_.Remove({0, here[i].part, id});
  const bool is_first = id % 2 == 1;  // that is where such an array lies
  EXPECT_EQ(create(0, {5}, 1, 0, 5) == "", is_first);
  EXPECT_EQ(create(here[0].part, shape, num_parts, here[0].begin, here[0].end) == "", !is_first);
}

TEST(ArrayPasses, SumsOfAServerThatHasNoPartsAreRefused) {
  Engine engine(EngineOptions::FromEnvironment());
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<PassResult> ended;
  ArrayParts parts(engine, /*updated=*/nullptr, [&](const PartId&, PassResult result) {
    const std::lock_guard lock(mutex);
    ended = std::move(result);
    changed.notify_all();
  });
  const PlacementOptions placement{.num_servers = 3, .cut_bytes = 1000, .slice_bytes = 1 << 20};
  const std::uint64_t key = KeyId(KeyRef("a"));
  const Shape shape{8192};
  const auto placed = PlaceKey(key, shape, DType::kFloat32, false, placement);
  ASSERT_EQ(placed.size(), 2u);
  parts.SetPlacement(placement, placed[0].server);
  const PartId id{0, 0, key};
  const Payload value = Received(std::vector<std::byte>(4096 * 4));
  parts.Create(id, {Key("a"), shape, DType::kFloat32, false, 2, 0, 4096}, value);
  const std::uint64_t version = std::uint64_t{1} << 32;
  parts.SetOptimizer(0, version, MakeOptimizer("lamb", {}), false);
  Message push{.kind = Kind::kPush, .part = id};
  push.payload = value;
  parts.Add(id, push, true);
  const auto pass = [&](int number, OthersSums sums) -> std::string {
    PassResult result;
    EXPECT_FALSE(parts.RunPass({&id, 1}, {version, {}}, number, std::move(sums), &result));
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return ended.has_value(); });
    result = std::move(*ended);
    ended.reset();
    return result.error ? MessageOf<NetworkError>([&] { std::rethrow_exception(result.error); })
                        : "";
  };
  EXPECT_EQ(pass(0, {}), "");
  const std::int32_t none = 3 - placed[0].server - placed[1].server;
  EXPECT_EQ(pass(1, {{none, Received(std::vector<std::byte>(3 * 8))}}),
            "key 'a': expected 0 bytes of sums from server " + std::to_string(none) + ", got 24");
}

}  // namespace
}  // namespace heddle::kvstore::dist
