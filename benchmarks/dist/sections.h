// Programs of sections, each of which forks the processes that it needs.
#pragma once

#include <span>

#include "benchmarks/support/bars.h"

namespace heddle::bench_dist {

struct Section {
  const char* name;
  void (*measure)(bench::BarReport& report, bool quick);  // quick: a smoke test, few runs
};

// Runs those that the command line names, or all, each in a process of its own. The program's
// status: 0 if all bars hold, 1 if one falls short, 2 if something could not be run.
int RunSections(int argc, char** argv, std::span<const Section> sections);

}  // namespace heddle::bench_dist
