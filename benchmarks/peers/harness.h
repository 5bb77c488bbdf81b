// The command line and the measurements that all programs which run a Workload share, so that a
// driver can start them in turn and compare.
//
//   <program> [--pattern P] [--body-ns T] [--workers W] [--pusher-included] [--ops N] [--runs R]
//             [--budget-ms B] [--metg | --verify]
//
// Prints one JSON object on one line. Without a mode: nanoseconds per op of R runs, each from the
// first push until all ops are done, after one run that is not counted; N is lowered until a run
// fits into B ms. --verify: exit status 1 unless every pattern ran in order. --metg: the shortest
// body with which the stencil still reaches 50 % efficiency (work / (W * time)).
//
// A program gives a class Runner:
//   Runner(int workers, bool pusher_included)  starts the engine: `workers` threads that run ops
//   besides
//                       the pushing thread, or that include it where the engine lets it run ops
//   void Prepare(Workload&)   variables for the workload; not timed
//   void Run(Workload&)       pushes all ops from this thread and returns when they are done
//   void Finish()             frees what Prepare and Run made; not timed
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "benchmarks/peers/workload.h"

namespace heddle::bench {

struct HarnessOptions {
  std::string pattern = "independent";
  double body_ns = 0;
  int workers = 2;
  bool pusher_included = false;
  int ops = 200'000;
  int runs = 5;
  double budget_ms = 400;
  bool verify = false;
  bool metg = false;
};

inline HarnessOptions ParseHarnessOptions(int argc, char** argv) {
  HarnessOptions options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    const auto value = [&]() -> const char* {
      if (i + 1 == argc) throw std::invalid_argument(std::string(flag) + " needs a value");
      return argv[++i];
    };
    if (flag == "--pattern") {
      options.pattern = value();
    } else if (flag == "--body-ns") {
      options.body_ns = std::atof(value());
    } else if (flag == "--workers") {
      options.workers = std::atoi(value());
    } else if (flag == "--pusher-included") {
      options.pusher_included = true;
    } else if (flag == "--ops") {
      options.ops = std::atoi(value());
    } else if (flag == "--runs") {
      options.runs = std::atoi(value());
    } else if (flag == "--budget-ms") {
      options.budget_ms = std::atof(value());
    } else if (flag == "--verify") {
      options.verify = true;
    } else if (flag == "--metg") {
      options.metg = true;
    } else {
      throw std::invalid_argument("unknown flag: " + std::string(flag));
    }
  }
  if (options.workers < 1 || options.ops < 1 || options.runs < 1) {
    throw std::invalid_argument("--workers, --ops and --runs want a positive number");
  }
  return options;
}

inline double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Nanoseconds per op of one run.
template <class Runner>
double TimeRun(Runner& runner, Workload& workload) {
  runner.Prepare(workload);
  const auto start = SteadyClock::now();
  runner.Run(workload);
  const std::chrono::duration<double, std::nano> elapsed = SteadyClock::now() - start;
  runner.Finish();
  return elapsed.count() / workload.num_ops();
}

template <class Runner>
int VerifyPatterns(Runner& runner, const char* program, const HarnessOptions& options) {
  for (const std::string_view pattern : kPatterns) {
    Workload workload(pattern, std::min(options.ops, 20'000), Workload::Body::kCheck, 0);
    for (int run = 0; run < options.runs; ++run) {
      runner.Prepare(workload);
      runner.Run(workload);
      runner.Finish();
      if (workload.Verify()) continue;
      std::fprintf(stderr, "%s: ops of the pattern %s ran in a wrong order\n", program,
                   std::string(pattern).c_str());
      return 1;
    }
  }
  std::printf("{\"program\":\"%s\",\"verified\":true}\n", program);
  return 0;
}

// Nanoseconds per op of the stencil: the least of a few runs, since whatever else the machine does
// only adds.
template <class Runner>
double StencilTime(Runner& runner, double body_ns) {
  constexpr double kRunNs = 20e6;
  constexpr int kRuns = 4;
  const int ops = static_cast<int>(std::clamp(kRunNs / (body_ns + 200), 640.0, 50'000.0));
  Workload workload("stencil", ops, Workload::Body::kBusy, body_ns);
  double least = TimeRun(runner, workload);
  for (int run = 1; run < kRuns; ++run) least = std::min(least, TimeRun(runner, workload));
  return least;
}

// Doubles the body until it is efficient, then halves the interval, on a logarithmic scale.
template <class Runner>
double MeasureMetg(Runner& runner, int workers) {
  const auto efficient = [&](double body_ns) {
    return body_ns / (workers * StencilTime(runner, body_ns)) >= 0.5;
  };
  constexpr double kShortestNs = 25, kLongestNs = 200e3;
  double good = kShortestNs;
  while (!efficient(good)) {
    good *= 2;
    if (good > kLongestNs) return good;
  }
  if (good == kShortestNs) return good;
  double bad = good / 2;
  for (int step = 0; step < 5; ++step) {
    const double middle = std::sqrt(good * bad);
    (efficient(middle) ? good : bad) = middle;
  }
  return good;
}

template <class Runner>
int Measure(Runner& runner, const char* program, const HarnessOptions& options) {
  const auto body = options.body_ns > 0 ? Workload::Body::kBusy : Workload::Body::kEmpty;
  const auto make = [&](int ops) { return Workload(options.pattern, ops, body, options.body_ns); };
  constexpr int kOpsMin = 10'000;
  Workload trial = make(std::max(options.ops / 10, std::min(options.ops, kOpsMin)));
  const double trial_ns = TimeRun(runner, trial);
  const double ops_max = options.ops, ops_min = std::min(options.ops, kOpsMin);
  const int ops =
      static_cast<int>(std::clamp(options.budget_ms * 1e6 / trial_ns, ops_min, ops_max));
  Workload workload = make(ops);
  TimeRun(runner, workload);  // warm-up
  std::printf(
      "{\"program\":\"%s\",\"pattern\":\"%s\",\"body_ns\":%g,\"workers\":%d,\"ops\":%d,\"runs\":[",
      program, options.pattern.c_str(), options.body_ns, options.workers, ops);
  for (int run = 0; run < options.runs; ++run) {
    std::printf("%s%.2f", run == 0 ? "" : ",", TimeRun(runner, workload));
  }
  std::printf("]}\n");
  return 0;
}

// The main function of a program that measures `Runner`.
template <class Runner>
int HarnessMain(const char* program, int argc, char** argv) {
  try {
    const HarnessOptions options = ParseHarnessOptions(argc, argv);
    Runner runner(options.workers, options.pusher_included);
    if (options.verify) return VerifyPatterns(runner, program, options);
    if (!options.metg) return Measure(runner, program, options);
    std::printf("{\"program\":\"%s\",\"workers\":%d,\"metg_ns\":%.1f}\n", program, options.workers,
                MeasureMetg(runner, options.workers));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", program, error.what());
    return 2;
  }
}

}  // namespace heddle::bench
