#include "benchmarks/dist/turns.h"

#include <algorithm>
#include <thread>
#include <utility>

#include <fmt/format.h>

namespace heddle::bench_dist {

using bench::Median;

namespace {

double Percentile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1))];
}

}  // namespace

double TimeOf(const std::function<void()>& operation) {
  const auto begin = std::chrono::steady_clock::now();
  operation();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
      .count();
}

void TakeTurns(std::vector<Contender>& contenders, const Turns& turns) {
  for (int round = -1; round < turns.rounds; ++round) {
    if (turns.before_round) turns.before_round();
    for (Contender& contender : contenders) {
      const double cpu = contender.cpu_seconds ? contender.cpu_seconds() : 0;
      std::vector<double> times;
      for (int i = 0; i < turns.operations; ++i) {
        if (turns.pauses) std::this_thread::sleep_for(kPause);
        times.push_back(TimeOf(contender.operation));
      }
      if (round < 0) continue;
      if (contender.cpu_seconds) {
        contender.cpu.push_back((contender.cpu_seconds() - cpu) / turns.operations);
      }
      contender.figures.push_back(Median(times));
      contender.tails.push_back(Percentile(std::move(times), 0.99));
    }
  }
}

const Contender& BestOf(std::span<const Contender> contenders) {
  return *std::min_element(contenders.begin(), contenders.end(), [](const auto& a, const auto& b) {
    return Median(a.figures) < Median(b.figures);
  });
}

std::vector<double> Ratios(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < a.size(); ++i) ratios.push_back(a[i] / b[i]);
  return ratios;
}

void AddBar(bench::BarReport& report, const PairBar& bar) {
  const std::vector<double> ratios = Ratios(bar.ours, bar.theirs);
  nlohmann::json holds;
  if (bar.most) holds = Median(ratios) <= *bar.most;
  report.Add({{"what", bar.what},
              {"ours", Median(bar.ours)},
              {"unit", bar.unit},
              {"against", bar.against},
              {"limit", Median(bar.theirs)},
              {"ratio", Median(ratios)},
              {"spread", bench::Spread(ratios)},
              {"bar", bar.most ? fmt::format("<= {:g}", *bar.most) : "no bar"},
              {"holds", holds}});
}

void AddLimit(bench::BarReport& report, const std::string& what, const std::string& unit,
              const std::vector<double>& ours, double limit, const std::string& against) {
  AddBar(report, {.what = what,
                  .unit = unit,
                  .ours = ours,
                  .against = against,
                  .theirs = std::vector<double>(ours.size(), limit),
                  .most = 1});
}

void AddCpuBar(bench::BarReport& report, const std::string& what, const Contender& ours,
               const Contender& theirs, std::size_t bytes_moved) {
  const auto per_gigabyte = [&](std::vector<double> seconds) {
    for (double& each : seconds) each *= 1e9 / static_cast<double>(bytes_moved);
    return seconds;
  };
  AddBar(report, {.what = what,
                  .unit = "s/GB",
                  .ours = per_gigabyte(ours.cpu),
                  .against = theirs.name,
                  .theirs = per_gigabyte(theirs.cpu),
                  .most = 1.5});
}

}  // namespace heddle::bench_dist
