#include "benchmarks/dist/contests.h"

#include <algorithm>

#include <fmt/format.h>

#include "benchmarks/dist/turns.h"
#include "tools/testing/test_network.h"

namespace heddle::bench_dist {

namespace {

constexpr std::size_t kShort = 4096;

const char* PauseText(bool pauses) { return pauses ? "pauses of 500 us" : "back to back"; }

Turns ShortTurns(bool pauses, bool quick) {
  return {.rounds = quick ? 5 : 15, .operations = pauses ? 100 : 500, .pauses = pauses};
}

struct Places {
  const char* name;
  int client;
  int server;
};
constexpr Places kPlaces[] = {{"on one CPU", 0, 0}, {"on a CPU each", 0, 1}};

}  // namespace

void ShortContest::Run(bench::BarReport& report, const Ours& ours, bool quick) const {
  const std::unique_ptr<EchoClient> asio = ConnectAsio(asio_.address());
  const std::function<void()> operation = ours.operation_of(kShort);
  const std::vector<std::byte> out(kShort);
  std::vector<std::byte> in(kShort);
  for (const Places& places : kPlaces) {
    PinThisProcess(places.client);
    ours.pin_server(places.server);
    asio_.process().Pin(places.server);
    for (const bool pauses : {false, true}) {
      std::vector<Contender> contenders = {
          {.name = "heddle", .operation = operation},
          {.name = "a bare Boost.Asio echo", .operation = [&] { asio->RoundTrip(out, in); }}};
      TakeTurns(contenders, ShortTurns(pauses, quick));
      const std::string what =
          fmt::format("{} of 4 KiB, sleeping, {}, {}", ours.what, places.name, PauseText(pauses));
      AddBar(report, {.what = what + ", median",
                      .unit = "us",
                      .ours = contenders[0].figures,
                      .against = contenders[1].name,
                      .theirs = contenders[1].figures,
                      .most = 1.2});
      AddBar(report, {.what = what + ", p99",
                      .unit = "us",
                      .ours = contenders[0].tails,
                      .against = contenders[1].name,
                      .theirs = contenders[1].tails,
                      .most = 2});
    }
  }
}

void RunPolling(bench::BarReport& report, const Ours& ours, bool quick) {
  const std::function<void()> operation = ours.operation_of(kShort);
  for (const bool pauses : {false, true}) {
    std::vector<Contender> contenders = {{.name = "heddle", .operation = operation}};
    TakeTurns(contenders, ShortTurns(pauses, quick));
    AddLimit(report, fmt::format("{} of 4 KiB, polling, {}", ours.what, PauseText(pauses)), "us",
             contenders[0].figures, pauses ? 30 : 15);
  }
}

PlainPeers::PlainPeers(std::span<const PlainOptions> kinds, const std::string& host,
                       const std::string& address)
    : kinds_(kinds) {
  for (const PlainOptions& kind : kinds) {
    servers_.push_back(std::make_unique<ServerProcess>([&](const auto& ready) {
      if (!host.empty()) tools::TestNetwork::Enter(host);
      PlainServer(kind, address)(ready);
    }));
  }
}

void PlainPeers::Connect() {
  for (std::size_t i = 0; i < servers_.size(); ++i) {
    clients_.push_back(ConnectPlain(servers_[i]->address(), kinds_[i]));
  }
}

void PlainPeers::Pin(int cpu) const {
  for (const auto& server : servers_) server->process().Pin(cpu);
}

void PlainPeers::AddTo(std::vector<Contender>& contenders, std::span<const std::byte> out,
                       std::span<std::byte> in) const {
  for (std::size_t i = 0; i < clients_.size(); ++i) {
    contenders.push_back(
        {.name = NameOf(kinds_[i]),
         .operation = [&client = *clients_[i], out, in] { client.RoundTrip(out, in); },
         .cpu_seconds =
             [&server = servers_[i]->process()] { return OwnCpuSeconds() + server.CpuSeconds(); }});
  }
}

void ForBestPlain(std::span<const Contender> contenders,
                  const std::function<void(const Contender& best, const char* suffix)>& report) {
  const auto plain = contenders.subspan(1);
  report(BestOf(plain.first(std::size(kSystemKinds))), "");
  const auto unpaced = plain.subspan(std::size(kSystemKinds));
  if (!unpaced.empty()) report(BestOf(unpaced), ", nobody paces");
}

void LongContest::Run(bench::BarReport& report, const Ours& ours, bool quick) {
  plain_.Pin(1);
  plain_.Connect();
  ours.pin_server(1);
  PinThisProcess(0);
  for (const std::size_t bytes : {kMiB, 16 * kMiB, 64 * kMiB}) {
    const std::vector<std::byte> out(bytes);
    std::vector<std::byte> in(bytes);
    std::vector<Contender> contenders = {
        {.name = "heddle", .operation = ours.operation_of(bytes), .cpu_seconds = [&] {
           return OwnCpuSeconds() + ours.server_cpu_seconds();
         }}};
    plain_.AddTo(contenders, out, in);
    TakeTurns(contenders,
              {.rounds = quick ? 5 : 11,
               .operations = static_cast<int>(std::max<std::size_t>(1, 16 * kMiB / bytes))});
    ForBestPlain(contenders, [&](const Contender& best, const char* suffix) {
      const std::string size = bench::BytesText(bytes);
      AddBar(report, {.what = fmt::format("{} of {}, pinned{}", ours.what, size, suffix),
                      .unit = "us",
                      .ours = contenders[0].figures,
                      .against = best.name,
                      .theirs = best.figures,
                      .most = 1});
      AddCpuBar(report, fmt::format("the same of {}, CPU{}", size, suffix), contenders[0], best,
                2 * bytes);
    });
  }
}

void RunSmall(bench::BarReport& report, const SmallContest& ours, bool quick) {
  constexpr int kSample = 50;
  std::vector<Contender> contenders = {
      {.name = "heddle", .operation = [&] { ours.together(kSmallCount); }},
      {.name = "one round trip each", .operation = [&] { ours.one_by_one(kSample); }}};
  TakeTurns(contenders, {.rounds = quick ? 5 : 15, .operations = 1});
  for (double& time : contenders[1].figures) time *= static_cast<double>(kSmallCount) / kSample;
  AddBar(report, {.what = ours.what,
                  .unit = "us",
                  .ours = contenders[0].figures,
                  .against = contenders[1].name,
                  .theirs = contenders[1].figures,
                  .most = 0.01});
}

void RunUrgent(bench::BarReport& report, const UrgentContest& ours, bool quick) {
  std::vector<double> behind;
  const auto bulk = [&] { ours.send_bulk(kBulkMebibytes); };
  std::vector<Contender> contenders = {{.name = "both",
                                        .operation =
                                            [&] {
                                              bulk();
                                              behind.push_back(TimeOf(ours.urgent));
                                              ours.wait();
                                            }},
                                       {.name = "4 KiB alone",
                                        .operation =
                                            [&] {
                                              ours.urgent();
                                              ours.wait();
                                            }},
                                       {.name = "20 MiB alone", .operation = [&] {
                                          bulk();
                                          ours.wait();
                                        }}};
  TakeTurns(contenders, {.rounds = quick ? 10 : 40, .operations = 1});
  behind.erase(behind.begin());  // of the round that does not count
  AddBar(report, {.what = fmt::format("{} of 4 KiB behind 20 MiB of lower priority", ours.what),
                  .unit = "us",
                  .ours = behind,
                  .against = contenders[1].name,
                  .theirs = contenders[1].figures,
                  .most = 2});
  AddBar(report, {.what = "20 MiB with 4 KiB of higher priority among them",
                  .unit = "us",
                  .ours = contenders[0].figures,
                  .against = contenders[2].name,
                  .theirs = contenders[2].figures,
                  .most = 1.05});
}

}  // namespace heddle::bench_dist
