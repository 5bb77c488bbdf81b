// How close ops and kernels for GPUs come to what the device allows.
//
//   bench_gpu [--json FILE] [--quick] [SECTION...]
//
// Each section is a file beside this one, with its bars in its heading. Status 1: a bar falls
// short. Without a GPU it says so, adds no bar and ends with status 0.
#include <algorithm>
#include <cstdio>
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
    std::fprintf(stderr, "bench_gpu: nothing measured: %s\n", heddle::WhyNoGpu(0).c_str());
    return 0;
  }
  for (const Section& section : kSections) {
    const auto& chosen = arguments->sections;
    if (std::find(chosen.begin(), chosen.end(), section.name) == chosen.end()) continue;
    section.measure(report, arguments->quick);
  }
  return report.all_hold() ? 0 : 1;
}
