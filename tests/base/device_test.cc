#include <heddle/device.h>
#include <heddle/error.h>

#include <gtest/gtest.h>

namespace heddle {
namespace {

TEST(Device, ToStringNamesTypeAndId) {
  EXPECT_EQ(ToString(Cpu()), "cpu(0)");
  EXPECT_EQ(ToString(Cpu(3)), "cpu(3)");
  EXPECT_EQ(ToString(CpuPinned(1)), "cpu_pinned(1)");
  EXPECT_EQ(ToString(Gpu(12)), "gpu(12)");
}

TEST(Device, IdsBeyondTheRangeAreRefused) {
  EXPECT_EQ(Cpu(32767).id, 32767);
  for (const auto make : {&Cpu, &CpuPinned, &Gpu}) {
    EXPECT_THROW(make(32768), InvalidArgument);
    EXPECT_THROW(make(-40000), InvalidArgument);
  }
}

TEST(Device, EqualityComparesTypeAndId) {
  EXPECT_EQ(Cpu(1), Cpu(1));
  EXPECT_NE(Cpu(1), Cpu(2));
  EXPECT_NE(Cpu(1), Gpu(1));
}

}  // namespace
}  // namespace heddle
