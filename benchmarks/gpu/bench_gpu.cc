// How close ops and kernels for GPUs come to what the device allows.
//
//   bench_gpu [--json FILE] [--quick] [SECTION...]
//
// Each section is a file beside this one, with its bars in its heading. Status 1: a bar falls
// short. Without a GPU that can be used it says what is missing, and why, and ends with status 0.
#include <algorithm>
#include <string>
#include <vector>

#include "base/gpus.h"
#include "benchmarks/gpu/sections.h"
#include "benchmarks/support/bars.h"

namespace {

struct Section {
  const char* name;
  void (*measure)(heddle::bench::BarReport& report, bool quick);
};

// In the order in which they run; compare/gpu.py lists them again.
constexpr Section kSections[] = {
    {"engine", &heddle::bench::MeasureGpuEngine},
    {"kernels", &heddle::bench::MeasureGpuKernels},
    {"resnet", &heddle::bench::MeasureGpuResNet},
};

}  // namespace

int main(int argc, char** argv) {
  heddle::bench::BarReport report;
  std::vector<std::string> names;
  for (const Section& section : kSections) names.emplace_back(section.name);
  const auto arguments = heddle::bench::ParseArguments(argc, argv, report, names);
  if (!arguments) return 2;
  if (heddle::GpuCount() == 0) {
    report.AddMissing("a GPU (" + heddle::WhyNoGpu(0) + ")");
    return 0;
  }
  for (const Section& section : kSections) {
    const auto& chosen = arguments->sections;
    if (std::find(chosen.begin(), chosen.end(), section.name) == chosen.end()) continue;
    section.measure(report, arguments->quick);
  }
  return report.all_hold() ? 0 : 1;
}
