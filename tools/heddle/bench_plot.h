// Curves of a benchmark, drawn by gnuplot.
#pragma once

#include <string>
#include <vector>

#include "tools/heddle/bench.h"

namespace heddle::tools {

// Throws what PlotBench would throw for `path`, before time is spent on measuring: InvalidArgument
// unless it ends in .png or .svg, InvalidState naming the Debian package if gnuplot is not
// installed.
void CheckPlot(const std::string& path);

// Draws latency and bandwidth over array size, a curve for each store and number of devices.
// Errors: as CheckPlot; IoError if gnuplot fails.
void PlotBench(const std::vector<BenchResult>& results, const std::string& path);

// The script that gnuplot runs.
std::string PlotScript(const std::vector<BenchResult>& results, const std::string& path);

}  // namespace heddle::tools
