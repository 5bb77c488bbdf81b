// How fast the TCP transport is by itself, without stores: echoes over loopback, two processes.
//
//   bench_tcp [--json FILE] [--quick] [SECTION...]
//
// latency  4 KiB, sleeping waits, back to back and with pauses of 500 us, beside a bare Boost.Asio
//          echo; both on one CPU, and on a CPU each.
// polling  the same with polling on both sides, against fixed limits.
// large    1, 16 and 64 MiB by slices, beside plain sockets by slices; time and CPU seconds.
// small    1 000 messages of 256 bytes answered, then 1 000 asked for, beside one at a time.
// urgent   4 KiB behind 20 MB of lower priority, beside 4 KiB alone, and the 20 MB alone.
//
// contests.h says what each holds against what. Status 1: a bar falls short.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

#include "base/check.h"
#include "benchmarks/dist/contests.h"
#include "benchmarks/dist/echo_peers.h"
#include "benchmarks/dist/processes.h"
#include "benchmarks/dist/sections.h"
#include "benchmarks/support/bars.h"
#include "kvstore/dist/transport/tcp/tcp_transport.h"

namespace heddle::bench_dist {
namespace {

using namespace kvstore::dist;  // NOLINT(google-build-using-namespace)
using bench::BarReport;
using Clock = std::chrono::steady_clock;

constexpr NodeId kServer{Role::kServer, 0};
constexpr NodeId kWorker{Role::kWorker, 0};
constexpr std::chrono::microseconds kSpin{50};

TcpOptions OptionsOf(NodeId self, std::chrono::microseconds spin) {
  TcpOptions options;
  options.self = self;
  options.incarnation = static_cast<Incarnation>(self.role);
  options.listen = self == kServer;
  options.reception = self == kServer ? Reception::kThread : Reception::kCallersFirst;
  options.spin = spin;
  options.shared_memory = false;
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
  void OnMessage(NodeId from, Message&& message) override {
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
  void OnMessage(NodeId, Message&& message) override {
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

Ours Echoes(const ServerProcess& server, HeddleClient& client) {
  return {.what = "echo",
          .operation_of =
              [&client](std::size_t bytes) {
                std::vector<std::byte> out(bytes);
                for (std::size_t i = 0; i < bytes; ++i) out[i] = static_cast<std::byte>(i % 251);
                std::vector<std::byte> in(bytes);
                client.RoundTrip(out, in);
                CHECK(in == out, "other bytes came back");
                return [&client, out = std::move(out), in = std::move(in)]() mutable {
                  client.RoundTrip(out, in);
                };
              },
          .pin_server = [&server](int cpu) { server.process().Pin(cpu); },
          .server_cpu_seconds = [&server] { return server.process().CpuSeconds(); }};
}

// ---- Sections: servers are processes forked before there are threads; then clients may have some.

void MeasureLatency(BarReport& report, bool quick) {
  const ServerProcess server(HeddleServer({}));
  const ShortContest contest;
  HeddleClient client(server.address(), {});
  contest.Run(report, Echoes(server, client), quick);
}

void MeasurePolling(BarReport& report, bool quick) {
  const ServerProcess server(HeddleServer(kSpin));
  HeddleClient client(server.address(), kSpin);
  RunPolling(report, Echoes(server, client), quick);
}

void MeasureLarge(BarReport& report, bool quick) {
  const ServerProcess server(HeddleServer({}));
  LongContest contest;
  HeddleClient client(server.address(), {});
  contest.Run(report, Echoes(server, client), quick);
}

void MeasureSmall(BarReport& report, bool quick) {
  const ServerProcess server(HeddleServer({}));
  HeddleClient client(server.address(), {});
  const std::vector<std::byte> value(256);
  RunSmall(report,
           {.what = "1 000 messages of 256 bytes there and back",
            .together =
                [&](int messages) {
                  for (int i = 0; i < messages; ++i) client.Send(Kind::kPush, i, value, 0);
                  for (int i = 0; i < messages; ++i) client.Send(Kind::kPull, i, {}, 0);
                  client.WaitFor(2 * static_cast<std::size_t>(messages));
                },
            .one_by_one =
                [&](int messages) {
                  for (int i = 0; i < messages; ++i) {
                    client.Send(Kind::kPush, i, value, 0);
                    client.WaitFor(1);
                    client.Send(Kind::kPull, i, {}, 0);
                    client.WaitFor(1);
                  }
                }},
           quick);
}

void MeasureUrgent(BarReport& report, bool quick) {
  const ServerProcess server(HeddleServer({}));
  HeddleClient client(server.address(), {});
  const std::vector<std::byte> urgent(4096);
  const std::vector<std::byte> bulk(kMiB);
  std::uint64_t sequence = 0;
  std::size_t sent = 0;  // not yet waited for
  RunUrgent(report,
            {.what = "echo",
             .urgent =
                 [&] {
                   client.Send(Kind::kPushPull, ++sequence, urgent, 1);
                   client.WaitForOne(sequence);
                   ++sent;
                 },
             .send_bulk =
                 [&](int mebibytes) {
                   for (int i = 0; i < mebibytes; ++i) client.Send(Kind::kPush, i, bulk, -1);
                   sent += static_cast<std::size_t>(mebibytes);
                 },
             .wait = [&] { client.WaitFor(std::exchange(sent, 0)); }},
            quick);
}

constexpr Section kSections[] = {
    {"latency", &MeasureLatency}, {"polling", &MeasurePolling}, {"large", &MeasureLarge},
    {"small", &MeasureSmall},     {"urgent", &MeasureUrgent},
};

}  // namespace
}  // namespace heddle::bench_dist

int main(int argc, char** argv) {
  return heddle::bench_dist::RunSections(argc, argv, heddle::bench_dist::kSections);
}
