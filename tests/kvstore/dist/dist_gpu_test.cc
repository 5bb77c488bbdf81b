// Arrays on GPUs in a job: their parts are copied, sent and received at the same time
// (kvstore/dist/ worker/staged_parts.h). Nothing here looks at a clock: a simulated device or a
// server holds one part back, and the test sees how far the others get meanwhile.
#include <heddle/error.h>
#include <heddle/memory.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvstore/dist/protocol/placement.h"
#include "kvstore/dist/worker/staged_parts.h"
#include "storage/gpus.h"
#include "tests/engine/sim_gpu.h"
#include "tests/kvstore/dist/forwarding_transport.h"
#include "tests/kvstore/dist/job.h"

namespace heddle::kvstore::dist {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::chrono::seconds kSoon{60};
constexpr std::int64_t kParts = 5;
constexpr std::int64_t kCount = kParts * kPartAlignment;  // float32, on one server

// Holds up whoever comes, until it is opened.
class Gate {
 public:
  ~Gate() { Open(); }
  void Pass() {
    std::unique_lock lock(mutex_);
    reached_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_; });
  }
  bool WaitUntilReached() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kSoon, [&] { return reached_; });
  }
  void Open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  bool open_ = false;
};

// What has happened, by name.
class Log {
 public:
  void Add(const std::string& event) {
    const std::lock_guard lock(mutex_);
    ++events_[event];
    changed_.notify_all();
  }
  int CountOf(const std::string& event) {
    const std::lock_guard lock(mutex_);
    return events_[event];
  }
  bool WaitFor(const std::string& event, int count = 1) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kSoon, [&] { return events_[event] >= count; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, int> events_;
};

// A GPU that says what it copies between its memory and the pinned one, and is held up before.
class CopyingGpu final : public engine_test::SimGpu {
 public:
  CopyingGpu() : SimGpu(2, kvstore_test::TestSeed()) { set_turns_max(1); }

  // Of the copies in one direction the how many-th, from 0. Runs on the device; what it throws
  // fails that.
  std::function<void(int number)> before_out, before_in;
  // The how many-th copy out is not even issued.
  int fails_to_issue = -1;
  Log copied;  // "out", "in"

  void* AllocatePinned(int near, std::int64_t bytes) override {
    void* const block = SimGpu::AllocatePinned(near, bytes);
    const std::lock_guard lock(mutex_);
    pinned_[static_cast<const std::byte*>(block)] = bytes;
    return block;
  }
  void FreePinned(int near, void* block) noexcept override {
    {
      const std::lock_guard lock(mutex_);
      pinned_.erase(static_cast<const std::byte*>(block));
    }
    SimGpu::FreePinned(near, block);
  }
  void Copy(Stream stream, void* to, const void* from, std::int64_t bytes) override {
    const bool out = IsPinned(to);
    if (!out && !IsPinned(from)) return SimGpu::Copy(stream, to, from, bytes);
    const int number = (out ? outs_ : ins_).fetch_add(1);
    if (out && number == fails_to_issue) throw CudaError("cudaErrorInvalidValue", 1);
    const GpuStream on{current(), stream};
    if (const auto& before = out ? before_out : before_in) {
      Launch(on, [before, number] { before(number); });
    }
    SimGpu::Copy(stream, to, from, bytes);
    Launch(on, [this, out] { copied.Add(out ? "out" : "in"); });
  }

 private:
  bool IsPinned(const void* address) {
    const std::lock_guard lock(mutex_);
    const auto* const byte = static_cast<const std::byte*>(address);
    auto after = pinned_.upper_bound(byte);
    if (after == pinned_.begin()) return false;
    --after;
    return byte < after->first + after->second;
  }

  std::mutex mutex_;
  std::map<const std::byte*, std::int64_t> pinned_;
  std::atomic<int> outs_{0}, ins_{0};
};

// What the servers of a job say, and what they are kept from saying.
class ServerWords {
 public:
  Log acknowledged, answered;  // parts, by number

