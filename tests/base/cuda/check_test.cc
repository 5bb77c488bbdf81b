#include "base/cuda/check.h"

#include <heddle/error.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/gpus.h"

namespace heddle {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Needs no driver: the runtime checks the argument itself, or says that there is none.
TEST(CudaCheck, AFailedCallThrowsWithTheCallAndTheErrorsName) {
  const auto fails = [] { return cudaErrorInvalidValue; };
  try {
    CUDA_CHECK(fails());
    FAIL() << "expected CudaError";
  } catch (const CudaError& error) {
    EXPECT_EQ(error.code(), cudaErrorInvalidValue);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("fails()"), HasSubstr("cudaErrorInvalidValue")));
  }
}

TEST(CudaCheck, ADeviceThatIsNotThereIsNamed) {
  const int count = GpuCount();
  EXPECT_THAT(WhyNoGpu(count), HasSubstr("gpu(" + std::to_string(count) + ")"));
  if (count == 0) {
    EXPECT_THAT(ListGpus().why_none, ::testing::Not(::testing::IsEmpty()));
  }
}

}  // namespace
}  // namespace heddle
