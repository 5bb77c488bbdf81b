// DESIGN. The quota lies in a file of the group's directory. That directory is put together from
// two files: /proc/self/cgroup names our group inside its hierarchy, /proc/self/mountinfo says
// where (and from which group downwards) the hierarchy is mounted. In a container the two may
// disagree, since the mount shows only the container's part; then the top of the mount is our
// group.
#include "base/cpu_count.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include <sched.h>

namespace heddle {
namespace {

enum class CgroupVersion { kV1, kV2 };

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

struct CgroupMount {
  std::string group;  // the group that the mount point shows
  std::string point;  // where it is mounted
};

// Whether a comma-separated list, such as "rw,cpu,cpuacct", holds `item`.
bool ListHolds(const std::string& list, std::string_view item) {
  std::istringstream items(list);
  for (std::string one; std::getline(items, one, ',');) {
    if (one == item) return true;
  }
  return false;
}

// A line reads "31 23 0:28 /group /mount/point options [optional fields] - type source options".
std::optional<CgroupMount> FindMount(const std::string& root, CgroupVersion version) {
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t separator = line.find(" - ");
    if (separator == std::string::npos) continue;
    std::istringstream left(line.substr(0, separator));
    std::istringstream right(line.substr(separator + 3));
    std::string skipped, type, source, options;
    CgroupMount mount;
    left >> skipped >> skipped >> skipped >> mount.group >> mount.point;
    right >> type >> source >> options;
    const bool matches = version == CgroupVersion::kV2
                             ? type == "cgroup2"
                             : type == "cgroup" && ListHolds(options, "cpu");
    if (matches) return mount;
  }
  return std::nullopt;
}

// A line reads "4:cpu,cpuacct:/group" (version 1) or "0::/group" (version 2).
std::optional<std::string> FindGroup(const std::string& root, CgroupVersion version) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool matches =
        version == CgroupVersion::kV2 ? controllers.empty() : ListHolds(controllers, "cpu");
    if (matches) return line.substr(second + 1);
  }
  return std::nullopt;
}

std::optional<double> ReadNumber(const std::filesystem::path& path) {
  std::ifstream file(path);
  double number = 0;
  if (!(file >> number)) return std::nullopt;
  return number;
}

// The CPUs that the quota of one group directory allows.
double QuotaOf(const std::filesystem::path& directory, CgroupVersion version) {
  std::optional<double> quota_us, period_us;
  if (version == CgroupVersion::kV2) {
    std::ifstream file(directory / "cpu.max");  // "max 100000" or "150000 100000"
    double quota = 0, period = 0;
    if (file >> quota >> period) {
      quota_us = quota;
      period_us = period;
    }
  } else {
    quota_us = ReadNumber(directory / "cpu.cfs_quota_us");  // -1: none
    period_us = ReadNumber(directory / "cpu.cfs_period_us");
  }
  if (!quota_us || !period_us || *quota_us <= 0 || *period_us <= 0) return kNoLimit;
  return *quota_us / *period_us;
}

// The least quota of our group and the groups above it, as far as the mount shows them.
double CgroupQuota(const std::string& root, CgroupVersion version) {
  const std::optional<CgroupMount> mount = FindMount(root, version);
  const std::optional<std::string> group = FindGroup(root, version);
  if (!mount || !group) return kNoLimit;
  const std::filesystem::path top = root + mount->point;
  const std::filesystem::path below =
      std::filesystem::path(*group).lexically_relative(mount->group);
  double quota = QuotaOf(top, version);
  if (below.empty() || *below.begin() == "..") return quota;  // not ours to see: the top is us
  std::filesystem::path directory = top;
  for (const std::filesystem::path& part : below) {
    directory /= part;
    quota = std::min(quota, QuotaOf(directory, version));
  }
  return quota;
}

int AffinityCpus() {
  // The set grows until the kernel accepts its size: machines may have more CPUs than cpu_set_t.
  for (std::size_t cpus = 1024; cpus <= (std::size_t{1} << 20); cpus *= 2) {
    std::vector<cpu_set_t> set(cpus / CPU_SETSIZE);
    const std::size_t bytes = set.size() * sizeof(cpu_set_t);
    if (sched_getaffinity(0, bytes, set.data()) == 0) {
      return std::max(1, CPU_COUNT_S(bytes, set.data()));
    }
    if (errno != EINVAL) break;
  }
  return 1;
}

}  // namespace

int AvailableCpus(const std::string& root) {
  const double quota =
      std::min(CgroupQuota(root, CgroupVersion::kV1), CgroupQuota(root, CgroupVersion::kV2));
  const int affinity = AffinityCpus();
  if (quota >= affinity) return affinity;
  return std::max(1, static_cast<int>(std::ceil(quota)));
}

}  // namespace heddle