  // Values of this part are kept until Release.
  void Keep(std::uint32_t part) {
    const std::lock_guard lock(mutex_);
    kept_part_ = part;
  }
  void Release() {
    std::vector<std::function<void()>> kept;
    {
      const std::lock_guard lock(mutex_);
      kept_part_ = kNone;
      kept = std::exchange(kept_, {});
    }
    for (const auto& send : kept) send();
  }

  std::unique_ptr<Transport> Wrap(std::unique_ptr<Transport> transport) {
    return std::make_unique<Ear>(std::move(transport), *this);
  }

 private:
  static constexpr std::uint32_t kNone = ~0u;

  class Ear final : public ForwardingTransport {
   public:
    Ear(std::unique_ptr<Transport> transport, ServerWords& words)
        : ForwardingTransport(std::move(transport)), words_(words) {}
    SendId Send(NodeId to, Message message, std::function<void()> sent) override {
      if (message.kind == Kind::kAcks) {
        AcksBody body;
        EXPECT_TRUE(Decode(message.meta, &body));
        for (const AcksBody::Ack& ack : body.acks) {
          words_.acknowledged.Add(std::to_string(ack.part.part));
        }
      }
      if (message.kind == Kind::kValue) {
        words_.answered.Add(std::to_string(message.part.part));
        const std::lock_guard lock(words_.mutex_);
        if (message.part.part == words_.kept_part_) {
          words_.kept_.push_back(
              [this, to, message, sent] { transport().Send(to, message, sent); });
          return 0;
        }
      }
      return transport().Send(to, std::move(message), std::move(sent));
    }

   private:
    ServerWords& words_;
  };

  std::mutex mutex_;
  std::uint32_t kept_part_ = kNone;
  std::vector<std::function<void()>> kept_;
};

struct StagedCase {
  const char* type;
  Network network;
};

class StagedPartsTest : public ::testing::TestWithParam<StagedCase> {
 protected:
  JobOptions Options(int workers = 1) {
    return {.network = GetParam().network,
            .num_workers = workers,
            .wrap = [this](auto transport) { return words_.Wrap(std::move(transport)); },
            .engine =
                [] {
                  EngineOptions options = EngineOptions::FromEnvironment();
                  options.gpu_driver = std::make_shared<CopyingGpu>();
                  options.num_workers = 2;
                  options.check_access = true;
                  return options;
                }};
  }
  void RunJob(const JobOptions& options,
              const std::function<void(int, KVStore&, Engine&, CopyingGpu&)>& body) {
    Job job(options);
    job.RunWorkers(GetParam().type, [&](int rank, KVStore& store, Engine& engine) {
      body(rank, store, engine, dynamic_cast<CopyingGpu&>(*engine.options().gpu_driver));
    });
  }
  bool IsSync() const { return std::string(GetParam().type).find("async") == std::string::npos; }

  static NDArray Full(Engine& engine, float value, Device device = Gpu(0)) {
    return NDArray::Full({kCount}, value, DType::kFloat32, device, engine);
  }
  static std::vector<float> All(float value) {
    return std::vector<float>(static_cast<std::size_t>(kCount), value);
  }
  static NDArray Failing(Engine& engine, const std::string& why) {
    NDArray array = Full(engine, 0);
    engine.Push({.name = "backward", .writes = {array.var()}},
                [why] { throw std::runtime_error(why); });
    return array;
  }
  static std::string ErrorOf(const NDArray& out) {
    try {
      out.WaitToRead(kSoon);
    } catch (const std::exception& error) {
      return error.what();
    }
    return "none";
  }
  // All pinned memory there is but some bytes, until the cap is another one.
  static NDArray TakePinned(Engine& engine) {
    storage::Gpus& gpus = storage::Gpus::Of(engine);
    engine.WaitForAll();
    gpus.Trim(DeviceType::kCpuPinned);
    gpus.Configure(DeviceType::kCpuPinned, {.bytes_max = 4 * kCount + 1000});
    const NDArray array = Full(engine, 0, CpuPinned(0));
    engine.WaitForAll();
    return array;
  }
  // The errors of ops that nothing else reports.
  static void Forget(Engine& engine) {
    for (int i = 0; i < 100; ++i) {
      try {
        engine.WaitForAll();
        return;
      } catch (const std::exception&) {
      }
    }
  }

