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
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/dist/futex_peer.h"
#include "benchmarks/dist/host_sections.h"
#include "benchmarks/dist/job.h"
#include "benchmarks/dist/sections.h"
#include "benchmarks/dist/turns.h"

namespace heddle::bench_dist {
namespace {

using bench::BarReport;

constexpr std::size_t kShort = 4096;

void MeasureLarge(BarReport& report, bool quick) {
  const Job job({.shared_memory = true});
  const Job tcp_job({.shared_memory = false});
  const std::unique_ptr<Worker> worker = job.Join();
  const std::unique_ptr<Worker> tcp_worker = tcp_job.Join();
  PinThisProcess(0);
  job.Pin(1);
  tcp_job.Pin(1);
  std::vector<char> out(kLong), there(kLong), back(kLong);
  const auto copy = [&] {
    constexpr std::size_t kSlice = 1 << 20;  // the second copy finds it in the cache
    for (std::size_t at = 0; at < kLong; at += kSlice) {
      std::memcpy(there.data() + at, out.data() + at, kSlice);
      std::memcpy(back.data() + at, there.data() + at, kSlice);
    }
  };
  std::vector<Contender> contenders = {
      {.name = "shared memory", .operation = PushPullOf(*worker, kLong)},
      {.name = "TCP", .operation = PushPullOf(*tcp_worker, kLong)},
      {.name = "memcpy there and back by one thread", .operation = copy}};
  TakeTurns(contenders, {.rounds = quick ? 3 : 15, .operations = 3});
  for (const auto& [peer, most] : {std::pair{1, 0.5}, std::pair{2, 1.0}}) {
    AddBar(report, {.what = "pushpull of 64 MiB through shared memory",
                    .unit = "us",
                    .ours = contenders[0].figures,
                    .against = contenders[peer].name,
                    .theirs = contenders[peer].figures,
                    .most = most});
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
  PinThisProcess(0);
  job.Pin(1);
  std::vector<Contender> contenders = {
      {.name = "heddle", .operation = PushPullOf(*worker, kShort)}};
  TakeTurns(contenders, {.rounds = quick ? 5 : 15, .operations = 2000});
  AddLimit(report, "pushpull of 4 KiB through shared memory, polling, on a CPU each", "us",
           contenders[0].figures, 3);
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
