// The store dist_sync with one worker and one server, three processes on loopback, beside sockets
// that move the same bytes.
//
//   bench_dist_store [--json FILE] [--quick] [SECTION...]
//
// latency  pushpull of 4 KiB until it can be read, back to back and with pauses of 500 us, beside a
//          bare Boost.Asio echo.
// large    pushpull of 1, 16 and 64 MiB, beside plain sockets by slices, with and without
//          TCP_NOTSENT_LOWAT; the worker pinned to one CPU, the servers to another.
// small    1 000 keys of 256 bytes pushed and pulled, beside one round trip each.
//
// All contenders run in turn, a little each, round after round; a round gives a ratio, and what
// counts is the median of those. Status 1: a bar falls short.
#include <heddle/engine.h>
#include <heddle/kvstore.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/check.h"
#include "benchmarks/dist/echo_peers.h"
#include "benchmarks/support/bars.h"
#include "kvstore/dist/run.h"
#include "kvstore/dist/scheduler_node.h"
#include "kvstore/dist/worker/dist_kvstore.h"
#include "kvstore/dist/worker/worker_node.h"

namespace heddle::bench_dist {
namespace {

using namespace kvstore::dist;  // NOLINT(google-build-using-namespace)
using bench::BarReport;
using bench::Median;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kMiB = 1 << 20;
constexpr std::chrono::microseconds kPause{500};

double Microseconds(Clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

DistOptions OptionsOf(DistRole role, const std::string& root) {
  DistOptions options;
  options.role = role;
  options.root_host = "127.0.0.1";
  if (!root.empty()) options.root_port = std::stoi(root.substr(root.rfind(':') + 1));
  options.num_workers = 1;
  options.num_servers = 1;
  return options;
}

// A scheduler and a server, forked, and the worker that this process is.
class Job {
 public:
  Job()
      : scheduler_([](const auto& ready) {
          const DistOptions options = OptionsOf(DistRole::kScheduler, "");
          SchedulerNode node(options, TcpTransports(options));
          ready(node.address());
          node.Run();
        }),
        server_([root = scheduler_.address()](const auto& ready) {
          ready("none");
          RunServer(OptionsOf(DistRole::kServer, root));
        }) {}

  void Pin(int cpu) const { server_.Pin(cpu); }

  // After all processes are forked.
  void Join() {
    const DistOptions options = OptionsOf(DistRole::kWorker, scheduler_.address());
    node_ = WorkerNode::Join(options, TcpTransports(options));
    engine_ = std::make_unique<Engine>();
    store_ = MakeDistStore(*engine_, "dist_sync", node_, node_->NewStore());
  }
  ~Job() {
    if (store_ == nullptr) return;
    store_.reset();
    engine_.reset();
    node_->Close();
  }

  KVStore& store() { return *store_; }
  Engine& engine() { return *engine_; }
  NDArray Array(std::size_t bytes) {
    return NDArray::Zeros({static_cast<std::int64_t>(bytes / 4)}, DType::kFloat32, Cpu(), *engine_);
  }

 private:
  ServerProcess scheduler_;
  ServerProcess server_;
  std::shared_ptr<WorkerNode> node_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<KVStore> store_;
};

// All processes: forked before the first engine is made and the first thread started.
struct Processes {
  Processes() {
    for (const std::size_t slice : {kMiB / 4, kMiB}) {
      for (const int unsent : {0, 16 << 10}) {
        const PlainOptions options{.slice_bytes = slice, .unsent_bytes = unsent};
        plain.emplace_back(options, std::make_unique<ServerProcess>(PlainServer(options)));
      }
    }
    job.Join();
  }

  Job job;
  const ServerProcess asio{AsioServer(4096)};
  std::vector<std::pair<PlainOptions, std::unique_ptr<ServerProcess>>> plain;
};

// Something that is timed in turn with others.
struct Contender {
  std::string name;
  std::function<void()> operation;
  std::vector<double> figures{};  // us, one a round
  std::vector<double> all{};      // of single operations
};

void Measure(std::vector<Contender>& contenders, int rounds, int operations, bool pauses) {
  for (int round = -1; round < rounds; ++round) {
    for (Contender& contender : contenders) {
      std::vector<double> times;
      for (int i = 0; i < operations; ++i) {
        if (pauses) std::this_thread::sleep_for(kPause);
        const auto begin = Clock::now();
        contender.operation();
        times.push_back(Microseconds(Clock::now() - begin));
      }
      if (round < 0) continue;
      contender.figures.push_back(Median(times));
      contender.all.insert(contender.all.end(), times.begin(), times.end());
    }
  }
}

double Percentile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1))];
}

std::vector<double> Ratios(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < a.size(); ++i) ratios.push_back(a[i] / b[i]);
  return ratios;
}

void AddBar(BarReport& report, const std::string& what, const std::string& unit, double ours,
            const std::string& against, double limit, const std::vector<double>& ratios, double bar,
            bool at_least = false) {
  const double ratio = Median(ratios);
  report.Add({{"what", what},
              {"ours", ours},
              {"unit", unit},
              {"against", against},
              {"limit", limit},
              {"ratio", ratio},
              {"spread", bench::Spread(ratios)},
              {"bar", fmt::format("{} {}", at_least ? ">=" : "<=", bar)},
              {"holds", at_least ? ratio >= bar : ratio <= bar}});
}

