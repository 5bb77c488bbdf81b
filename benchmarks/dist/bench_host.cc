// The store dist_sync between processes of one host, through shared memory; with TLS; and between
// hosts.
//
//   bench_host [--json FILE] [--quick] [SECTION...]
//
// One worker and one server, each on a CPU:
// large     pushpull of 64 MiB, beside the same over TCP, and beside one thread that copies as many
//           bytes: to the server and back.
// sleeping  pushpull of 4 KiB where both sides sleep, beside a bare futex round trip.
// polling   the same where both sides poll, against a fixed limit.
// tls       pushpull of 64 MiB over TCP with TLS, beside what plain sockets and OpenSSL alone take.
//
// One worker and one server, on hosts of a TestNetwork (skipped where there can be none):
// link      64 MiB in 100 keys over 1 Gbit/s with a delay of 5 ms, against the link, plain sockets
//           beside it.
// overtake  4 KiB behind 20 keys of 1 MB of lower priority, over 100 Mbit/s, against a fixed limit.
//
// Contenders run in turn, see turns.h. Status: see sections.h.
#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "benchmarks/dist/futex_peer.h"
#include "benchmarks/dist/host_sections.h"
#include "benchmarks/dist/job.h"
#include "benchmarks/dist/nearest_cpus.h"
#include "benchmarks/dist/sections.h"
#include "benchmarks/dist/turns.h"

namespace heddle::bench_dist {
namespace {

using bench::BarReport;

constexpr std::size_t kShort = 4096;

void CopyThereAndBack(const void* out, void* there, void* back) {
  constexpr std::size_t kSlice = 1 << 20;  // the second copy finds it in the cache
  for (std::size_t at = 0; at < kLong; at += kSlice) {
    std::memcpy(static_cast<char*>(there) + at, static_cast<const char*>(out) + at, kSlice);
    std::memcpy(static_cast<char*>(back) + at, static_cast<char*>(there) + at, kSlice);
  }
}

void MeasureLarge(BarReport& report, bool quick) {
  const Job job({.shared_memory = true});
  const Job tcp_job({.shared_memory = false});
  const std::unique_ptr<Worker> worker = job.Join();
  const std::unique_ptr<Worker> tcp_worker = tcp_job.Join();
  NearbyPlaces places([&](int cpu) {
    job.Pin(cpu);
    tcp_job.Pin(cpu);
  });
  std::vector<char> out(kLong), there(kLong), back(kLong);
  // In huge pages, as the store's arrays have them.
  const NDArray huge_out = worker->Array(kLong), huge_there = worker->Array(kLong),
                huge_back = worker->Array(kLong);
  std::vector<Contender> contenders = {
      {.name = "shared memory", .operation = PushPullOf(*worker, kLong)},
      {.name = "TCP", .operation = PushPullOf(*tcp_worker, kLong)},
      {.name = "memcpy there and back by one thread",
       .operation = [&] { CopyThereAndBack(out.data(), there.data(), back.data()); }},
      {.name = "memcpy there and back, in huge pages", .operation = [&] {
         CopyThereAndBack(huge_out.data(), huge_there.data(), huge_back.data());
       }}};
  TakeTurns(contenders,
            {.rounds = quick ? 3 : 15, .operations = 3, .before_round = [&] { places.Take(); }});
  constexpr std::array<std::optional<double>, 4> kMost = {std::nullopt, 0.5, 1.0, std::nullopt};
  for (std::size_t peer = 1; peer < contenders.size(); ++peer) {
    AddBar(report, {.what = "pushpull of 64 MiB through shared memory",
                    .unit = "us",
                    .ours = contenders[0].figures,
                    .against = fmt::format("{}; {}", contenders[peer].name, places.text()),
                    .theirs = contenders[peer].figures,
                    .most = kMost[peer]});
  }
}

void MeasureSleeping(BarReport& report, bool quick) {
  FutexEcho futex;
  const Job job({.shared_memory = true});
  const std::unique_ptr<Worker> worker = job.Join();
  PinThisProcess(0);
  job.Pin(1);
  futex.process().Pin(1);
  std::vector<Contender> contenders = {
      {.name = "heddle", .operation = PushPullOf(*worker, kShort)},
      {.name = "a bare futex round trip", .operation = [&] { futex.RoundTrip(); }}};
  TakeTurns(contenders, {.rounds = quick ? 5 : 15, .operations = 500});
  AddBar(report, {.what = "pushpull of 4 KiB through shared memory, sleeping, on a CPU each",
                  .unit = "us",
                  .ours = contenders[0].figures,
                  .against = contenders[1].name,
                  .theirs = contenders[1].figures,
                  .most = 1.2});
}

void MeasurePolling(BarReport& report, bool quick) {
  const Job job({.spin = std::chrono::microseconds(50), .shared_memory = true});
  const std::unique_ptr<Worker> worker = job.Join();
  NearbyPlaces places([&job](int cpu) { job.Pin(cpu); });
  std::vector<Contender> contenders = {
      {.name = "heddle", .operation = PushPullOf(*worker, kShort)}};
  TakeTurns(contenders,
            {.rounds = quick ? 5 : 15, .operations = 2000, .before_round = [&] { places.Take(); }});
  AddLimit(report, "pushpull of 4 KiB through shared memory, polling, on a CPU each", "us",
           contenders[0].figures, 3, "a fixed limit; " + places.text());
}

}  // namespace
}  // namespace heddle::bench_dist

int main(int argc, char** argv) {
  using namespace heddle::bench_dist;  // NOLINT(google-build-using-namespace)
  constexpr Section kSections[] = {{"large", &MeasureLarge},     {"sleeping", &MeasureSleeping},
                                   {"polling", &MeasurePolling}, {"tls", &MeasureTls},
                                   {"link", &MeasureLink},       {"overtake", &MeasureOvertake}};
  return RunSections(argc, argv, kSections);
}