  ServerWords words_;
};

std::string NameOfCase(const ::testing::TestParamInfo<StagedCase>& info) {
  const Network network = info.param.network;
  return std::string(info.param.type) + (network == Network::kSim   ? "_sim"
                                         : network == Network::kTcp ? "_tcp"
                                                                    : "_shm");
}
INSTANTIATE_TEST_SUITE_P(All, StagedPartsTest,
                         ::testing::Values(StagedCase{"dist_sync", Network::kSim},
                                           StagedCase{"dist_device_sync", Network::kTcp},
                                           StagedCase{"dist_async", Network::kTcp},
                                           StagedCase{"dist_device_async", Network::kSim},
                                           StagedCase{"dist_device_sync", Network::kSharedMemory}),
                         NameOfCase);

// ---- Overlap

TEST_P(StagedPartsTest, APartIsSentWhileTheNextIsCopiedOut) {
  RunJob(Options(), [&](int, KVStore& store, Engine& engine, CopyingGpu& gpu) {
    store.Init("w", Full(engine, 0, Cpu()));
    const NDArray gradient = Full(engine, 3);
    engine.WaitForAll();
    Gate second;
    gpu.before_out = [&](int number) {
      if (number == 1) second.Pass();
    };
    store.Push("w", gradient);
    EXPECT_TRUE(words_.acknowledged.WaitFor("0")) << "the server has not got the first part";
    EXPECT_EQ(gpu.copied.CountOf("out"), 1);
    EXPECT_EQ(words_.acknowledged.CountOf("1"), 0);
    second.Open();
    const NDArray out = Full(engine, -1);
    store.Pull("w", out);
    EXPECT_EQ(out.ToVector<float>(), All(3));
    EXPECT_EQ(gpu.copied.CountOf("out"), kParts + 1);  // and that of ToVector
  });
}

TEST_P(StagedPartsTest, APartIsCopiedInWhileTheNextIsReceived) {
  RunJob(Options(), [&](int, KVStore& store, Engine& engine, CopyingGpu& gpu) {
    store.Init("w", Full(engine, 4, Cpu()));
    const NDArray out = Full(engine, -1);
    engine.WaitForAll();
    words_.Keep(1);
    store.Pull("w", out);
    EXPECT_TRUE(gpu.copied.WaitFor("in")) << "the first part is not copied";
    EXPECT_TRUE(words_.answered.WaitFor("1"));
    EXPECT_EQ(gpu.copied.CountOf("in"), 1);
    EXPECT_THROW(out.WaitToRead(std::chrono::milliseconds(0)), TimeoutError);
    words_.Release();
    EXPECT_EQ(out.ToVector<float>(), All(4));
    EXPECT_EQ(gpu.copied.CountOf("in"), kParts);
  });
}

// The first part has gone through all four stages before the second one has ended the first.
TEST_P(StagedPartsTest, PushPullIsInAllStagesAtOnce) {
  RunJob(Options(), [&](int, KVStore& store, Engine& engine, CopyingGpu& gpu) {
    store.Init("w", Full(engine, 0, Cpu()));
    const NDArray gradient = Full(engine, 5);
    const NDArray out = Full(engine, -1);
    engine.WaitForAll();
    Gate second;
    gpu.before_out = [&](int number) {
      if (number == 1) second.Pass();
    };
    store.PushPull("w", gradient, out);
    EXPECT_TRUE(gpu.copied.WaitFor("in"));
    EXPECT_EQ(gpu.copied.CountOf("out"), 1);
    second.Open();
    EXPECT_EQ(out.ToVector<float>(), All(5));
    const TransferStats before = store.transfers();
    store.PushPull("w", gradient);  // over itself
    EXPECT_EQ(gradient.ToVector<float>(), All(5));
    EXPECT_EQ(store.transfers().pushed_bytes - before.pushed_bytes, 4 * kCount);
    EXPECT_EQ(store.transfers().pulled_bytes - before.pulled_bytes, 4 * kCount);
  });
}

// The pull of a key follows its push part by part, too.
TEST_P(StagedPartsTest, APullDoesNotWaitForAllOfThePushBeforeIt) {
  RunJob(Options(), [&](int, KVStore& store, Engine& engine, CopyingGpu& gpu) {
    store.Init("w", Full(engine, 0, Cpu()));
    const NDArray gradient = Full(engine, 6);
    const std::vector<NDArray> out = {Full(engine, -1), Full(engine, -1, Gpu(1)),
                                      Full(engine, -1, Cpu()),
                                      NDArray::Full({kCount}, -1, DType::kInt32, Gpu(1), engine)};
    engine.WaitForAll();
    Gate second;
    gpu.before_out = [&](int number) {
      if (number == 1) second.Pass();
    };
    store.Push("w", gradient);
    store.Pull("w", out);
    EXPECT_TRUE(gpu.copied.WaitFor("in", 2)) << "the first part, on both GPUs";
    EXPECT_EQ(gpu.copied.CountOf("out"), 1);
    second.Open();
    for (const NDArray& array : out) EXPECT_EQ(array.ToVector<float>(), All(6));
  });
}

// A copy that the device has not begun delays none of another key of higher priority, and the
// pushed array may be overwritten as soon as it is copied, whatever the servers do.
TEST_P(StagedPartsTest, AnUrgentKeyOvertakesAndTheArrayIsFreeOnceItIsCopied) {
  RunJob(Options(), [&](int, KVStore& store, Engine& engine, CopyingGpu& gpu) {
    store.Init({"large", "small"}, {Full(engine, 0, Cpu()), Full(engine, 0, Cpu())});
    const NDArray gradient = Full(engine, 7);
    engine.WaitForAll();
    Gate second;
    gpu.before_out = [&](int number) {
      if (number == 1) second.Pass();
    };
    store.Push("large", gradient);
    EXPECT_TRUE(second.WaitUntilReached());
    EXPECT_EQ(gpu.copied.CountOf("out"), 1);
    const NDArray out = Full(engine, -1);
    store.PushPull("small", Full(engine, 8), out, /*priority=*/5);
    out.WaitToRead(kSoon);
    EXPECT_THROW(gradient.WaitToWrite(std::chrono::milliseconds(0)), TimeoutError);
    second.Open();
    words_.Keep(2);
    const NDArray pulled = Full(engine, -1);
    store.PushPull("large", gradient, pulled);
    gradient.WaitToWrite(kSoon);
    words_.Release();
    EXPECT_EQ(pulled.ToVector<float>(), All(7));
    EXPECT_EQ(out.ToVector<float>(), All(8));
  });
}

// ---- Failures

// The round fails for all, in all parts: servers add what is pushed, and none has added anything.
TEST_P(StagedPartsTest, AFailedInputFailsTheWholeRound) {
  if (!IsSync()) GTEST_SKIP() << "rounds";
  RunJob(Options(2), [&](int rank, KVStore& store, Engine& engine, CopyingGpu&) {
    store.SetOptimizer(Sgd({.learning_rate = 1}));
    store.Init("w", Full(engine, 0, Cpu()));
    const NDArray out = Full(engine, -1);
    store.PushPull("w", Full(engine, 1), out);
    EXPECT_EQ(out.ToVector<float>(), All(-2));
    store.Push("w", rank == 1 ? Failing(engine, "no gradient today") : Full(engine, 1));
    store.Pull("w", out);
    EXPECT_THAT(ErrorOf(out), AllOf(HasSubstr("no gradient today"), HasSubstr("backward")));
    store.PushPull("w", rank == 0 ? Failing(engine, "nor today") : Full(engine, 1), out);
    EXPECT_THAT(ErrorOf(out), HasSubstr("nor today"));
    store.PushPull("w", Full(engine, 1), out);
    EXPECT_EQ(out.ToVector<float>(), All(-4));
    Forget(engine);
  });
}

// One error a pull, as calls with arrays on CPUs have.
TEST_P(StagedPartsTest, APullThatFailsSaysSoOnce) {
  RunJob(Options(), [&](int, KVStore& store, Engine& engine, CopyingGpu&) {
    store.Init("w", Full(engine, 9, Cpu()));
    const NDArray others = TakePinned(engine);
    const NDArray out = Full(engine, -1);
    store.Pull("w", out);
    EXPECT_THROW(engine.WaitForAll(), OutOfMemory);
    EXPECT_NO_THROW(engine.WaitForAll());
    EXPECT_THROW(out.WaitToRead(), OutOfMemory);
    storage::Gpus::Of(engine).Configure(DeviceType::kCpuPinned, {});
    store.Pull("w", out);
    EXPECT_EQ(out.ToVector<float>(), All(9));
  });
}

TEST_P(StagedPartsTest, WithoutPinnedMemoryNothingOfAPushHappens) {
  if (!IsSync()) GTEST_SKIP() << "pulls do not report failed pushes";
  RunJob(Options(), [&](int, KVStore& store, Engine& engine, CopyingGpu& gpu) {
    store.SetOptimizer(Sgd({.learning_rate = 1}));
    store.Init("w", Full(engine, 9, Cpu()));
    const NDArray gradient = Full(engine, 1);
    const NDArray out = Full(engine, -1, Cpu());
    const NDArray others = TakePinned(engine);
    store.Push("w", gradient);
    store.Pull("w", out);
    EXPECT_THAT(ErrorOf(out), HasSubstr("pinned"));
    EXPECT_EQ(gpu.copied.CountOf("out"), 0);
    storage::Gpus::Of(engine).Configure(DeviceType::kCpuPinned, {});
    store.PushPull("w", gradient, out);
    EXPECT_EQ(out.ToVector<float>(), All(8));
    Forget(engine);
  });
}

// The parts that were copied before are in their rounds, the others fail them, and the next rounds
// are like any other. A copy that the device fails, and one that cannot even be issued.
TEST_P(StagedPartsTest, ACopyThatFailsMidwayFailsThePushFromThereOn) {
  if (!IsSync()) GTEST_SKIP() << "rounds";
  for (const bool issued : {true, false}) {
    RunJob(Options(2), [&](int rank, KVStore& store, Engine& engine, CopyingGpu& gpu) {
      store.Init("w", Full(engine, 0, Cpu()));
      const NDArray gradient = Full(engine, 1);
      const NDArray out = Full(engine, -1, Cpu());
      engine.WaitForAll();
      if (rank == 1 && issued) {
        gpu.before_out = [](int number) {
          if (number == 2) throw std::runtime_error("a bad address");
        };
      } else if (rank == 1) {
        gpu.fails_to_issue = 2;
      }
      store.PushPull("w", gradient, out);
      EXPECT_THAT(ErrorOf(out), AllOf(HasSubstr("worker 1"), HasSubstr("cudaError")));
      store.PushPull("w", Full(engine, 2, Cpu()), out);  // that GPU is no more
      EXPECT_EQ(out.ToVector<float>(), All(4));
      store.Barrier();
      Forget(engine);
    });
  }
}

// Of a copy that takes too long. The server sees a push of each part, so all count alike.
TEST_P(StagedPartsTest, ACopyOutThatTakesTooLongEndsWithADeadline) {
  if (!IsSync()) GTEST_SKIP() << "rounds";
  JobOptions options = Options(2);
  options.op_deadline = std::chrono::seconds(6);
  RunJob(options, [&](int rank, KVStore& store, Engine& engine, CopyingGpu& gpu) {
    store.Init("w", Full(engine, 0, Cpu()));
    const NDArray gradient = Full(engine, 1);
    const NDArray out = Full(engine, -1);
    engine.WaitForAll();
    Gate second;
    if (rank == 1) {
      gpu.before_out = [&](int number) {
        if (number == 1) second.Pass();
      };
    }
    store.PushPull("w", gradient, out);
    const std::string error = ErrorOf(out);
    EXPECT_THAT(error, HasSubstr(" within "));
    if (rank == 1) {
      EXPECT_THAT(error, HasSubstr("copy of its values"));
    }
    second.Open();
    Forget(engine);
    store.Barrier();
    for (float round = 2; round < 5; ++round) {
      store.PushPull("w", Full(engine, round), out);
      EXPECT_EQ(out.ToVector<float>(), All(2 * round));
    }
  });
}

// What comes later is dropped: nothing of it is in the next pull's array.
TEST_P(StagedPartsTest, APartThatComesTooLateIsDropped) {
  JobOptions options = Options();
  options.op_deadline = std::chrono::seconds(6);
  RunJob(options, [&](int, KVStore& store, Engine& engine, CopyingGpu& gpu) {
    store.Init("w", Full(engine, 1, Cpu()));
    const NDArray out = Full(engine, -1);
    engine.WaitForAll();
    words_.Keep(3);
    store.Pull("w", out);
    EXPECT_THAT(ErrorOf(out), HasSubstr(" within "));
    EXPECT_EQ(gpu.copied.CountOf("in"), 3);
    out.Fill(2);
    EXPECT_EQ(out.ToVector<float>(), All(2));
    words_.Release();
    store.Pull("w", out);
    EXPECT_EQ(out.ToVector<float>(), All(1));
    Forget(engine);
  });
}

// The job ends in the midst of a push and a pull: both say why, though the GPU still copies.
TEST_P(StagedPartsTest, AFailedJobEndsWhatIsUnderWay) {
  JobOptions options = Options(2);
  options.fails = true;
  Job job(options);
  std::vector<std::thread> workers;
  for (int rank = 0; rank < 2; ++rank) {
    workers.emplace_back([&, rank] {
      const auto node = job.Join(rank);
      {
        Engine engine(options.engine());
        auto& gpu = dynamic_cast<CopyingGpu&>(*engine.options().gpu_driver);
        const auto store = MakeDistStore(engine, GetParam().type, node, node->NewStore());
        store->Init({"a", "b"}, {Full(engine, 1, Cpu()), Full(engine, 1, Cpu())});
        const NDArray gradient = Full(engine, 1);
        const NDArray a = Full(engine, -1);
        const NDArray b = Full(engine, -1);
        engine.WaitForAll();
        store->Barrier();
        Gate second;
        if (rank == 1) {
          EXPECT_TRUE(words_.acknowledged.WaitFor("0"));
          EXPECT_TRUE(words_.answered.WaitFor("1"));
          node->Fail("out of luck");
        } else {
          words_.Keep(1);
          gpu.before_out = [&](int number) {
            if (number == 1) second.Pass();
          };
          store->Push("a", gradient);
          store->Pull("a", a);
          store->Pull("b", b);
          for (const NDArray& out : {a, b}) EXPECT_THAT(ErrorOf(out), HasSubstr("out of luck"));
        }
        second.Open();
        Forget(engine);
      }
      node->Close();
    });
  }
  for (std::thread& worker : workers) worker.join();
}

// ---- Parts

TEST(StageOrder, TakesTheServersInTurn) {
  std::vector<PlacedPart> parts;
  const auto add = [&](std::int32_t server, int count) {
    for (int i = 0; i < count; ++i) {
      parts.push_back({.part = static_cast<std::uint32_t>(parts.size()),
                       .server = server,
                       .begin = 0,
                       .end = 0});
    }
  };
  add(1, 3);
  add(2, 2);
  add(0, 3);
  EXPECT_THAT(StageOrder(parts), ::testing::ElementsAre(0, 3, 5, 1, 4, 6, 2, 7));
}

}  // namespace
}  // namespace heddle::kvstore::dist
