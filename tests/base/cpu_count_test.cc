// Goal: every way in which a machine says how many CPUs we may use is understood. Method: a fake
// root directory with the /proc and /sys files of that machine; affinity is the test process' own.
#include "base/cpu_count.h"

#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include <gtest/gtest.h>
#include <sched.h>

#include "tools/testing/temp_folder.h"

namespace heddle {
namespace {

constexpr char kV2Mount[] = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
constexpr char kV1Mount[] =
    "32 31 0:29 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n";

int AffinityOfThisThread() {
  cpu_set_t set;
  EXPECT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
  return CPU_COUNT(&set);
}

class CpuCountTest : public ::testing::Test {
 protected:
  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }

  const tools::TempFolder folder_;
  const std::string& root_ = folder_.path();
};

// Quotas below one CPU round up to one, so these tests hold on a machine with any number of CPUs;
// what a larger quota gives is checked against this thread's affinity.
TEST_F(CpuCountTest, NoFilesMeanNoLimit) {
  EXPECT_EQ(AvailableCpus(root_), AffinityOfThisThread());
}

TEST_F(CpuCountTest, Version2QuotaLimits) {
  Write("/proc/self/mountinfo", kV2Mount);
  Write("/proc/self/cgroup", "0::/job/step\n");
  Write("/sys/fs/cgroup/job/step/cpu.max", "50000 100000\n");
  EXPECT_EQ(AvailableCpus(root_), 1);
}

TEST_F(CpuCountTest, QuotaRoundsUp) {
  if (AffinityOfThisThread() < 2) GTEST_SKIP() << "needs two CPUs";
  Write("/proc/self/mountinfo", kV2Mount);
  Write("/proc/self/cgroup", "0::/\n");
  Write("/sys/fs/cgroup/cpu.max", "100001 100000\n");
  EXPECT_EQ(AvailableCpus(root_), 2);
  Write("/sys/fs/cgroup/cpu.max", "100000 100000\n");
  EXPECT_EQ(AvailableCpus(root_), 1);
}

TEST_F(CpuCountTest, Version2WithoutQuotaIsNoLimit) {
  Write("/proc/self/mountinfo", kV2Mount);
  Write("/proc/self/cgroup", "0::/job\n");
  Write("/sys/fs/cgroup/job/cpu.max", "max 100000\n");
  EXPECT_EQ(AvailableCpus(root_), AffinityOfThisThread());
}

TEST_F(CpuCountTest, QuotaOfAGroupAboveCounts) {
  Write("/proc/self/mountinfo", kV2Mount);
  Write("/proc/self/cgroup", "0::/slice/job/step\n");
  Write("/sys/fs/cgroup/slice/cpu.max", "10000 100000\n");
  Write("/sys/fs/cgroup/slice/job/cpu.max", "max 100000\n");
  Write("/sys/fs/cgroup/slice/job/step/cpu.max", "800000 100000\n");
  EXPECT_EQ(AvailableCpus(root_), 1);
}

TEST_F(CpuCountTest, QuotaOfAnotherGroupDoesNotCount) {
  Write("/proc/self/mountinfo", kV2Mount);
  Write("/proc/self/cgroup", "0::/mine\n");
  Write("/sys/fs/cgroup/other/cpu.max", "10000 100000\n");
  EXPECT_EQ(AvailableCpus(root_), AffinityOfThisThread());
}

TEST_F(CpuCountTest, Version1QuotaLimits) {
  Write("/proc/self/mountinfo", kV1Mount);
  Write("/proc/self/cgroup", "4:cpu,cpuacct:/docker/1\n3:cpuset:/\n");
  Write("/sys/fs/cgroup/cpu/docker/1/cpu.cfs_quota_us", "25000\n");
  Write("/sys/fs/cgroup/cpu/docker/1/cpu.cfs_period_us", "50000\n");
  EXPECT_EQ(AvailableCpus(root_), 1);
}

TEST_F(CpuCountTest, Version1WithoutQuotaIsNoLimit) {
  Write("/proc/self/mountinfo", kV1Mount);
  Write("/proc/self/cgroup", "4:cpu,cpuacct:/\n");
  Write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  Write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(AvailableCpus(root_), AffinityOfThisThread());
}

TEST_F(CpuCountTest, CpusetHierarchyIsNotTakenForTheCpuOne) {
  Write("/proc/self/mountinfo",
        "33 31 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n");
  Write("/proc/self/cgroup", "3:cpuset:/\n");
  Write("/sys/fs/cgroup/cpuset/cpu.cfs_quota_us", "1000\n");
  Write("/sys/fs/cgroup/cpuset/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(AvailableCpus(root_), AffinityOfThisThread());
}

// Docker without a cgroup namespace: our group's path is the host's, the mount shows only our part.
TEST_F(CpuCountTest, MountThatShowsOnlyOurGroup) {
  Write("/proc/self/mountinfo", "30 23 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n");
  Write("/proc/self/cgroup", "0::/docker/abc\n");
  Write("/sys/fs/cgroup/cpu.max", "100000 100000\n");
  EXPECT_EQ(AvailableCpus(root_), 1);
}

TEST_F(CpuCountTest, GroupOutsideTheMountMeansItsTop) {
  Write("/proc/self/mountinfo", "30 23 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n");
  Write("/proc/self/cgroup", "0::/elsewhere\n");
  Write("/sys/fs/cgroup/cpu.max", "100000 100000\n");
  EXPECT_EQ(AvailableCpus(root_), 1);
}

TEST_F(CpuCountTest, GarbageCountsAsNoLimit) {
  Write("/proc/self/mountinfo", std::string("garbage\n - \n") + kV2Mount);
  Write("/proc/self/cgroup", "::\nnonsense\n0::/\n");
  Write("/sys/fs/cgroup/cpu.max", "soon 100000\n");
  EXPECT_EQ(AvailableCpus(root_), AffinityOfThisThread());
  Write("/sys/fs/cgroup/cpu.max", "100000 0\n");
  EXPECT_EQ(AvailableCpus(root_), AffinityOfThisThread());
}

TEST_F(CpuCountTest, AffinityOfTheCallingThreadLimits) {
  // A thread of its own, so that the narrow affinity ends with it.
  std::thread([this] {
    cpu_set_t all;
    ASSERT_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
    int first = 0;
    while (!CPU_ISSET(first, &all)) ++first;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    EXPECT_EQ(AvailableCpus(root_), 1);
  }).join();
}

TEST(CpuCount, ThisMachineHasAtLeastOne) {
  EXPECT_GE(AvailableCpus(), 1);
  EXPECT_LE(AvailableCpus(), AffinityOfThisThread());
}

}  // namespace
}  // namespace heddle
