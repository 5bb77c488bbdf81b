// Two workers: a process each, which do the same at the same time. The limit: plain sockets that
// move the same bytes between as many processes.
#include <heddle/optimizer.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/check.h"
#include "benchmarks/dist/contests.h"
#include "benchmarks/dist/echo_peers.h"
#include "benchmarks/dist/job.h"
#include "benchmarks/dist/store_sections.h"
#include "benchmarks/dist/turns.h"
#include "benchmarks/support/resnet.h"
#include "ops/sum.h"

namespace heddle::bench_dist {

using bench::Median;

namespace {

// What a worker sends to each of its servers, and what comes back.
struct Buffers {
  explicit Buffers(const std::vector<std::size_t>& bytes) {
    for (const std::size_t each : bytes) {
      out.emplace_back(each);
      in.emplace_back(each);
    }
  }
  std::vector<std::vector<std::byte>> out;
  std::vector<std::vector<std::byte>> in;
};

// A worker's connections to a plain server each, over which bytes go there and back at once.
class PlainWorker {
 public:
  using Servers = std::vector<std::unique_ptr<ServerProcess>>;

  PlainWorker(const Servers& servers, const PlainOptions& kind, std::shared_ptr<Buffers> buffers)
      : buffers_(std::move(buffers)) {
    for (const auto& server : servers) clients_.push_back(ConnectPlain(server->address(), kind));
  }

  void Exchange() const {
    std::vector<std::jthread> others;
    for (std::size_t i = 1; i < clients_.size(); ++i) {
      others.emplace_back([this, i] { ExchangeWith(i); });
    }
    ExchangeWith(0);
  }

 private:
  void ExchangeWith(std::size_t server) const {
    clients_[server]->RoundTrip(buffers_->out[server], buffers_->in[server]);
  }

  const std::shared_ptr<Buffers> buffers_;  // shared by the kinds of plain sockets
  std::vector<std::unique_ptr<EchoClient>> clients_;
};

// What a worker does, by itself: first heddle's task, then one of each kind of plain sockets. Made
// in the process of the worker.
struct Share {
  std::unique_ptr<Worker> worker;
  std::function<void()> heddle;
  std::vector<std::unique_ptr<PlainWorker>> plain;

  Partner::Tasks tasks() const {
    Partner::Tasks tasks = {heddle};
    for (const auto& each : plain) tasks.push_back([&each] { each->Exchange(); });
    return tasks;
  }
};

using PlainServers = std::vector<PlainWorker::Servers>;  // by kind

PlainServers MakePlainServers(int servers) {
  PlainServers all;
  for (const PlainOptions& kind : PlainKinds()) {
    all.emplace_back();
    for (int i = 0; i < servers; ++i) {
      all.back().push_back(std::make_unique<ServerProcess>(PlainServer(kind)));
    }
  }
  return all;
}

void Connect(Share& share, const PlainServers& servers, const std::vector<std::size_t>& bytes) {
  const auto buffers = std::make_shared<Buffers>(bytes);
  for (std::size_t i = 0; i < servers.size(); ++i) {
    share.plain.push_back(std::make_unique<PlainWorker>(servers[i], PlainKinds()[i], buffers));
  }
}

// Two workers, of which one is this process, with a job's servers and plain ones.
class TwoWorkers {
 public:
  // `prepare` makes a share, given its worker and what it is to connect to.
  using Prepare = std::function<void(Share&, int rank, const PlainServers&)>;
  TwoWorkers(int servers, const Prepare& prepare)
      : job_({.workers = 2, .servers = servers}), plain_(MakePlainServers(servers)) {
    const auto make = [this, &prepare](int rank) {
      auto share = std::make_shared<Share>();
      share->worker = job_.Join();
      prepare(*share, rank, plain_);
      return share;
    };
    partner_ = std::make_unique<Partner>([&] {
      const std::shared_ptr<Share> share = make(1);
      Partner::Tasks tasks = share->tasks();
      tasks[0] = [share, heddle = std::move(tasks[0])] { heddle(); };  // keeps it
      return tasks;
    });
    share_ = make(0);
    tasks_ = share_->tasks();
    for (std::size_t task = 0; task < tasks_.size(); ++task) Run(task);  // all are connected
  }
  ~TwoWorkers() {
    tasks_.clear();
    share_.reset();
    partner_.reset();
  }

  void Run(std::size_t task) const {
    partner_->Start(task);
    tasks_[task]();
    partner_->Finish();
  }

  // The servers on CPUs from that on, both workers on CPU 0; kAnywhere: all anywhere.
  void Pin(int servers) const {
    job_.Pin(servers);
    for (const PlainWorker::Servers& kind : plain_) {
      for (std::size_t i = 0; i < kind.size(); ++i) {
        kind[i]->process().Pin(servers == kAnywhere ? kAnywhere : servers + static_cast<int>(i));
      }
    }
    const int workers = servers == kAnywhere ? kAnywhere : 0;
    partner_->process().Pin(workers);
    PinThisProcess(workers);
  }

