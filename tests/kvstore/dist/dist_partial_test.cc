// Goal: what has reached some servers of a key's parts and not the others, because the deadline
// passed, is said, and can be made whole.
// Method: on its way out of the worker one message is kept back until its request has timed out.
// Then the network has not taken it at all, or it arrives after all.
#include <heddle/error.h>
#include <heddle/kvstore.h>
#include <heddle/row_sparse.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <latch>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvstore/dist/transport/transport.h"
#include "tests/kvstore/dist/forwarding_transport.h"
#include "tests/kvstore/dist/job.h"
#include "tests/kvstore/support.h"
#include "tests/message_of.h"

namespace heddle::kvstore::dist {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::int64_t kCount = 50'000;  // in 13 parts, on two servers

class KeptMessage {
 public:
  // The next request of that kind to that server.
  void Keep(Kind kind, std::int32_t server) {
    const std::lock_guard lock(mutex_);
    kind_ = kind;
    server_ = server;
  }
  // It arrives now, unless it was given up.
  void Release() {
    std::function<void()> send;
    {
      const std::lock_guard lock(mutex_);
      send = std::exchange(kept_, nullptr);
    }
    if (send) send();
  }
  // Whether the network has taken it, so that it cannot be given up any more.
  bool is_taken = false;

  std::unique_ptr<Transport> Wrap(std::unique_ptr<Transport> transport) {
    return std::make_unique<Keeping>(std::move(transport), *this);
  }

 private:
  static constexpr Transport::SendId kKept = ~Transport::SendId{0};

  class Keeping final : public ForwardingTransport {
   public:
    Keeping(std::unique_ptr<Transport> transport, KeptMessage& kept)
        : ForwardingTransport(std::move(transport)), kept_(kept) {}
    SendId Send(NodeId to, Message message, std::function<void()> sent) override {
      if (!kept_.Takes(transport(), to, message)) {
        return transport().Send(to, std::move(message), std::move(sent));
      }
      if (kept_.is_taken && sent) sent();
      return kKept;
    }
    Revoked Revoke(NodeId to, SendId id) override {
      return id == kKept ? kept_.GiveUp() : transport().Revoke(to, id);
    }

   private:
    KeptMessage& kept_;
  };

  bool Takes(Transport& transport, NodeId to, Message& message) {
    const std::lock_guard lock(mutex_);
    if (to.role != Role::kServer || to.rank != server_ || message.kind != kind_) return false;
    server_ = -1;
    kept_ = [&transport, to, held = std::make_shared<Message>(std::move(message))] {
      transport.Send(to, std::move(*held));
      transport.Flush();
    };
    return true;
  }
  Revoked GiveUp() {
    const std::lock_guard lock(mutex_);
    if (is_taken) return Revoked::kSent;
    kept_ = nullptr;
    return Revoked::kDropped;
  }

  std::mutex mutex_;
  Kind kind_{};
  std::int32_t server_ = -1;
  std::function<void()> kept_;
};

class DistPartialTest : public ::testing::TestWithParam<bool> {
 protected:
  DistPartialTest() { kept_.is_taken = GetParam(); }

  void RunJob(int workers, const std::function<void(int, KVStore&, Engine&)>& body) {
    Job job({.network = Network::kTcp,
             .num_workers = workers,
             .num_servers = 2,
             .op_deadline = std::chrono::seconds(6),
             .wrap = [this](auto transport) { return kept_.Wrap(std::move(transport)); }});
    job.RunWorkers("dist_sync", body);
  }
  static NDArray Filled(Engine& engine, double value) {
    return NDArray::Full({kCount}, value, DType::kFloat32, Cpu(), engine);
  }
  static std::vector<float> Pulled(KVStore& store, Engine& engine) {
    const NDArray out = Filled(engine, -1);
    store.Pull("k", out);
    return out.ToVector<float>();
  }
  static std::vector<float> All(float value) {
    return std::vector<float>(static_cast<std::size_t>(kCount), value);
  }
  // The errors of ops that nothing else reports.
  static void Forget(Engine& engine) {
    for (bool more = true; more;) {
      more = false;
      try {
        engine.WaitForAll();
      } catch (const Error&) {
        more = true;
      }
    }
  }

