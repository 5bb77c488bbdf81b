// The sections of bench_gpu, a file each.
#pragma once

#include "benchmarks/support/bars.h"

namespace heddle::bench {

// Each measures on the current device and adds its bars. `quick`: a smoke test, small and few runs.
void MeasureGpuEngine(BarReport& report, bool quick);   // engine.cc
void MeasureGpuKernels(BarReport& report, bool quick);  // kernels.cc
void MeasureGpuResNet(BarReport& report, bool quick);   // resnet.cc

}  // namespace heddle::bench
