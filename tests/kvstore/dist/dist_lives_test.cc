// Goal: what a key is stays one thing, while threads and workers initialise, find, remove and save
// it at the same time: never something of two lives of its name, or of two shapes.
// Method: messages are held back on their way out of a role until the other call has done its part.
#include <heddle/error.h>
#include <heddle/kvstore.h>

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <latch>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "kvstore/dist/transport/transport.h"
#include "tests/kvstore/dist/forwarding_transport.h"
#include "tests/kvstore/dist/job.h"
#include "tools/testing/temp_folder.h"

namespace heddle::kvstore::dist {
namespace {

constexpr std::int64_t kLarge = 50'000;  // cut over two servers
constexpr std::int64_t kLarger = 100'000;

// Messages of all roles of a job that are not to arrive yet.
class HeldBack {
 public:
  // Holds the next one that is `wanted`.
  void HoldNext(std::function<bool(NodeId to, const Message&)> wanted) {
    const std::lock_guard lock(mutex_);
    wanted_ = std::move(wanted);
  }
  // As soon as one like this is sent, what is held follows it.
  void ReleaseBehind(std::function<bool(NodeId to, const Message&)> wanted) {
    const std::lock_guard lock(mutex_);
    releases_ = std::move(wanted);
  }
  void WaitUntilHeld() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return held_ != nullptr; });
  }
  void Release() {
    std::function<void()> send;
    {
      const std::lock_guard lock(mutex_);
      wanted_ = nullptr;
      releases_ = nullptr;
      send = std::exchange(held_, nullptr);
    }
    if (send) send();
  }
  std::unique_ptr<Transport> Wrap(std::unique_ptr<Transport> transport) {
    return std::make_unique<Holding>(std::move(transport), *this);
  }

 private:
  class Holding final : public ForwardingTransport {
   public:
    Holding(std::unique_ptr<Transport> transport, HeldBack& held)
        : ForwardingTransport(std::move(transport)), held_(held) {}
    SendId Send(NodeId to, Message message, std::function<void()> sent) override {
      if (held_.Takes(transport(), to, message)) {
        if (sent) sent();
        return 0;
      }
      const bool releases = held_.IsReleasedBy(to, message);
      const SendId id = transport().Send(to, std::move(message), std::move(sent));
      if (releases) held_.Release();
      return id;
    }

   private:
    HeldBack& held_;
  };

  bool Takes(Transport& transport, NodeId to, Message& message) {
    const std::lock_guard lock(mutex_);
    if (!wanted_ || !wanted_(to, message)) return false;
    wanted_ = nullptr;
    held_ = [&transport, to, held = std::make_shared<Message>(std::move(message))] {
      transport.Send(to, std::move(*held));
      transport.Flush();
    };
    changed_.notify_all();
    return true;
  }
  bool IsReleasedBy(NodeId to, const Message& message) {
    const std::lock_guard lock(mutex_);
    return held_ && releases_ && releases_(to, message);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<bool(NodeId to, const Message&)> wanted_;
  std::function<bool(NodeId to, const Message&)> releases_;
  std::function<void()> held_;
};

class DistLivesTest : public ::testing::Test {
 protected:
  JobOptions Options(int num_workers) {
    return {.network = Network::kTcp,
            .num_workers = num_workers,
            .num_servers = 2,
            .op_deadline = std::chrono::seconds(20),  // of what would hang
            .wrap = [this](std::unique_ptr<Transport> transport) {
              return held.Wrap(std::move(transport));
            }};
  }
  static NDArray Filled(Engine& engine, std::int64_t count, double value) {
    return NDArray::Full({count}, value, DType::kFloat32, Cpu(), engine);
  }
  static void ExpectValue(KVStore& store, Engine& engine, std::int64_t count, float value) {
    const NDArray out = Filled(engine, count, -1);
    store.Pull("k", out);
    EXPECT_EQ(out.ToVector<float>(), std::vector<float>(static_cast<std::size_t>(count), value));
  }
  // The answer to a look-up of a key: a value without a payload.
  static bool IsDescription(NodeId, const Message& message) {
    return message.kind == Kind::kValue && message.payload.empty() && !message.meta.empty();
  }

  HeldBack held;
};

// The look-up used to bring the old life's shape back as that of the next one, which nobody had
// initialised.
TEST_F(DistLivesTest, AKeyThatIsRemovedWhileAnotherThreadLooksItUpStaysRemoved) {
  Job job(Options(2));
  job.RunWorkers("dist_async", [&](int rank, KVStore& store, Engine& engine) {
    if (rank == 0) store.Init("k", Filled(engine, kLarge, 1));
    store.Barrier();
    if (rank == 1) {
      held.HoldNext(IsDescription);
      std::thread other([&] {
        const NDArray out = Filled(engine, kLarge, 0);
        EXPECT_THROW(store.Pull("k", out), UnknownKey);
      });
      held.WaitUntilHeld();
      store.Remove("k");
      held.Release();
      other.join();
      EXPECT_FALSE(store.Contains("k"));
    } else {
      store.Remove("k");
    }
    store.Barrier();
    store.Init("k", Filled(engine, kLarger, 7));
    ExpectValue(store, engine, kLarger, 7);
  });
}

