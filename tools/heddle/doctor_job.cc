#include "tools/heddle/doctor_job.h"

#include <heddle/error.h>
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "base/env.h"
#include "kvstore/dist/listen_address.h"
#include "kvstore/dist/run.h"
#include "kvstore/dist/transport/tcp/tls.h"

namespace heddle::tools {
namespace {

// Where this process would listen, as a server if it is none of those that do.
int CheckAddress(DistOptions options, const Report& report) {
  if (options.root_host.empty()) {
    report("listens", "not known: root_host is not set");
    return 0;
  }
  if (options.role == DistRole::kWorker) options.role = DistRole::kServer;
  try {
    const auto address = kvstore::dist::ResolveListenAddress(options);
    report("listens", fmt::format("as {} at {}, others are told {}", DistRoleName(options.role),
                                  address.bind, address.advertised));
    return 0;
  } catch (const Error& error) {
    report("listens", fmt::format("PROBLEM: {}", error.what()));
    return 1;
  }
}

// A secret that others of this machine may read is none.
int CheckTokenFile(const Report& report) {
  const auto path = EnvString("HEDDLE_TOKEN_FILE");
  struct stat status;
  if (!path || stat(path->c_str(), &status) != 0) return 0;  // which reading it has told
  if ((status.st_mode & (S_IRWXG | S_IRWXO)) == 0) return 0;
  report("token", fmt::format("PROBLEM: others may read or change '{0}' (mode {1:03o}): chmod 600 "
                              "'{0}'",
                              *path, status.st_mode & (S_IRWXU | S_IRWXG | S_IRWXO)));
  return 1;
}

int CheckTls(const DistOptions& options, const Report& report) {
  const kvstore::dist::TlsOptions tls = kvstore::dist::TcpOptionsOf(options).tls;
  if (!tls.enabled()) return 0;
  try {
    const std::string problem = kvstore::dist::TlsContext(tls).OwnProblem();
    report("TLS", problem.empty() ? "certificate, key and authorities fit together"
                                  : fmt::format("PROBLEM: {} {}", tls.certificate, problem));
    return problem.empty() ? 0 : 1;
  } catch (const Error& error) {
    report("TLS", fmt::format("PROBLEM: {}", error.what()));
    return 1;
  }
}

std::string Bytes(rlim_t limit) {
  if (limit == RLIM_INFINITY) return "unlimited";
  return fmt::format("{} KiB", limit / 1024);
}

int CheckLimits(const DistOptions& options, const Report& report) {
  // Each process may have connections to all others, with shared memory to those of its host, and
  // its own files.
  constexpr rlim_t kOwn = 128, kPerPeer = 6;
  const auto peers = static_cast<rlim_t>(std::max(options.num_workers, 0)) +
                     static_cast<rlim_t>(std::max(options.num_servers, 0)) + 1;
  const rlim_t needed = kOwn + kPerPeer * peers;
  int problems = 0;
  rlimit files{}, locked{};
  getrlimit(RLIMIT_NOFILE, &files);
  getrlimit(RLIMIT_MEMLOCK, &locked);
  if (files.rlim_cur < needed) {
    ++problems;
    report("open files", fmt::format("PROBLEM: {} at most, a job of {} processes may need {}: "
                                     "ulimit -n {}{}",
                                     files.rlim_cur, peers, needed, needed,
                                     files.rlim_max < needed
                                         ? " (the system's own limit is lower: see limits.conf(5))"
                                         : ""));
  } else {
    report("open files", fmt::format("{} at most, {} may be needed", files.rlim_cur, needed));
  }
  report("locked memory", fmt::format("{} at most; ulimit -l sets it", Bytes(locked.rlim_cur)));
  return problems;
}

double WallClock() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

int CheckJobSetUp(const DistOptions& options, const Report& report) {
  return CheckAddress(options, report) + CheckTokenFile(report) + CheckTls(options, report) +
         CheckLimits(options, report);
}

int CheckInJob(const Report& report) {
  const std::unique_ptr<KVStore> store = KVStore::Create("dist_sync");
  const std::int64_t workers = store->num_workers();
  // Cut over all servers, so that each worker hears from each server.
  constexpr std::int64_t kElements = 1 << 20;
  const auto started = std::chrono::steady_clock::now();
  store->Init("doctor", NDArray::Zeros({kElements}));
  const NDArray sum = NDArray::Zeros({kElements});
  store->PushPull("doctor", NDArray::Full({kElements}, 1), sum);
  int problems = 0;
  const std::vector<float> sums = sum.ToVector<float>();
  if (!std::all_of(sums.begin(), sums.end(),
                   [&](float s) { return s == static_cast<float>(workers); })) {
    ++problems;
    report("data", "PROBLEM: the servers' sums are wrong");
  }
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - started;
  report("reaches", fmt::format("all servers, and they all workers: {} MiB there and back in "
                                "{:.0f} ms",
                                kElements * 4 / (1 << 20), took.count()));
  // After a barrier all say what time it is, at the same moment but for how barriers end.
  store->Init("clocks", NDArray::Zeros({workers}, DType::kFloat64));
  store->Barrier();
  const auto rank = static_cast<std::size_t>(store->rank());
  std::vector<double> mine(static_cast<std::size_t>(workers), 0.0);
  mine[rank] = WallClock();
  const NDArray clocks = NDArray::Zeros({workers}, DType::kFloat64);
  store->PushPull("clocks", NDArray::FromVector(mine), clocks);
  const std::vector<double> all = clocks.ToVector<double>();
  constexpr double kSecondsMax = 1;
  const auto [first, last] = std::minmax_element(all.begin(), all.end());
  const std::string spread = fmt::format("{:.3f} s between worker {} and worker {}", *last - *first,
                                         first - all.begin(), last - all.begin());
  if (*last - *first > kSecondsMax) {
    ++problems;
    report("clocks", fmt::format("PROBLEM: {}: logs and traces cannot be compared; set the clocks "
                                 "by NTP",
                                 spread));
  } else {
    report("clocks", spread);
  }
  return problems;
}

}  // namespace heddle::tools
