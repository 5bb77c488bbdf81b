// How fast the TCP transport is by itself, without stores: echoes over loopback, two processes.
//
//   bench_tcp [--json FILE] [--quick] [SECTION...]
//
// latency  4 KiB, sleeping waits, back to back and with pauses of 500 us, beside a bare Boost.Asio
//          echo and blocking sockets.
// polling  the same with polling on both sides, against fixed limits.
// large    1, 16 and 64 MiB by slices, beside blocking sockets by slices of 256 KiB and 1 MiB, with
//          and without TCP_NOTSENT_LOWAT; each process pinned to a CPU. Also CPU seconds per GB.
// small    1 000 messages of 256 bytes answered, then 1 000 asked for, beside one at a time.
// urgent   4 KiB behind 20 MB of lower priority, beside 4 KiB alone, and the 20 MB alone.
//
// All contenders run in turn, a little each, round after round; a round gives a ratio, and what
// counts is the median of those. Status 1: a bar falls short.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/check.h"
#include "benchmarks/dist/echo_peers.h"
#include "benchmarks/support/bars.h"
#include "kvstore/dist/transport/tcp/tcp_transport.h"

namespace heddle::bench_dist {
namespace {

using namespace kvstore::dist;  // NOLINT(google-build-using-namespace)
using bench::BarReport;
using bench::Median;
using Clock = std::chrono::steady_clock;

constexpr NodeId kServer{Role::kServer, 0};
constexpr NodeId kWorker{Role::kWorker, 0};
constexpr std::size_t kMiB = 1 << 20;
constexpr std::chrono::microseconds kSpin{50};
constexpr std::chrono::microseconds kPause{500};

double Microseconds(Clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

TcpOptions OptionsOf(NodeId self, std::chrono::microseconds spin) {
  TcpOptions options;
  options.self = self;
  options.incarnation = static_cast<Incarnation>(self.role);
  options.listen = self == kServer;
  options.reception = self == kServer ? Reception::kThread : Reception::kCallersFirst;
  options.spin = spin;
  return options;
}

// Answers a push-pull with its payload, a push with nothing, a pull with 256 bytes.
class EchoServer : public TransportEvents {
 public:
  explicit EchoServer(std::chrono::microseconds spin)
      : transport(TcpTransport::Create(OptionsOf(kServer, spin), *this)) {}

  std::shared_ptr<Landing> OnHeader(NodeId, const Message&, std::uint64_t) override {
    return nullptr;
  }
  void OnMessage(NodeId from, Message message) override {
    const Kind kind = message.kind;
    message.kind = kind == Kind::kPush ? Kind::kDone : Kind::kValue;
    if (kind == Kind::kPush) message.payload = {};
    if (kind == Kind::kPull) message.payload = Payload(nullptr, value_);
    transport->Send(from, std::move(message));
  }
  void OnLost(NodeId, const std::string&, const std::string&) override {}

  std::unique_ptr<TcpTransport> transport;

 private:
  static constexpr std::byte kValue[256]{};
  const std::span<const std::byte> value_{kValue};
};

ServerProcess::Serve HeddleServer(std::chrono::microseconds spin) {
  return [spin](const auto& ready) {
    EchoServer server(spin);
    ready(server.transport->address());
    for (;;) pause();
  };
}

class HeddleClient : public EchoClient, public TransportEvents {
 public:
  HeddleClient(const std::string& address, std::chrono::microseconds spin)
      : transport(TcpTransport::Create(OptionsOf(kWorker, spin), *this)) {
    transport->Connect(kServer, address, Clock::now() + std::chrono::seconds(10));
  }
  ~HeddleClient() override { transport->Close(); }

  // Slices as dist stores cut them.
  void RoundTrip(std::span<const std::byte> out, std::span<std::byte> in) override {
    const std::size_t slice = out.size() > 4 * kMiB ? kMiB : kMiB / 4;
    in_ = in;
    slice_ = slice;
    std::size_t messages = 0;
    for (std::size_t at = 0; at < out.size(); at += slice) {
      Send(Kind::kPushPull, messages++, out.subspan(at, std::min(slice, out.size() - at)), 0);
    }
    WaitFor(messages);
    in_ = {};
  }

  void Send(Kind kind, std::uint64_t sequence, std::span<const std::byte> bytes,
            std::int32_t priority) {
    Message message{.kind = kind};
    message.sequence = sequence;
    message.priority = priority;
    if (!bytes.empty()) message.payload = Payload(nullptr, bytes);
    transport->Send(kServer, std::move(message));
  }
  // So many more answers.
  void WaitFor(std::size_t messages) {
    expected_ += messages;
    while (received_.load(std::memory_order_acquire) < expected_) {
      transport->RunOne(Clock::time_point::max());
    }
  }
  // Until the answer to `sequence` has come; it was sent a number of answers ago.
  void WaitForOne(std::uint64_t sequence) {
    while (last_urgent_.load(std::memory_order_acquire) != sequence) {
      transport->RunOne(Clock::time_point::max());
    }
  }

  std::shared_ptr<Landing> OnHeader(NodeId, const Message& header, std::uint64_t bytes) override {
    if (in_.empty()) return nullptr;
    return std::make_shared<InPlace>(in_.subspan(header.sequence * slice_, bytes));
  }
  void OnMessage(NodeId, Message message) override {
    if (message.priority > 0) last_urgent_.store(message.sequence, std::memory_order_release);
    received_.fetch_add(1, std::memory_order_release);
    transport->Interrupt();  // it may not be the waiting thread that handles this
  }
  void OnLost(NodeId, const std::string&, const std::string& why) override {
    CHECK(false, "lost the server: {}", why);
  }

  std::unique_ptr<TcpTransport> transport;

 private:
  class InPlace : public Landing {
   public:
    explicit InPlace(std::span<std::byte> run) : run_(run) {}
    std::span<const std::span<std::byte>> runs() override { return {&run_, 1}; }
    bool BeginRead() override { return true; }
    void EndRead() override {}
    Payload Finish() override { return {nullptr, run_}; }

   private:
    const std::span<std::byte> run_;
  };

  std::span<std::byte> in_;
  std::size_t slice_ = 0;
  std::size_t expected_ = 0;
  std::atomic<std::size_t> received_{0};
  std::atomic<std::uint64_t> last_urgent_{~std::uint64_t{0}};
};

struct Contender {
  std::string name;
  std::unique_ptr<ServerProcess> server;
  std::function<std::unique_ptr<EchoClient>(const std::string&)> connect;
  std::unique_ptr<EchoClient> client{};
  std::vector<double> figures{};  // one a round
  std::vector<double> all{};      // of single operations
  std::vector<double> cpu{};      // seconds a round, both processes
};

Contender Heddle(std::chrono::microseconds spin) {
  return {.name = "heddle",
          .server = std::make_unique<ServerProcess>(HeddleServer(spin)),
          .connect = [spin](const std::string& address) {
            return std::make_unique<HeddleClient>(address, spin);
          }};
}

Contender Plain(PlainOptions options) {
  return {
      .name = fmt::format("plain sockets, slices of {}{}", bench::BytesText(options.slice_bytes),
                          options.unsent_bytes > 0 ? ", TCP_NOTSENT_LOWAT" : ""),
      .server = std::make_unique<ServerProcess>(PlainServer(options)),
      .connect = [options](const std::string& address) { return ConnectPlain(address, options); }};
}

Contender Asio(std::size_t bytes) {
  return {.name = "a bare Boost.Asio echo",
          .server = std::make_unique<ServerProcess>(AsioServer(bytes)),
          .connect = ConnectAsio};
}

// Servers are processes forked before there are threads; then clients may have threads.
void ConnectAll(std::vector<Contender>& contenders) {
  for (Contender& contender : contenders) {
    contender.client = contender.connect(contender.server->address());
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

// ---- Sections

void MeasureEchoes(std::vector<Contender>& contenders, bool pauses, int rounds, int operations) {
  const std::vector<std::byte> out(4096, std::byte{7});
  std::vector<std::byte> in(out.size());
  for (Contender& contender : contenders) {
    contender.figures.clear();
    contender.all.clear();
  }
  for (int round = -1; round < rounds; ++round) {
    for (Contender& contender : contenders) {
      std::vector<double> times;
      for (int i = 0; i < operations; ++i) {
        if (pauses) std::this_thread::sleep_for(kPause);
        const auto begin = Clock::now();
        contender.client->RoundTrip(out, in);
        times.push_back(Microseconds(Clock::now() - begin));
      }
      if (round < 0) continue;
      contender.figures.push_back(Median(times));
      contender.all.insert(contender.all.end(), times.begin(), times.end());
    }
  }
}

void MeasureLatency(BarReport& report, bool quick) {
  std::vector<Contender> contenders;
  contenders.push_back(Heddle({}));
  contenders.push_back(Asio(4096));
  contenders.push_back(Plain({}));
  ConnectAll(contenders);
  for (const bool pauses : {false, true}) {
    MeasureEchoes(contenders, pauses, quick ? 5 : 15, pauses ? 100 : 500);
    const Contender& ours = contenders[0];
    const Contender& asio = contenders[1];
    const auto ratios = Ratios(ours.figures, asio.figures);
    const std::string what =
        fmt::format("echo of 4 KiB, sleeping, {}", pauses ? "pauses of 500 us" : "back to back");
    report.Add({{"what", what + ", median"},
                {"ours", Median(ours.figures)},
                {"unit", "us"},
                {"against", asio.name},
                {"limit", Median(asio.figures)},
                {"ratio", Median(ratios)},
                {"spread", bench::Spread(ratios)},
                {"bar", "<= 1.2"},
                {"holds", Median(ratios) <= 1.2},
                {"plain sockets", Median(contenders[2].figures)}});
    const double p99 = Percentile(ours.all, 0.99);
    const double limit = Percentile(asio.all, 0.99);
    report.Add({{"what", what + ", p99"},
                {"ours", p99},
                {"unit", "us"},
                {"against", asio.name},
                {"limit", limit},
                {"ratio", p99 / limit},
                {"spread", {p99 / limit, p99 / limit}},
                {"bar", "<= 2"},
                {"holds", p99 <= 2 * limit}});
  }
}

void MeasurePolling(BarReport& report, bool quick) {
  std::vector<Contender> contenders;
  contenders.push_back(Heddle(kSpin));
  ConnectAll(contenders);
  const Contender& ours = contenders[0];
  for (const bool pauses : {false, true}) {
    MeasureEchoes(contenders, pauses, quick ? 5 : 15, pauses ? 100 : 500);
    const double limit = pauses ? 30 : 15;
    const double median = Median(ours.figures);
    report.Add({{"what", fmt::format("echo of 4 KiB, polling, {}",
                                     pauses ? "pauses of 500 us" : "back to back")},
                {"ours", median},
                {"unit", "us"},
                {"against", "a fixed limit"},
                {"limit", limit},
                {"ratio", median / limit},
                {"spread", bench::Spread(ours.figures)},
                {"bar", "<= 1"},
                {"holds", median <= limit}});
  }
}

double OwnCpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

void MeasureLargeOf(std::size_t bytes, std::vector<Contender>& contenders, int rounds,
                    BarReport& report) {
  std::vector<std::byte> out(bytes);
  std::vector<std::byte> in(bytes);
  const int operations = static_cast<int>(std::max<std::size_t>(1, 16 * kMiB / bytes));
  for (Contender& contender : contenders) {
    contender.figures.clear();
    contender.cpu.clear();
  }
  for (int round = -1; round < rounds; ++round) {
    for (Contender& contender : contenders) {
      for (std::size_t i = 0; i < bytes; i += 4096)
        out[i] = static_cast<std::byte>(round + i / 4096);
      const double cpu = OwnCpuSeconds() + contender.server->CpuSeconds();
      const auto begin = Clock::now();
      for (int i = 0; i < operations; ++i) contender.client->RoundTrip(out, in);
      const double time = Microseconds(Clock::now() - begin) / 1e3 / operations;
      const double cpu_time = OwnCpuSeconds() + contender.server->CpuSeconds() - cpu;
      CHECK(in == out, "{}: other bytes came back", contender.name);
      if (round < 0) continue;
      contender.figures.push_back(time);
      contender.cpu.push_back(cpu_time / operations);
    }
  }
  const Contender& ours = contenders[0];
  const auto best = std::min_element(
      contenders.begin() + 1, contenders.end(),
      [](const auto& a, const auto& b) { return Median(a.figures) < Median(b.figures); });
  const auto ratios = Ratios(ours.figures, best->figures);
  report.Add({{"what", fmt::format("echo of {} by slices, pinned", bench::BytesText(bytes))},
              {"ours", Median(ours.figures)},
              {"unit", "ms"},
              {"against", best->name},
              {"limit", Median(best->figures)},
              {"ratio", Median(ratios)},
              {"spread", bench::Spread(ratios)},
              {"bar", "<= 1"},
              {"holds", Median(ratios) <= 1}});
  const double gigabytes = 2 * static_cast<double>(bytes) / 1e9;
  const auto cpu_ratios = Ratios(ours.cpu, best->cpu);
  report.Add({{"what", fmt::format("the same of {}, CPU", bench::BytesText(bytes))},
              {"ours", Median(ours.cpu) / gigabytes},
              {"unit", "s/GB"},
              {"against", best->name},
              {"limit", Median(best->cpu) / gigabytes},
              {"ratio", Median(cpu_ratios)},
              {"spread", bench::Spread(cpu_ratios)},
              {"bar", "<= 1.5"},
              {"holds", Median(cpu_ratios) <= 1.5}});
}

void MeasureLarge(BarReport& report, bool quick) {
  std::vector<Contender> contenders;
  contenders.push_back(Heddle({}));
  for (const std::size_t slice : {kMiB / 4, kMiB}) {
    for (const int unsent : {0, 16 << 10}) {
      contenders.push_back(Plain({.slice_bytes = slice, .unsent_bytes = unsent}));
    }
  }
  PinThisThread(0);
  ConnectAll(contenders);
  for (const Contender& contender : contenders) contender.server->Pin(1);
  for (const std::size_t bytes : {kMiB, 16 * kMiB, 64 * kMiB}) {
    MeasureLargeOf(bytes, contenders, quick ? 5 : 11, report);
  }
  PinThisThread(-1);
}

void MeasureSmall(BarReport& report, bool quick) {
  constexpr int kKeys = 1000;
  const Contender contender = Heddle({});
  HeddleClient client(contender.server->address(), {});
  const std::vector<std::byte> value(256);
  std::vector<double> together;
  std::vector<double> apart;
  for (int round = -1; round < (quick ? 5 : 15); ++round) {
    auto begin = Clock::now();
    for (const Kind kind : {Kind::kPush, Kind::kPull}) {
      for (int key = 0; key < kKeys; ++key) {
        client.Send(kind, key, kind == Kind::kPush ? std::span(value) : std::span<std::byte>{}, 0);
      }
    }
    client.WaitFor(2 * kKeys);
    const double time = Microseconds(Clock::now() - begin);
    begin = Clock::now();
    constexpr int kSample = 50;
    for (int i = 0; i < kSample; ++i) {
      client.Send(Kind::kPush, i, value, 0);
      client.WaitFor(1);
      client.Send(Kind::kPull, i, {}, 0);
      client.WaitFor(1);
    }
    if (round < 0) continue;
    together.push_back(time);
    apart.push_back(Microseconds(Clock::now() - begin) * kKeys / kSample);
  }
  const auto ratios = Ratios(apart, together);
  report.Add({{"what", "1 000 messages of 256 bytes there and back"},
              {"ours", Median(together)},
              {"unit", "us"},
              {"against", "one round trip each"},
              {"limit", Median(apart)},
              {"ratio", Median(ratios)},
              {"spread", bench::Spread(ratios)},
              {"bar", ">= 100"},
              {"holds", Median(ratios) >= 100}});
}

void MeasureUrgent(BarReport& report, bool quick) {
  const Contender contender = Heddle({});
  HeddleClient client(contender.server->address(), {});
  const std::vector<std::byte> urgent(4096);
  const std::vector<std::byte> bulk(kMiB);
  constexpr int kBulk = 20;
  std::vector<double> alone;
  std::vector<double> behind;
  std::vector<double> bulk_alone;
  std::vector<double> bulk_with;
  std::uint64_t sequence = 0;
  for (int round = -1; round < (quick ? 10 : 40); ++round) {
    for (const bool with_bulk : {false, true}) {
      for (const bool with_urgent : {false, true}) {
        if (!with_bulk && !with_urgent) continue;
        const auto begin = Clock::now();
        for (int i = 0; with_bulk && i < kBulk; ++i) client.Send(Kind::kPush, i, bulk, -1);
        if (with_urgent) {
          const auto sent = Clock::now();
          client.Send(Kind::kPushPull, ++sequence, urgent, 1);
          client.WaitForOne(sequence);
          if (round >= 0) (with_bulk ? behind : alone).push_back(Microseconds(Clock::now() - sent));
        }
        client.WaitFor((with_bulk ? kBulk : 0) + (with_urgent ? 1 : 0));
        if (round < 0 || !with_bulk) continue;
        (with_urgent ? bulk_with : bulk_alone).push_back(Microseconds(Clock::now() - begin) / 1e3);
      }
    }
  }
  const auto ratios = Ratios(behind, alone);
  report.Add({{"what", "4 KiB there and back behind 20 MB of lower priority"},
              {"ours", Median(behind)},
              {"unit", "us"},
              {"against", "4 KiB alone"},
              {"limit", Median(alone)},
              {"ratio", Median(ratios)},
              {"spread", bench::Spread(ratios)},
              {"bar", "<= 2"},
              {"holds", Median(ratios) <= 2}});
  const auto bulk_ratios = Ratios(bulk_with, bulk_alone);
  report.Add({{"what", "20 MB with 4 KiB of higher priority among them"},
              {"ours", Median(bulk_with)},
              {"unit", "ms"},
              {"against", "20 MB alone"},
              {"limit", Median(bulk_alone)},
              {"ratio", Median(bulk_ratios)},
              {"spread", bench::Spread(bulk_ratios)},
              {"bar", "<= 1.05"},
              {"holds", Median(bulk_ratios) <= 1.05}});
}

int Main(int argc, char** argv) {
  BarReport report;
  const std::vector<std::pair<std::string, void (*)(BarReport&, bool)>> sections = {
      {"latency", &MeasureLatency}, {"polling", &MeasurePolling}, {"large", &MeasureLarge},
      {"small", &MeasureSmall},     {"urgent", &MeasureUrgent},
  };
  std::vector<std::string> names;
  for (const auto& [name, measure] : sections) names.push_back(name);
  const auto arguments = bench::ParseArguments(argc, argv, report, names);
  if (!arguments) return 2;
  for (const auto& [name, measure] : sections) {
    const auto& wanted = arguments->sections;
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), name) == wanted.end()) continue;
    measure(report, arguments->quick);
  }
  return report.all_hold() ? 0 : 1;
}

}  // namespace
}  // namespace heddle::bench_dist

int main(int argc, char** argv) { return heddle::bench_dist::Main(argc, argv); }