TEST_F(DistLivesTest, AKeyThatIsRemovedBeforeItsInitHasReturnedStaysRemoved) {
  Job job(Options(1));
  job.RunWorkers("dist_sync", [&](int, KVStore& store, Engine& engine) {
    held.HoldNext([](NodeId to, const Message& message) {
      return to.role == Role::kWorker && message.kind == Kind::kDone &&
             message.part.part != kControlPart;
    });
    std::thread other([&] { store.Init("k", Filled(engine, 10, 1)); });
    held.WaitUntilHeld();
    store.Remove("k");
    held.Release();
    other.join();
    EXPECT_FALSE(store.Contains("k"));
    store.Init("k", Filled(engine, kLarge, 7));
    ExpectValue(store, engine, kLarge, 7);
  });
}

// Of different sizes their parts would lie on different servers.
TEST_F(DistLivesTest, OfTwoThreadsThatInitialiseAKeyOneIsTold) {
  Job job(Options(1));
  job.RunWorkers("dist_sync", [&](int, KVStore& store, Engine& engine) {
    held.HoldNext([](NodeId to, const Message& message) {
      return to.role == Role::kWorker && message.kind == Kind::kDone &&
             message.part.part != kControlPart;
    });
    std::thread other([&] { store.Init("k", Filled(engine, kLarge, 1)); });
    held.WaitUntilHeld();
    EXPECT_THROW(store.Init("k", Filled(engine, kLarger, 2)), InvalidArgument);
    held.Release();
    other.join();
    ExpectValue(store, engine, kLarge, 1);
  });
}

// It used to wait for parts that only its own shape has, and then to abort for parts elsewhere.
TEST_F(DistLivesTest, AShapeThatDiffersIsAnErrorHoweverItIsCut) {
  Job job(Options(2));
  job.RunWorkers("dist_sync", [&](int rank, KVStore& store, Engine& engine) {
    if (rank == 0) {
      store.Init("k", Filled(engine, kLarge, 1));
    } else {
      for (const std::int64_t count : {kLarger, std::int64_t{10}, kLarge - 1}) {
        EXPECT_THROW(store.Init("k", Filled(engine, count, 2)), InvalidArgument) << count;
      }
      store.Init("k", Filled(engine, kLarge, 2));
    }
    ExpectValue(store, engine, kLarge, 1);
    store.Push("k", Filled(engine, kLarge, 3));
    ExpectValue(store, engine, kLarge, 6);
  });
}

// One server has its parts of the key, the other one has not.
TEST_F(DistLivesTest, TheFirstUseOfAKeyWaitsForAllItsParts) {
  std::optional<std::int32_t> first_server;
  held.HoldNext([&](NodeId to, const Message& message) {
    if (message.kind != Kind::kInit || message.rank != 0) return false;
    if (!first_server) first_server = to.rank;  // part 0
    return to.rank != *first_server;
  });
  held.ReleaseBehind([&](NodeId to, const Message& message) {
    return message.rank == 1 && to.role == Role::kServer && to.rank != *first_server &&
           (message.kind == Kind::kInit || message.kind == Kind::kPush);
  });
  Job job(Options(2));
  job.RunWorkers("dist_sync", [&](int rank, KVStore& store, Engine& engine) {
    if (rank == 0) {
      store.Init("k", Filled(engine, kLarge, 1));
    } else {
      held.WaitUntilHeld();
      while (!store.Contains("k")) std::this_thread::yield();  // its first server has it
    }
    store.Push("k", Filled(engine, kLarge, 3));
    ExpectValue(store, engine, kLarge, 6);
    engine.WaitForAll();
  });
}

// Worker 0 has begun a second life of the key, worker 1 is still in the first one: each saves and
// loads the states of its own.
TEST_F(DistLivesTest, SavedStatesAreOfOneLifeOfAKey) {
  for (const std::int64_t second : {std::int64_t{10}, kLarger}) {
    const tools::TempFolder folder;
    const std::string files[] = {folder / "0.safetensors", folder / "1.safetensors"};
    Job job(Options(2));
    job.RunWorkers("dist_async", [&](int rank, KVStore& store, Engine& engine) {
      store.SetOptimizer(MakeOptimizer("sgd", {{"learning_rate", 1}, {"momentum", 0.5}}));
      store.Init("k", Filled(engine, kLarge, 0));
      store.Barrier();
      std::int64_t count = kLarge;
      if (rank == 0) {
        store.Push("k", Filled(engine, kLarge, 100));  // momentum -100
        ExpectValue(store, engine, kLarge, -100);
        store.Remove("k");
        count = second;
        store.Init("k", Filled(engine, count, -100));
      }
      store.Barrier();
      const auto push = [&] { store.Push("k", Filled(engine, count, 0)); };
      if (rank == 0) {
        store.Push("k", Filled(engine, count, 8));  // momentum -8
        ExpectValue(store, engine, count, -108);
      }
      store.Barrier();
      store.SaveOptimizerStates(files[rank], /*with_optimizer=*/false);
      push();
      const float momentum = rank == 0 ? -8 : -100;
      const float saved = rank == 0 ? -108 : -100;
      ExpectValue(store, engine, count, saved + momentum / 2);
      store.LoadOptimizerStates(files[rank]);
      push();
      ExpectValue(store, engine, count, saved + momentum);
      store.Barrier();
    });
  }
}

}  // namespace
}  // namespace heddle::kvstore::dist