  KeptMessage kept_;
};
INSTANTIATE_TEST_SUITE_P(All, DistPartialTest, ::testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "ArrivesLate" : "IsGivenUp");
});

TEST_P(DistPartialTest, AResetOfSomePartsSaysSoAndTheNextOneIsWhole) {
  RunJob(1, [&](int, KVStore& store, Engine& engine) {
    store.Init("k", Filled(engine, 1));
    kept_.Keep(Kind::kReset, 1);
    EXPECT_THAT(MessageOf<TimeoutError>([&] { store.Reset("k", Filled(engine, 2)); }),
                AllOf(HasSubstr("reset key 'k'"), HasSubstr("server 1"),
                      HasSubstr("12 of 13 parts are reset"), HasSubstr("until a Reset succeeds")));
    kept_.Release();
    store.Reset("k", Filled(engine, 3));
    EXPECT_EQ(Pulled(store, engine), All(3));
    store.Push("k", Filled(engine, 4));
    EXPECT_EQ(Pulled(store, engine), All(4));
    Forget(engine);
  });
}

// Nothing of it is set, and no codes of it would be taken.
TEST_P(DistPartialTest, ACompressionThatSomeServersHaveMakesRoomForAnother) {
  RunJob(1, [&](int, KVStore& store, Engine& engine) {
    kept_.Keep(Kind::kSetCompression, 1);
    EXPECT_THAT(MessageOf<TimeoutError>(
                    [&] { store.SetGradientCompression({.type = "1bit", .threshold = 0}); }),
                AllOf(HasSubstr("set_gradient_compression"), HasSubstr("server 1")));
    kept_.Release();
    store.SetGradientCompression({.type = "2bit", .threshold = 0.5});
    store.Init("k", Filled(engine, 0));
    store.Push("k", Filled(engine, 0.75));
    EXPECT_EQ(Pulled(store, engine), All(0.5));
  });
}

// Whoever waits for all parts sees no value of which some are of the first Init and some of the
// second.
TEST_P(DistPartialTest, AnInitOfSomePartsSaysSoAndTheNextOneIsWhole) {
  std::latch again{2};
  RunJob(2, [&](int rank, KVStore& store, Engine& engine) {
    if (rank == 0) {
      kept_.Keep(Kind::kInit, 1);
      EXPECT_THAT(
          MessageOf<TimeoutError>([&] { store.Init("k", Filled(engine, 1)); }),
          AllOf(HasSubstr("init key 'k'"), HasSubstr("server 1"),
                HasSubstr("12 of 13 parts have the value"), HasSubstr("until an Init succeeds")));
      kept_.Release();
      EXPECT_FALSE(store.Contains("k"));
      EXPECT_TRUE(store.Keys().empty());
      const auto expect_unfinished = [](const std::function<void()>& call) {
        EXPECT_THAT(MessageOf<InvalidState>(call),
                    AllOf(HasSubstr("key 'k'"), HasSubstr("Init has failed")));
      };
      expect_unfinished([&] { store.Push("k", Filled(engine, 1)); });
      expect_unfinished([&] { store.Reset("k", Filled(engine, 1)); });
      expect_unfinished([&] { store.Remove("k"); });
      const auto ones = [&](std::int64_t count, DType dtype) {
        return NDArray::Full({count}, 1, dtype, Cpu(), engine);
      };
      const auto expect_unlike = [](const std::function<void()>& call, const char* expected) {
        EXPECT_THAT(MessageOf(call), AllOf(HasSubstr("Init: key 'k'"), HasSubstr(expected)));
      };
      expect_unlike([&] { store.Init("k", ones(2 * kCount, DType::kFloat32)); }, "expected shape");
      expect_unlike([&] { store.Init("k", ones(kCount, DType::kFloat64)); }, "got float64");
      expect_unlike(
          [&] { store.Init("k", RowSparseNDArray::FromDense(ones(kCount, DType::kFloat32))); },
          "got a row-sparse one");
    }
    const auto init = [&] { store.Init("k", Filled(engine, 2 + rank)); };
    // What arrives late completes the first Init, and other ranks may see that.
    const bool comes_first = GetParam() && rank == 0;
    if (comes_first) init();
    again.arrive_and_wait();
    if (!comes_first) init();
    EXPECT_EQ(Pulled(store, engine), All(2));
    EXPECT_TRUE(store.Contains("k"));
    EXPECT_THROW(store.Init("k", Filled(engine, 5)), InvalidArgument);
    store.Push("k", Filled(engine, 1));
    EXPECT_EQ(Pulled(store, engine), All(2));
    Forget(engine);
  });
}

