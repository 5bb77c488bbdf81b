// Children of fork(): stores and optimizers refuse them before they take a lock, which may be held
// for ever there.
#include <heddle/error.h>
#include <heddle/kvstore.h>
#include <heddle/optimizer.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/kvstore/support.h"
#include "tests/sanitized.h"

namespace heddle::kvstore_test {
namespace {

constexpr int kForks = 40;
constexpr unsigned kHungSeconds = 20;

TEST(StoresInForkedChild, AreRefusedThoughTheParentIsAtWork) {
  if (kSanitized) GTEST_SKIP() << "a lock of the sanitizer's allocator may be held for ever too";
  Engine engine;
  const NDArray value = NDArray::Ones({2}, DType::kFloat32, Cpu(), engine);
  const auto store = KVStore::Create("local", engine);
  const std::shared_ptr<Optimizer> sgd = MakeOptimizer("sgd");
  store->SetOptimizer(sgd);
  store->Init("w", value);
  std::atomic<bool> over = false;
  std::thread busy([&] {
    const std::string name = "of no literal";
    while (!over) {
      if (!store->Contains("w") || sgd->Get("momentum") != 0) ADD_FAILURE();
      KVStore::Types();
      engine.Push({.name = name}, [] {});
    }
  });
  for (int i = 0; i < kForks; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(kHungSeconds);
      int failed = 0;
      const auto try_out = [&](auto&& call) {
        ++failed;
        try {
          call();
        } catch (const InvalidState&) {
          --failed;
        }
      };
      try_out([&] { store->Init("v", value); });
      try_out([&] { store->Push("w", value); });
      try_out([&] { store->Pull("w", value); });
      try_out([&] { store->Reset("w", value); });
      try_out([&] { store->Remove("w"); });
      try_out([&] { static_cast<void>(store->Contains("w")); });
      try_out([&] { store->Keys(); });
      try_out([&] { store->SetOptimizer(sgd); });
      try_out([&] { store->SetUpdater([](KeyRef, const NDArray&, const NDArray&) {}); });
      try_out([&] { KVStore::Create("local", engine); });
      try_out([&] { KVStore::Types(); });
      try_out([&] { sgd->Set("learning_rate", 1); });
      try_out([&] { sgd->Get("learning_rate"); });
      try_out([&] { engine.Push({.name = std::string("of a string")}, [] {}); });
      _exit(failed);
    }
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << "child " << i;
  }
  over = true;
  busy.join();
  store->Push("w", value);  // the parent works on
  store->Pull("w", value);
  value.WaitToRead();
}

}  // namespace
}  // namespace heddle::kvstore_test
