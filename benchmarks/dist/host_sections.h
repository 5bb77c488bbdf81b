// The sections of bench_host that have files of their own.
#pragma once

#include <cstddef>

#include "benchmarks/support/bars.h"

namespace heddle::bench_dist {

inline constexpr std::size_t kLong = std::size_t{64} << 20;

// `quick`: a smoke test, few runs.
void MeasureTls(bench::BarReport& report, bool quick);   // host_tls.cc
void MeasureLink(bench::BarReport& report, bool quick);  // host_network.cc
void MeasureOvertake(bench::BarReport& report, bool quick);

}  // namespace heddle::bench_dist
