// Arrays and the process-wide pool: when memory is taken, when it comes back, what the cap does.
#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/memory.h>
#include <heddle/ndarray.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/gpus.h"
#include "tests/engine/support.h"
#include "tests/message_of.h"
#include "tests/sanitized.h"

namespace heddle {
namespace {

using engine_test::Hold;

constexpr std::int64_t kMiB = 1 << 20;

std::int64_t Used() { return GetMemoryStats(DeviceType::kCpu).used; }

NDArray Bytes(std::int64_t bytes, Engine& engine) {
  return NDArray({bytes}, DType::kUInt8, Cpu(), engine);
}

// Sets the cap for one test.
class Cap {
 public:
  explicit Cap(std::int64_t bytes_max) { Set(bytes_max); }
  ~Cap() { Set(std::numeric_limits<std::int64_t>::max()); }
  Cap(const Cap&) = delete;
  Cap& operator=(const Cap&) = delete;

 private:
  static void Set(std::int64_t bytes_max) {
    MemoryOptions options = MemoryOptions::FromEnvironment(DeviceType::kCpu);
    options.bytes_max = bytes_max;
    ConfigureMemory(DeviceType::kCpu, options);
  }
};

class Memory : public engine_test::EveryEngine {};

TEST_P(Memory, IsTakenByTheFirstOpAndGivenBackWithTheLastHandle) {
  Engine engine(GetParam().options);
  const std::int64_t before = Used();
  NDArray array = Bytes(kMiB, engine);
  EXPECT_EQ(Used(), before);
  array.Fill(1);
  array.WaitToRead();
  EXPECT_EQ(Used(), before + kMiB);
  NDArray view = array.Slice(0, 10);
  array = NDArray();
  EXPECT_EQ(Used(), before + kMiB);
  view = NDArray();
  EXPECT_EQ(Used(), before);
}

// The op that reads the dropped array cannot run yet; a fresh array of the same size must not get
// its memory, and the op must find the values.
TEST_P(Memory, LivesUntilTheLastOpIsDone) {
  Engine engine(GetParam().options);
  const std::int64_t before = Used();
  const NDArray out = Bytes(kMiB, engine);
  out.Fill(0);
  out.WaitToRead();
  const Var gate = engine.NewVar("gate");
  NDArray dropped = Bytes(kMiB, engine);
  dropped.Fill(7);
  dropped.WaitToRead();
  const void* const address = dropped.data();
  Hold hold(engine, {.name = "hold", .writes = {gate}});
  engine.Push({.name = "late read", .reads = {gate, dropped.var()}, .writes = {out.var()}},
              [dropped, out] {
                std::copy_n(dropped.data<const std::uint8_t>(), kMiB, out.data<std::uint8_t>());
              });
  dropped = NDArray();
  const NDArray other = Bytes(kMiB, engine);
  EXPECT_NE(other.data(), address);
  EXPECT_EQ(Used(), before + 3 * kMiB);
  hold.Release();
  EXPECT_EQ(out.ToVector<std::uint8_t>(), std::vector<std::uint8_t>(kMiB, 7));
  EXPECT_EQ(Used(), before + 2 * kMiB);
  const NDArray reusing = Bytes(kMiB, engine);
  if (MemoryOptions::FromEnvironment(DeviceType::kCpu).allocator == "pool") {
    EXPECT_EQ(reusing.data(), address);
  }
}

TEST_P(Memory, OfTemporariesThatNobodyHoldsComesBack) {
  Engine engine(GetParam().options);
  const std::int64_t before = Used();
  {
    const NDArray a = NDArray::Ones({1000}, DType::kFloat32, Cpu(), engine);
    for (int i = 0; i < 100; ++i) a += (a * 2 - a) * 0;
    EXPECT_EQ(a.ToVector<float>(), std::vector<float>(1000, 1.0f));
  }
  engine.WaitForAll();
  EXPECT_EQ(Used(), before);
}

TEST_P(Memory, OutlivesItsEngine) {
  const std::int64_t before = Used();
  NDArray array;
  {
    Engine engine(GetParam().options);
    array = NDArray::Ones({kMiB}, DType::kUInt8, Cpu(), engine);
    array.WaitToRead();
  }
  EXPECT_EQ(array.data<std::uint8_t>()[kMiB - 1], 1);
  array = NDArray();
  EXPECT_EQ(Used(), before);
}

TEST_P(Memory, IsGivenBackByAnEngineThatStopsWithWorkPending) {
  const std::int64_t before = Used();
  {
    Engine engine(GetParam().options);
    NDArray sum = NDArray::Zeros({1000}, DType::kFloat32, Cpu(), engine);
    for (int i = 0; i < 200; ++i) sum = sum + 1;
  }
  EXPECT_EQ(Used(), before);
}

TEST_P(Memory, ArrayThatCanNeverFitIsRefusedAtOnce) {
  Engine engine(GetParam().options);
  const std::int64_t before = Used();
  TrimMemory(DeviceType::kCpu);
  const Cap cap(before + 4 * kMiB);
  const std::string message = MessageOf<OutOfMemory>([&] { Bytes(before + 5 * kMiB, engine); });
  EXPECT_NE(message.find(std::to_string(before + 5 * kMiB)), std::string::npos) << message;
  EXPECT_NE(message.find(std::to_string(before + 4 * kMiB)), std::string::npos) << message;
  EXPECT_EQ(Used(), before);
}

// The pool takes 4.5 MiB for it. It was made, and whoever waited for it heard that 4 MiB and a byte
// do not fit under 4.25 MiB.
TEST_P(Memory, ArrayWhoseBlockCanNeverFitIsRefusedAtOnce) {
  if (MemoryOptions::FromEnvironment(DeviceType::kCpu).allocator != "pool") {
    GTEST_SKIP() << "no size classes";
  }
  Engine engine(GetParam().options);
  const Cap cap(4 * kMiB + kMiB / 4);
  const std::string message = MessageOf<OutOfMemory>([&] { Bytes(4 * kMiB + 1, engine); });
  for (const char* part : {"4194305", "4718592", "4456448"}) {  // asked, its block, the cap
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
  EXPECT_NO_THROW(Bytes(4 * kMiB, engine));
}

TEST_P(Memory, ExhaustedCapComesOutOfTheWaitAndLeavesOtherArraysAlone) {
  Engine engine(GetParam().options);
  TrimMemory(DeviceType::kCpu);
  const Cap cap(Used() + 4 * kMiB);
  NDArray first = NDArray::Ones({3 * kMiB}, DType::kUInt8, Cpu(), engine);
  first.WaitToRead();
  const NDArray second = Bytes(2 * kMiB, engine);
  second.Fill(2);
  EXPECT_THROW(second.WaitToRead(), OutOfMemory);
  EXPECT_THROW(second.WaitToRead(), OutOfMemory);
  first.WaitToRead();
  EXPECT_EQ(first.data<std::uint8_t>()[0], 1);
  first = NDArray();
  second.Fill(2);  // a pure write: cures it
  second.WaitToRead();
  EXPECT_EQ(second.data<std::uint8_t>()[2 * kMiB - 1], 2);
}

INSTANTIATE_TEST_SUITE_P(All, Memory, testing::ValuesIn(engine_test::AllConfigs()),
                         engine_test::ConfigLabel);

TEST(ConfigureMemory, KeepsTheAllocatorOnceInUse) {
  GetMemoryStats(DeviceType::kCpu);
  MemoryOptions options = MemoryOptions::FromEnvironment(DeviceType::kCpu);
  ConfigureMemory(DeviceType::kCpu, options);
  options.allocator = options.allocator == "pool" ? "system" : "pool";
  EXPECT_THROW(ConfigureMemory(DeviceType::kCpu, options), InvalidState);
  options.allocator = "slab";
  EXPECT_THROW(ConfigureMemory(DeviceType::kCpu, options), InvalidArgument);
  EXPECT_THROW(ConfigureMemory(DeviceType::kCpu, {.bytes_max = 0}), InvalidArgument);
}

TEST(ConfigureMemory, RefusesDevicesThatAreNotThere) {
  if (GpuCount() > 0) GTEST_SKIP() << "there are GPUs here";
  for (const DeviceType type : {DeviceType::kGpu, DeviceType::kCpuPinned}) {
    EXPECT_THROW(ConfigureMemory(type, {}), InvalidArgument);
    EXPECT_THROW(GetMemoryStats(type), InvalidArgument);
    EXPECT_THROW(TrimMemory(type), InvalidArgument);
  }
}

TEST(ConfigureMemory, RefusesWhatIsNoTypeOfDevice) {
  const auto none = static_cast<DeviceType>(9);
  EXPECT_THROW(ConfigureMemory(none, {}), InvalidArgument);
  EXPECT_THROW(GetMemoryStats(none), InvalidArgument);
  EXPECT_THROW(GetMemoryStats(Device{none, 0}), InvalidArgument);
  EXPECT_THROW(TrimMemory(none), InvalidArgument);
}

// Threads of the parent may hold the pool's locks for ever there.
TEST(MemoryInForkedChild, IsRefused) {
  if (kSanitized) GTEST_SKIP() << "a lock of the sanitizer's allocator may be held for ever too";
  const Engine engine;
  const pid_t child = fork();
  if (child == 0) {
    int refused = 0;
    const auto try_out = [&](auto&& call) {
      try {
        call();
      } catch (const InvalidState&) {
        ++refused;
      }
    };
    try_out([] { TrimMemory(DeviceType::kCpu); });
    try_out([] { GetMemoryStats(DeviceType::kCpu); });
    try_out([] { GetMemoryStats(Cpu()); });
    try_out([] { ConfigureMemory(DeviceType::kCpu, {}); });
    _exit(refused == 4 ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// Reads the environment, so in a process of its own.
TEST(MemoryInChild, TakesItsOptionsFromTheEnvironment) {
  if (!engine_test::InChild()) GTEST_SKIP() << "runs in a child process";
  EXPECT_EQ(GetMemoryStats(DeviceType::kCpu).bytes_max, kMiB);
  Engine engine;
  EXPECT_THROW(Bytes(2 * kMiB, engine), OutOfMemory);
  NDArray array = Bytes(1000, engine);
  array.data();
  array = NDArray();
  EXPECT_EQ(GetMemoryStats(DeviceType::kCpu).cached, 0);  // the allocator "system"
}

TEST(MemoryInChild, NamesAVariableThatDoesNotParse) {
  if (!engine_test::InChild()) GTEST_SKIP() << "runs in a child process";
  const std::string message = MessageOf<InvalidArgument>([] { GetMemoryStats(DeviceType::kCpu); });
  EXPECT_NE(message.find("environment variable HEDDLE_CPU_"), std::string::npos) << message;
}

TEST(MemoryEnvironment, ConfiguresThePool) {
  EXPECT_EQ(engine_test::RunInChild(
                "MemoryInChild.TakesItsOptionsFromTheEnvironment",
                {{"HEDDLE_CPU_MEMORY_MAX", "1048576"}, {"HEDDLE_CPU_ALLOCATOR", "system"}}, false),
            0);
  for (const auto& [variable, value] :
       {std::pair("HEDDLE_CPU_MEMORY_MAX", "1GB"), std::pair("HEDDLE_CPU_ALLOCATOR", "steam")}) {
    EXPECT_EQ(engine_test::RunInChild("MemoryInChild.NamesAVariableThatDoesNotParse",
                                      {{variable, value}}, false),
              0)
        << variable;
  }
}

}  // namespace
}  // namespace heddle
