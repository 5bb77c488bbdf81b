// What TCP carries beyond the values, as the kernel counts it on the worker's connections.
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include <dirent.h>
#include <fmt/format.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "base/check.h"
#include "benchmarks/dist/contests.h"
#include "benchmarks/dist/job.h"
#include "benchmarks/dist/store_sections.h"
#include "benchmarks/dist/turns.h"

namespace heddle::bench_dist {
namespace {

struct Carried {
  double sent = 0;
  double received = 0;
};

// By all TCP connections of this process but those to `other_port`.
Carried OfConnections(int other_port) {
  Carried carried;
  DIR* const folder = opendir("/proc/self/fd");
  CHECK(folder != nullptr);
  while (const dirent* file = readdir(folder)) {
    const int fd = std::atoi(file->d_name);
    sockaddr_in peer{};
    socklen_t peer_length = sizeof peer;
    if (file->d_name[0] == '.' ||
        getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_length) != 0 ||
        peer.sin_family != AF_INET || ntohs(peer.sin_port) == other_port) {
      continue;
    }
    tcp_info info{};
    socklen_t length = sizeof info;
    CHECK(getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) == 0);
    carried.sent += static_cast<double>(info.tcpi_bytes_sent - info.tcpi_bytes_retrans);
    carried.received += static_cast<double>(info.tcpi_bytes_received);
  }
  closedir(folder);
  return carried;
}

// Of a message, to the hundredth: one in hundreds of thousands the transport says of its own, and
// it carries no payload.
double BytesEach(double bytes, std::size_t messages) {
  return std::round(100 * bytes / static_cast<double>(messages)) / 100;
}

}  // namespace

void MeasureBytes(bench::BarReport& report, bool quick) {
  const Job job({.signs_of_life = false});
  const std::unique_ptr<Worker> worker = job.Join();
  KVStore& store = worker->store();
  const int operations = quick ? 20 : 200;
  // What `operation` sends and receives beyond values of so many bytes, a time.
  const auto beyond = [&](const auto& operation, std::size_t sent, std::size_t received) {
    operation();
    worker->engine().WaitForAll();
    const Carried before = OfConnections(job.scheduler_port());
    for (int i = 0; i < operations; ++i) operation();
    worker->engine().WaitForAll();
    const Carried after = OfConnections(job.scheduler_port());
    return Carried{(after.sent - before.sent) / operations - static_cast<double>(sent),
                   (after.received - before.received) / operations - static_cast<double>(received)};
  };
  const auto add_pushpull = [&](std::size_t bytes) {
    const NDArray value = worker->Array(bytes);
    const NDArray out = worker->Array(bytes);
    const std::string key = bench::BytesText(bytes);
    store.Init(key, value);
    return beyond(
        [&] {
          store.PushPull(key, value, out);
          out.WaitToRead();
        },
        bytes, bytes);
  };
  const Carried large = add_pushpull(kMiB);
  AddLimit(report, "bytes beyond the payload, pushpull of 1 MiB, both ways", "% of it",
           {100 * (large.sent + large.received) / (2 * kMiB)}, 0.1);
  const Carried small = add_pushpull(4096);
  AddLimit(report, "bytes beyond the payload, pushpull of 4 KiB: the request", "bytes",
           {BytesEach(small.sent, 1)}, 64);
  AddLimit(report, "bytes beyond the payload, pushpull of 4 KiB: the answer", "bytes",
           {BytesEach(small.received, 1)}, 64);

  constexpr std::size_t kKeys = 1000;
  std::vector<std::string> names;
  std::vector<NDArray> arrays;
  for (std::size_t key = 0; key < kKeys; ++key) {
    names.push_back(std::to_string(key));
    arrays.push_back(worker->Array(256));
    store.Init(names[key], arrays[key]);
  }
  const Carried keys = beyond(
      [&] {
        for (std::size_t key = 0; key < kKeys; ++key) store.Push(names[key], arrays[key]);
        for (std::size_t key = 0; key < kKeys; ++key) store.Pull(names[key], arrays[key]);
        for (const NDArray& array : arrays) array.WaitToRead();
      },
      kKeys * 256, kKeys * 256);
  AddLimit(report, "bytes beyond the payload, 1 000 keys of 256 bytes: a push or pull", "bytes",
           {BytesEach(keys.sent, 2 * kKeys)}, 64);
  AddLimit(report, "bytes beyond the payload, 1 000 keys of 256 bytes: their answers", "bytes",
           {BytesEach(keys.received, 2 * kKeys)}, 64);
}

}  // namespace heddle::bench_dist