TEST_P(DistPartialTest, AnInitOfRowsIsMadeWhole) {
  RunJob(1, [&](int, KVStore& store, Engine& engine) {
    const auto rows = [&](float value) {
      const NDArray dense = NDArray::Full({1000, 50}, value, DType::kFloat32, Cpu(), engine);
      return RowSparseNDArray::FromDense(dense);
    };
    kept_.Keep(Kind::kInit, 1);
    EXPECT_THAT(MessageOf<TimeoutError>([&] { store.Init("k", rows(1)); }),
                HasSubstr("1 of 2 parts have the value"));
    kept_.Release();
    store.Init("k", rows(2));
    const RowSparseNDArray out({1000, 50}, DType::kFloat32, Cpu(), engine);
    store.Pull("k", out, 0, /*ignore_sparse=*/false);
    EXPECT_EQ(out.ToDense().ToVector<float>(), All(2));
    Forget(engine);
  });
}

// Of each part two pushes go, and the third waits for the other worker, who waits for this one.
TEST(DistPartialPushes, OfAWorkerThatHasLeftFailTheirRound) {
  Job job({.network = Network::kTcp,
           .num_workers = 2,
           .num_servers = 2,
           .op_deadline = std::chrono::seconds(8)});
  const auto work = [&](int rank, const std::function<void(KVStore&, const NDArray&)>& body) {
    const std::shared_ptr<WorkerNode> node = job.Join(rank);
    {
      Engine engine(EngineOptions::FromEnvironment());
      const NDArray ones = NDArray::Full({kCount}, 1, DType::kFloat32, Cpu(), engine);
      const auto store = Job::NewStore(node, engine, "dist_sync");
      store->Init("k", ones);
      body(*store, ones);
    }
    node->Close();
  };
  std::future<void> first = std::async(std::launch::async, [&] {
    work(0, [](KVStore& store, const NDArray& ones) {
      for (int round = 0; round < 3; ++round) store.Push("k", ones);
    });
  });
  work(1, [&](KVStore& store, const NDArray& ones) {
    first.wait();
    const auto round = [&] {
      store.Push("k", ones);
      const NDArray out({kCount}, DType::kFloat32, Cpu(), ones.engine());
      store.Pull("k", out);
      return out.ToVector<float>();
    };
    EXPECT_EQ(round(), std::vector<float>(kCount, 2));
    EXPECT_EQ(round(), std::vector<float>(kCount, 2));
    EXPECT_THAT(MessageOf<OpError>(round),
                AllOf(HasSubstr("round 3"), HasSubstr("worker 0"), HasSubstr("has left the job")));
    EXPECT_EQ(round(), std::vector<float>(kCount, 1));
  });
  EXPECT_NO_THROW(first.get());
}

}  // namespace
}  // namespace heddle::kvstore::dist
