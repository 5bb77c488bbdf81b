// What C++ code throws under the C API, and handle tables.
#include <heddle/c_api.h>
#include <heddle/error.h>
#include <heddle/kvstore.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "c_api/handle_table.h"
#include "tests/sanitized.h"

namespace heddle::c_api {
namespace {

std::function<void()> next_throw;

// A type of store whose Barrier throws what a test asks for.
class ThrowingStore final : public KVStore {
 public:
  explicit ThrowingStore(Engine& engine) : KVStore(engine) {}
  void Barrier() override { next_throw(); }
};

class StatusTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    KVStore::Register("throwing", [](Engine& engine, const KVStoreOptions&) {
      return std::make_unique<ThrowingStore>(engine);
    });
  }
  void SetUp() override { ASSERT_EQ(HeddleKVStoreCreate("Throwing", nullptr, &store_), HEDDLE_OK); }
  void TearDown() override { ASSERT_EQ(HeddleKVStoreFree(store_), HEDDLE_OK); }

  template <class E>
  void ExpectStatus(HeddleStatus status, const E& error, const std::string& message) {
    next_throw = [&error] { throw error; };
    EXPECT_EQ(HeddleKVStoreBarrier(store_), status) << message;
    EXPECT_EQ(HeddleLastError(), status);
    EXPECT_EQ(HeddleLastErrorMessage(), message);
  }

  HeddleKVStore store_ = nullptr;
};

TEST_F(StatusTest, EveryTypeOfErrorHasAStatusOfItsOwn) {
  ExpectStatus(HEDDLE_INVALID_ARGUMENT, InvalidArgument("a"), "a");
  ExpectStatus(HEDDLE_INVALID_STATE, InvalidState("b"), "b");
  ExpectStatus(HEDDLE_ACCESS_ERROR, AccessError("c"), "c");
  ExpectStatus(HEDDLE_TIMEOUT, TimeoutError("d"), "d");
  ExpectStatus(HEDDLE_OUT_OF_MEMORY, OutOfMemory("e"), "e");
  ExpectStatus(HEDDLE_IO_ERROR, IoError("f"), "f");
  ExpectStatus(HEDDLE_OP_ERROR, OpError("g"), "g");
  ExpectStatus(HEDDLE_NETWORK_ERROR, NetworkError("h"), "h");
  ExpectStatus(HEDDLE_UNKNOWN_KEY, UnknownKey("i"), "i");
  ExpectStatus(HEDDLE_CUDA_ERROR, CudaError("j", 2), "j");
  ExpectStatus(HEDDLE_NCCL_ERROR, NcclError("k", 3), "k");
  ExpectStatus(HEDDLE_ERROR, Error("l"), "l");
}

TEST_F(StatusTest, NothingElseLeavesAsAnExceptionEither) {
  ExpectStatus(HEDDLE_ERROR, std::logic_error("theirs"), "theirs");
  ExpectStatus(HEDDLE_OUT_OF_MEMORY, std::bad_alloc(), "out of memory");
  ExpectStatus(HEDDLE_ERROR, 7, "an exception that is no std::exception");
  next_throw = [] {};
  EXPECT_EQ(HeddleKVStoreBarrier(store_), HEDDLE_OK);
}

// Another thread may have held the lock of the handles as the process was forked.
TEST(CallsInForkedChild, AreRefusedThoughTheParentIsAtWork) {
  if (kSanitized) GTEST_SKIP() << "a lock of the sanitizer's allocator may be held for ever too";
  const std::int64_t shape[] = {4};
  HeddleArray array = nullptr;
  ASSERT_EQ(HeddleArrayCreate(1, shape, HEDDLE_FLOAT32, HEDDLE_CPU, 0, &array), HEDDLE_OK);
  std::atomic<bool> over = false;
  std::thread busy([&] {
    std::int64_t size = 0;
    while (!over) HeddleArrayGetSize(array, &size);
  });
  for (int i = 0; i < 40; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      const bool refused = HeddleArrayWaitToRead(array, 100) == HEDDLE_INVALID_STATE &&
                           HeddleArrayFree(array) == HEDDLE_INVALID_STATE;
      _exit(refused ? 0 : 1);
    }
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << "child " << i;
  }
  over = true;
  busy.join();
  EXPECT_EQ(HeddleArrayFree(array), HEDDLE_OK);
}

// Goal: a handle finds its object until it is taken, and never again; whatever the order.
// Method: random insertions, lookups and removals, with a map as the oracle.
TEST(HandleTable, AgreesWithAMap) {
  const std::uint64_t seed = std::random_device()();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  HandleTable<std::string> table(3);
  std::unordered_map<std::uint64_t, std::string> live;
  std::vector<std::uint64_t> all;
  for (int i = 0; i < 20000; ++i) {
    if (all.empty() || random() % 3 == 0) {
      const std::uint64_t handle = table.Insert(std::to_string(i));
      ASSERT_NE(handle, 0u);
      ASSERT_TRUE(live.emplace(handle, std::to_string(i)).second) << "given out twice";
      all.push_back(handle);
      continue;
    }
    // Mostly handles that were given out, live or not; else any number.
    const std::uint64_t handle = random() % 10 != 0 ? all[random() % all.size()] : random();
    const bool take = random() % 2 == 0;
    const std::optional<std::string> found = take ? table.Take(handle) : table.Find(handle);
    const auto expected = live.find(handle);
    ASSERT_EQ(found.has_value(), expected != live.end());
    if (!found) continue;
    ASSERT_EQ(*found, expected->second);
    if (take) live.erase(expected);
  }
}

TEST(HandleTable, TakeDropsTheTablesHoldOfTheObject) {
  HandleTable<std::shared_ptr<int>> table(1);
  auto object = std::make_shared<int>(5);
  const std::uint64_t handle = table.Insert(object);
  EXPECT_EQ(object.use_count(), 2);
  EXPECT_EQ(table.Find(handle), object);
  table.Take(handle);
  EXPECT_EQ(object.use_count(), 1);
}

TEST(HandleTable, TablesTellTheirHandlesApart) {
  HandleTable<int> one(1), two(2);
  const std::uint64_t handle = one.Insert(5);
  two.Insert(6);
  EXPECT_TRUE(one.HasTag(handle));
  EXPECT_FALSE(two.HasTag(handle));
  EXPECT_EQ(two.Find(handle), std::nullopt);
  EXPECT_EQ(two.Take(handle), std::nullopt);
  EXPECT_EQ(one.Take(handle), 5);
}

}  // namespace
}  // namespace heddle::c_api
