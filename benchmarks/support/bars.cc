#include "benchmarks/support/bars.h"

#include <algorithm>
#include <cstdio>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace heddle::bench {

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 != 0 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

std::vector<double> Spread(const std::vector<double>& values) {
  return {*std::min_element(values.begin(), values.end()),
          *std::max_element(values.begin(), values.end())};
}

std::string BytesText(std::size_t bytes) {
  return bytes >= 1 << 20 ? fmt::format("{} MiB", bytes >> 20) : fmt::format("{} KiB", bytes >> 10);
}

namespace {

const char* Verdict(const nlohmann::json& holds) {
  if (holds.is_null()) return "measured";
  return holds.get<bool>() ? "holds" : "falls short";
}

}  // namespace

bool BarReport::Open(const std::string& path) {
  json_.open(path);
  return json_.good();
}

void BarReport::Add(const nlohmann::json& bar) {
  const nlohmann::json& holds = bar.at("holds");
  all_hold_ = all_hold_ && (holds.is_null() || holds.get<bool>());
  const std::string unit = bar["unit"].get<std::string>();
  fmt::print("{}: {:.4g} {}, {} {:.4g} {}, ratio {:.2f} [{:.2f}..{:.2f}], {}\n",
             bar["what"].get<std::string>(), bar["ours"].get<double>(), unit,
             bar["against"].get<std::string>(), bar["limit"].get<double>(), unit,
             bar["ratio"].get<double>(), bar["spread"][0].get<double>(),
             bar["spread"][1].get<double>(), Verdict(holds));
  std::fflush(stdout);
  if (json_.is_open()) json_ << bar.dump() << '\n' << std::flush;
}

void BarReport::AddMissing(const std::string& what) {
  fmt::print("missing: {}\n", what);
  std::fflush(stdout);
  if (json_.is_open()) json_ << nlohmann::json{{"missing", what}}.dump() << '\n' << std::flush;
}

std::optional<BenchArguments> ParseArguments(int argc, char** argv, BarReport& report,
                                             const std::vector<std::string>& known_sections) {
  BenchArguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--json" && i + 1 < argc) {
      if (!report.Open(argv[++i])) {
        fmt::print(stderr, "{}: cannot write {}\n", argv[0], argv[i]);
        return std::nullopt;
      }
    } else if (argument == "--quick") {
      arguments.quick = true;
    } else if (std::find(known_sections.begin(), known_sections.end(), argument) !=
               known_sections.end()) {
      arguments.sections.emplace_back(argument);
    } else {
      fmt::print(stderr, "usage: {} [--json FILE] [--quick]{}\n", argv[0],
                 known_sections.empty() ? std::string()
                                        : fmt::format(" [{}]...", fmt::join(known_sections, "|")));
      return std::nullopt;
    }
  }
  if (arguments.sections.empty()) arguments.sections = known_sections;
  return arguments;
}

}  // namespace heddle::bench