void MeasureLatency(Processes& processes, BarReport& report, bool quick) {
  Job& job = processes.job;
  const std::unique_ptr<EchoClient> asio_client = ConnectAsio(processes.asio.address());
  const NDArray value = job.Array(4096);
  const NDArray out = job.Array(4096);
  job.store().Init("latency", value);
  const std::vector<std::byte> bytes(4096);
  std::vector<std::byte> back(4096);
  for (const bool pauses : {false, true}) {
    std::vector<Contender> contenders = {{.name = "heddle",
                                          .operation =
                                              [&] {
                                                job.store().PushPull("latency", value, out);
                                                out.WaitToRead();
                                              }},
                                         {.name = "a bare Boost.Asio echo", .operation = [&] {
                                            asio_client->RoundTrip(bytes, back);
                                          }}};
    Measure(contenders, quick ? 5 : 15, pauses ? 100 : 500, pauses);
    const std::string what = fmt::format("pushpull of 4 KiB, sleeping, {}",
                                         pauses ? "pauses of 500 us" : "back to back");
    AddBar(report, what + ", median", "us", Median(contenders[0].figures), contenders[1].name,
           Median(contenders[1].figures), Ratios(contenders[0].figures, contenders[1].figures),
           1.2);
    const double p99 = Percentile(contenders[0].all, 0.99);
    const double limit = Percentile(contenders[1].all, 0.99);
    AddBar(report, what + ", p99", "us", p99, contenders[1].name, limit, {p99 / limit}, 2);
  }
}

void MeasureLarge(Processes& processes, BarReport& report, bool quick) {
  Job& job = processes.job;
  const auto& plain = processes.plain;
  PinThisThread(0);
  job.Pin(1);
  std::vector<std::unique_ptr<EchoClient>> clients;
  for (const auto& [options, server] : plain) {
    server->Pin(1);
    clients.push_back(ConnectPlain(server->address(), options));
  }
  for (const std::size_t bytes : {kMiB, 16 * kMiB, 64 * kMiB}) {
    const NDArray value = job.Array(bytes);
    const NDArray out = job.Array(bytes);
    const std::string key = bench::BytesText(bytes);
    job.store().Init(key, value);
    out.WaitToRead();
    const std::vector<std::byte> sent(bytes);
    std::vector<std::byte> back(bytes);
    std::vector<Contender> contenders = {{.name = "heddle", .operation = [&] {
                                            job.store().PushPull(key, value, out);
                                            out.WaitToRead();
                                          }}};
    for (std::size_t i = 0; i < plain.size(); ++i) {
      contenders.push_back(
          {.name = fmt::format("plain sockets, slices of {}{}",
                               bench::BytesText(plain[i].first.slice_bytes),
                               plain[i].first.unsent_bytes > 0 ? ", TCP_NOTSENT_LOWAT" : ""),
           .operation = [&, i] { clients[i]->RoundTrip(sent, back); }});
    }
    Measure(contenders, quick ? 5 : 11,
            static_cast<int>(std::max<std::size_t>(1, 16 * kMiB / bytes)), false);
    const auto best = std::min_element(
        contenders.begin() + 1, contenders.end(),
        [](const auto& a, const auto& b) { return Median(a.figures) < Median(b.figures); });
    AddBar(report, fmt::format("pushpull of {}, pinned", bench::BytesText(bytes)), "us",
           Median(contenders[0].figures), best->name, Median(best->figures),
           Ratios(contenders[0].figures, best->figures), 1);
  }
  job.Pin(-1);
  PinThisThread(-1);
}

void MeasureSmall(Processes& processes, BarReport& report, bool quick) {
  constexpr int kKeys = 1000;
  Job& job = processes.job;
  std::vector<std::string> names;
  for (int key = 0; key < kKeys; ++key) names.push_back(std::to_string(key));
  std::vector<NDArray> values;
  std::vector<NDArray> outs;
  for (int key = 0; key < kKeys; ++key) {
    values.push_back(job.Array(256));
    outs.push_back(job.Array(256));
    job.store().Init(names[key], values.back());
  }
  std::vector<Contender> contenders = {{.name = "heddle",
                                        .operation =
                                            [&] {
                                              for (int key = 0; key < kKeys; ++key)
                                                job.store().Push(names[key], values[key]);
                                              for (int key = 0; key < kKeys; ++key)
                                                job.store().Pull(names[key], outs[key]);
                                              for (const NDArray& out : outs) out.WaitToRead();
                                            }},
                                       {.name = "one round trip each", .operation = [&] {
                                          for (int key = 0; key < kKeys / 20; ++key) {
                                            job.store().Push(names[key], values[key]);
                                            job.engine().WaitForAll();
                                            job.store().Pull(names[key], outs[key]);
                                            outs[key].WaitToRead();
                                          }
                                        }}};
  Measure(contenders, quick ? 5 : 15, 1, false);
  for (double& time : contenders[1].figures) time *= 20;
  AddBar(report, "1 000 keys of 256 bytes pushed and pulled", "us", Median(contenders[0].figures),
         contenders[1].name, Median(contenders[1].figures),
         Ratios(contenders[1].figures, contenders[0].figures), 100, /*at_least=*/true);
}

int Main(int argc, char** argv) {
  BarReport report;
  const std::vector<std::pair<std::string, void (*)(Processes&, BarReport&, bool)>> sections = {
      {"latency", &MeasureLatency}, {"large", &MeasureLarge}, {"small", &MeasureSmall}};
  std::vector<std::string> names;
  for (const auto& [name, measure] : sections) names.push_back(name);
  const auto arguments = bench::ParseArguments(argc, argv, report, names);
  if (!arguments) return 2;
  Processes processes;
  for (const auto& [name, measure] : sections) {
    const auto& wanted = arguments->sections;
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), name) == wanted.end()) continue;
    measure(processes, report, arguments->quick);
  }
  return report.all_hold() ? 0 : 1;
}

}  // namespace
}  // namespace heddle::bench_dist

int main(int argc, char** argv) { return heddle::bench_dist::Main(argc, argv); }
