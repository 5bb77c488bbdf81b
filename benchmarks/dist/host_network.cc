// Hosts far apart, and a slow link: a network in user space (TestNetwork), in a process of its own.
// Its hosts are namespaces of this machine: the scheduler's, the server's and the worker's.
#include <chrono>
#include <cstddef>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <unistd.h>

#include "benchmarks/dist/contests.h"
#include "benchmarks/dist/host_sections.h"
#include "benchmarks/dist/job.h"
#include "benchmarks/dist/turns.h"
#include "tools/testing/test_network.h"

namespace heddle::bench_dist {
namespace {

using tools::TestNetwork;

constexpr int kHosts = 3;
constexpr const char* kServerAddress = "10.77.0.2";

// A process that plays the network; nothing of it stays when that is killed.
class NetworkProcess {
 public:
  explicit NetworkProcess(const TestNetwork::Link& link)
      : process_([&](const auto& ready) {
          const TestNetwork network(kHosts, 1, link, /*seed=*/1);
          std::string files;
          for (int host = 1; host <= kHosts; ++host) files += network.FileOf(host) + " ";
          ready(files);
          for (;;) pause();
        }) {
    std::istringstream files(process_.address());
    for (std::string file; files >> file;) hosts_.push_back(file);
  }

  // As JobShape has them.
  const std::vector<std::string>& hosts() const { return hosts_; }

 private:
  ServerProcess process_;
  std::vector<std::string> hosts_;
};

// Whether this machine can be a network; else the report says why not.
bool CanBeNetwork(bench::BarReport& report) {
  const std::string why_not = TestNetwork::WhyNot();
  if (!why_not.empty()) report.AddMissing(why_not);
  return why_not.empty();
}

}  // namespace

void MeasureLink(bench::BarReport& report, bool quick) {
  if (!CanBeNetwork(report)) return;
  constexpr double kBitsPerSecond = 1e9;
  constexpr int kKeys = 100;
  // Two times what is under way: a sender that is told of losses late loses no time.
  const NetworkProcess network({.delay = std::chrono::milliseconds(5),
                                .bits_per_second = kBitsPerSecond,
                                .queue_bytes = 2'500'000,
                                .mtu = 9000});
  const Job job({.hosts = network.hosts()});
  PlainPeers plain(kSystemKinds, network.hosts()[1], kServerAddress);
  const std::unique_ptr<Worker> worker = job.Join();
  plain.Connect();
  KVStore& store = worker->store();
  std::vector<std::string> names;
  std::vector<NDArray> values;
  std::vector<NDArray> outs;
  constexpr std::size_t kBytes = kLong / kKeys / sizeof(float) * sizeof(float);
  for (int key = 0; key < kKeys; ++key) {
    names.push_back(std::to_string(key));
    values.push_back(worker->Array(kBytes));
    outs.push_back(worker->Array(kBytes));
    store.Init(names.back(), values.back());
  }
  const std::vector<std::byte> out(kBytes * kKeys);
  std::vector<std::byte> in(kBytes * kKeys);
  std::vector<Contender> contenders = {{.name = "heddle", .operation = [&] {
                                          for (int key = 0; key < kKeys; ++key) {
                                            store.PushPull(names[key], values[key], outs[key]);
                                          }
                                          for (const NDArray& each : outs) each.WaitToRead();
                                        }}};
  plain.AddTo(contenders, out, in);
  TakeTurns(contenders, {.rounds = quick ? 2 : 7, .operations = 1});
  const double link = static_cast<double>(out.size()) * 8e6 / kBitsPerSecond;
  const Contender& best = BestOf(std::span(contenders).subspan(1));
  AddBar(report,
         {.what = "pushpull of 64 MiB in 100 keys, 1 Gbit/s both ways, 5 ms there and 5 ms back",
          .unit = "us",
          .ours = contenders[0].figures,
          .against = fmt::format("the link, of which {} use {:.0f}%;", best.name,
                                 100 * link / bench::Median(best.figures)),
          .theirs = std::vector<double>(contenders[0].figures.size(), link),
          .most = 1 / 0.9});
}

void MeasureOvertake(bench::BarReport& report, bool quick) {
  if (!CanBeNetwork(report)) return;
  constexpr double kBitsPerSecond = 1e8;
  constexpr std::size_t kQueueBytes = 64 << 10;
  constexpr double kSliceUs = 8e6 * (64 << 10) / kBitsPerSecond;
  constexpr int kKeys = 20;
  constexpr std::chrono::milliseconds kAmid{500};  // of 1.6 s
  const NetworkProcess network({.bits_per_second = kBitsPerSecond, .queue_bytes = kQueueBytes});
  const Job job({.hosts = network.hosts()});
  const std::unique_ptr<Worker> worker = job.Join();
  KVStore& store = worker->store();
  const NDArray bulk = worker->Array(1'000'000);
  for (int key = 0; key < kKeys; ++key) store.Init(std::to_string(key), bulk);
  const NDArray value = worker->Array(4096);
  const NDArray out = worker->Array(4096);
  store.Init("urgent", value);
  const auto urgent = [&] {
    store.PushPull("urgent", value, out, /*priority=*/1);
    out.WaitToRead();
  };
  // Right behind the calls, and when the link's queue has long been full.
  for (const auto& [when, pause] :
       {std::pair{"just behind", std::chrono::milliseconds(0)}, std::pair{"amid", kAmid}}) {
    std::vector<double> times;
    for (int round = 0; round < (quick ? 2 : 15); ++round) {
      for (int key = 0; key < kKeys; ++key) store.Push(std::to_string(key), bulk, /*priority=*/-1);
      std::this_thread::sleep_for(pause);
      times.push_back(TimeOf(urgent));
      worker->engine().WaitForAll();
    }
    AddLimit(report,
             fmt::format("pushpull of 4 KiB {} 20 keys of 1 MB of lower priority, 100 Mbit/s, "
                         "queue of {}: two slices",
                         when, bench::BytesText(kQueueBytes)),
             "us", times, 2 * kSliceUs);
  }
}

}  // namespace heddle::bench_dist