  // heddle, then the plain sockets.
  std::vector<Contender> Contenders() const {
    std::vector<Contender> contenders;
    for (std::size_t task = 0; task < tasks_.size(); ++task) {
      contenders.push_back({.name = task == 0 ? "heddle" : NameOf(PlainKinds()[task - 1]),
                            .operation = [this, task] { Run(task); },
                            .cpu_seconds =
                                [this, task] {
                                  double seconds =
                                      OwnCpuSeconds() + partner_->process().CpuSeconds();
                                  if (task == 0) return seconds + job_.CpuSeconds();
                                  for (const auto& server : plain_[task - 1])
                                    seconds += server->process().CpuSeconds();
                                  return seconds;
                                }});
    }
    return contenders;
  }

 private:
  const Job job_;
  const PlainServers plain_;
  std::unique_ptr<Partner> partner_;
  std::shared_ptr<Share> share_;
  Partner::Tasks tasks_;
};

}  // namespace

void MeasureSum(bench::BarReport& report, bool quick) {
  constexpr std::size_t kBytes = std::size_t{64} << 20;
  const TwoWorkers workers(1, [](Share& share, int rank, const PlainServers& plain) {
    Worker& worker = *share.worker;
    const NDArray value = worker.Array(kBytes, rank + 1);
    const NDArray out = worker.Array(kBytes);
    worker.store().Init("sum", out);
    share.heddle = [&worker, value, out] {
      worker.store().PushPull("sum", value, out);
      out.WaitToRead();
    };
    Connect(share, plain, {kBytes});
    if (rank != 0) return;
    share.heddle = [pushpull = std::move(share.heddle), out, first = true]() mutable {
      pushpull();
      if (!std::exchange(first, false)) return;
      const auto* const sums = out.data<float>();
      CHECK(std::all_of(sums, sums + kBytes / sizeof(float), [](float sum) { return sum == 3; }),
            "the sum of two workers is another one");
    };
  });

  const std::vector<float> a(kBytes / sizeof(float), 1);
  const std::vector<float> b(a.size(), 2);
  std::vector<float> c(a.size());
  const Contender sum = {.name = "sum", .operation = [&] {
                           ops::Sum(DType::kFloat32, std::array<const void*, 2>{a.data(), b.data()},
                                    c.data(), c.size());
                         }};
  for (const bool pinned : {true, false}) {
    workers.Pin(pinned ? 1 : kAnywhere);
    std::vector<Contender> contenders = workers.Contenders();
    contenders.push_back(sum);
    TakeTurns(contenders, {.rounds = quick ? 2 : 9, .operations = 1});
    const std::vector<double> sums = contenders.back().figures;
    contenders.pop_back();
    const Contender& ours = contenders[0];
    const char* const where = pinned ? "pinned" : "not pinned";
    ForBestPlain(contenders, [&](const Contender& best, const char* suffix) {
      std::vector<double> limit = best.figures;
      if (!pinned) {
        for (std::size_t round = 0; round < limit.size(); ++round) limit[round] += sums[round];
      }
      AddBar(report,
             {.what = fmt::format("2 workers, sum of 64 MiB, {}{}", where, suffix),
              .unit = "us",
              .ours = ours.figures,
              .against = best.name +
                         (pinned ? "" : fmt::format(", plus the sum ({:.0f} us)", Median(sums))),
              .theirs = limit,
              .most = pinned ? 1.1 : 1.25});
      AddCpuBar(report, fmt::format("the same, {}, CPU{}", where, suffix), ours, best, 4 * kBytes);
    });
  }
}

void MeasureResNet(bench::BarReport& report, bool quick) {
  const std::vector<std::int64_t> sizes = bench::ResNet50();
  const TwoWorkers workers(2, [&](Share& share, int, const PlainServers& plain) {
    Worker& worker = *share.worker;
    worker.store().SetOptimizer(Sgd({.learning_rate = 1e-6}));
    std::vector<std::string> names;
    std::vector<NDArray> gradients;
    std::vector<NDArray> outs;
    for (std::size_t key = 0; key < sizes.size(); ++key) {
      const auto bytes = static_cast<std::size_t>(sizes[key]) * sizeof(float);
      names.push_back(std::to_string(key));
      gradients.push_back(worker.Array(bytes, 0.5));
      outs.push_back(worker.Array(bytes));
      worker.store().Init(names.back(), outs.back());
    }
    share.heddle = [&worker, names, gradients, outs] {
      for (std::size_t key = 0; key < names.size(); ++key) {
        const int priority = -static_cast<int>(key);
        worker.store().Push(names[key], gradients[key], priority);
        worker.store().Pull(names[key], outs[key], priority);
      }
      for (const NDArray& out : outs) out.WaitToRead();
    };
    Connect(share, plain, worker.BytesOfServers(sizes));
  });
  std::vector<Contender> contenders = workers.Contenders();
  TakeTurns(contenders, {.rounds = quick ? 2 : 9, .operations = 1});
  const Contender& ours = contenders[0];
  const auto elements = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  ForBestPlain(contenders, [&](const Contender& best, const char* suffix) {
    AddBar(report, {.what = fmt::format("ResNet-50's {} keys, SGD on 2 servers, 2 workers{}",
                                        sizes.size(), suffix),
                    .unit = "us",
                    .ours = ours.figures,
                    .against = best.name,
                    .theirs = best.figures,
                    .most = 1.3});
    AddCpuBar(report, fmt::format("the same, CPU{}", suffix), ours, best,
              4 * sizeof(float) * static_cast<std::size_t>(elements));
  });
}

}  // namespace heddle::bench_dist
