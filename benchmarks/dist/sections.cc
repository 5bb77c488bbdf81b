#include "benchmarks/dist/sections.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include "benchmarks/dist/processes.h"

namespace heddle::bench_dist {

int RunSections(int argc, char** argv, std::span<const Section> sections) {
  bench::BarReport report;
  std::vector<std::string> names;
  for (const Section& section : sections) names.emplace_back(section.name);
  const auto arguments = bench::ParseArguments(argc, argv, report, names);
  if (!arguments) return 2;
  bool all_hold = true;
  for (const Section& section : sections) {
    const auto& chosen = arguments->sections;
    if (std::find(chosen.begin(), chosen.end(), section.name) == chosen.end()) continue;
    Process process([&] {
      section.measure(report, arguments->quick);
      if (report.all_hold()) return;
      std::fflush(stdout);
      _exit(1);
    });
    const int status = process.Join();
    if (!WIFEXITED(status) || WEXITSTATUS(status) > 1) {
      fmt::print(stderr, "{}: section {} has ended before its time\n", argv[0], section.name);
      return 2;
    }
    all_hold = all_hold && WEXITSTATUS(status) == 0;
  }
  return all_hold ? 0 : 1;
}

}  // namespace heddle::bench_dist
