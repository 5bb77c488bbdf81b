// How close the kernels come to what the machine allows.
//
//   bench_kernels [--json FILE] [--quick] [SECTION...]
//
// Each section is a file beside this one, with its bars in its heading. Status 1: a bar falls
// short.
#include <algorithm>
#include <string>
#include <vector>

#include "benchmarks/kernels/sections.h"
#include "benchmarks/support/bars.h"

namespace {

struct Section {
  const char* name;
  void (*measure)(heddle::bench::BarReport& report, bool quick);
};

// In the order in which they run; compare/kernels.py lists them again.
constexpr Section kSections[] = {
    {"quantise", &heddle::bench::MeasureQuantise},
    {"resnet", &heddle::bench::MeasureResNet},
    {"sparse", &heddle::bench::MeasureSparse},
    {"updates", &heddle::bench::MeasureUpdates},
};

}  // namespace

int main(int argc, char** argv) {
  heddle::bench::BarReport report;
  std::vector<std::string> names;
  for (const Section& section : kSections) names.emplace_back(section.name);
  const auto arguments = heddle::bench::ParseArguments(argc, argv, report, names);
  if (!arguments) return 2;
  for (const Section& section : kSections) {
    const auto& chosen = arguments->sections;
    if (std::find(chosen.begin(), chosen.end(), section.name) == chosen.end()) continue;
    section.measure(report, arguments->quick);
  }
  return report.all_hold() ? 0 : 1;
}
