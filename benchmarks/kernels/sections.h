// The sections of bench_kernels, a file each.
#pragma once

#include "benchmarks/support/bars.h"

namespace heddle::bench {

// Each measures its kernels and adds their bars. `quick`: a smoke test, small and few runs.
void MeasureQuantise(BarReport& report, bool quick);  // quantise.cc
void MeasureResNet(BarReport& report, bool quick);    // resnet.cc
void MeasureSparse(BarReport& report, bool quick);    // sparse.cc
void MeasureUpdates(BarReport& report, bool quick);   // updates.cc

}  // namespace heddle::bench
