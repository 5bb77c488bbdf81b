// The sections of bench_dist_store, by file. Each makes its own processes.
#pragma once

#include "benchmarks/support/bars.h"

namespace heddle::bench_dist {

// `quick`: a smoke test, small and few runs.
void MeasureLatency(bench::BarReport& report, bool quick);  // store_one_worker.cc
void MeasurePolling(bench::BarReport& report, bool quick);
void MeasureLarge(bench::BarReport& report, bool quick);
void MeasureSmall(bench::BarReport& report, bool quick);
void MeasureUrgent(bench::BarReport& report, bool quick);
void MeasureBytes(bench::BarReport& report, bool quick);  // store_bytes.cc
void MeasureSum(bench::BarReport& report, bool quick);    // store_two_workers.cc
void MeasureResNet(bench::BarReport& report, bool quick);

}  // namespace heddle::bench_dist
