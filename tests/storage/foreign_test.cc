// Arrays over memory that heddle did not take.
#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/ndarray.h>

#include <atomic>
#include <memory>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "storage/dlpack.h"

namespace heddle {
namespace {

TEST(ForeignTest, OperationsReadAndWriteTheMemoryItself) {
  std::vector<float> memory = {1, 2, 3, 4, 5, 6};
  const NDArray array = NDArray::FromForeign(memory.data(), {2, 3}, DType::kFloat32, [] {});
  EXPECT_EQ(array.ToVector<float>(), memory);
  array *= 2;
  array.WaitToRead();
  EXPECT_EQ(memory, (std::vector<float>{2, 4, 6, 8, 10, 12}));
  EXPECT_EQ(array.data<float>(), memory.data());
}

TEST(ForeignTest, ReleasesOnceAfterTheLastHandleAndTheLastOp) {
  EngineOptions options;
  options.type = "seeded";  // ops run only inside waits
  Engine engine(options);
  auto memory = std::make_unique<std::vector<float>>(std::vector<float>{1, 2});
  std::atomic<int> released = 0;
  NDArray copy({2}, DType::kFloat32, Cpu(), engine);
  {
    const NDArray array = NDArray::FromForeign(
        memory->data(), {2}, DType::kFloat32,
        [&] {
          memory.reset();
          ++released;
        },
        Cpu(), engine);
    const NDArray view = array.Slice(0, 1);
    array.CopyTo(copy);
  }
  EXPECT_EQ(released, 0);  // the copy has yet to read it
  EXPECT_EQ(copy.ToVector<float>(), (std::vector<float>{1, 2}));
  engine.WaitForAll();
  EXPECT_EQ(released, 1);
}

TEST(ForeignTest, AnEmptyArrayNeedsNoMemory) {
  int released = 0;
  {
    const NDArray array =
        NDArray::FromForeign(nullptr, {0, 3}, DType::kFloat32, [&] { ++released; });
  }
  EXPECT_EQ(released, 1);
}

TEST(ForeignTest, BadMemoryIsRefusedAndNotReleased) {
  alignas(8) char memory[16] = {};
  const auto never = [] { FAIL() << "released"; };
  EXPECT_THROW(NDArray::FromForeign(nullptr, {2}, DType::kFloat32, never), InvalidArgument);
  EXPECT_THROW(NDArray::FromForeign(memory + 1, {2}, DType::kFloat32, never), InvalidArgument);
  EXPECT_THROW(NDArray::FromForeign(memory, {2}, DType::kFloat32, nullptr), InvalidArgument);
  EXPECT_THROW(NDArray::FromForeign(memory, {2}, DType::kFloat32, never, Gpu(-1)), InvalidArgument);
}

// An op's body may not touch what its op does not declare: a way to fail that needs no large array.
TEST(ForeignTest, AnExportThatFailsKeepsNothing) {
  EngineOptions options;
  options.check_access = true;
  Engine engine(options);
  std::vector<float> memory = {1, 2};
  int released = 0;
  NDArray array = NDArray::FromForeign(
      memory.data(), {2}, DType::kFloat32, [&] { ++released; }, Cpu(), engine);
  engine.Push({.name = "export"}, [&] {
    EXPECT_THROW(storage::ExportTensor<storage::DLManagedTensor>(array), AccessError);
  });
  engine.WaitForAll();
  array = NDArray();
  EXPECT_EQ(released, 1);
}

}  // namespace
}  // namespace heddle
