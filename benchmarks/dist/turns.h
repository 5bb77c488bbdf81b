// Contenders that are timed in turn, a little each, round after round: a round gives a ratio, and
// what counts is the median of those.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "benchmarks/support/bars.h"

namespace heddle::bench_dist {

inline constexpr std::chrono::microseconds kPause{500};

struct Contender {
  std::string name;
  std::function<void()> operation;
  std::function<double()> cpu_seconds{};  // of all who take part, since whenever; may be empty
  std::vector<double> figures{};          // us, medians of the rounds
  std::vector<double> tails{};            // us, 99th percentiles of the rounds
  std::vector<double> cpu{};              // seconds an operation, of the rounds
};

struct Turns {
  int rounds;           // after one that does not count
  int operations;       // of each contender in a round
  bool pauses = false;  // of kPause before each operation
  std::function<void()> before_round{};
};
void TakeTurns(std::vector<Contender>& contenders, const Turns& turns);

// The fastest.
const Contender& BestOf(std::span<const Contender> contenders);

// Microseconds that `operation` takes.
double TimeOf(const std::function<void()>& operation);

std::vector<double> Ratios(const std::vector<double>& a, const std::vector<double>& b);

// A bar that ours over theirs, round by round, has to keep.
struct PairBar {
  std::string what;
  std::string unit;
  std::vector<double> ours;
  std::string against;
  std::vector<double> theirs;
  std::optional<double> most{};  // none: for comparison
};
void AddBar(bench::BarReport& report, const PairBar& bar);
// The median of ours against a fixed limit.
void AddLimit(bench::BarReport& report, const std::string& what, const std::string& unit,
              const std::vector<double>& ours, double limit,
              const std::string& against = "a fixed limit");
// CPU seconds for each GB that an operation moves.
void AddCpuBar(bench::BarReport& report, const std::string& what, const Contender& ours,
               const Contender& theirs, std::size_t bytes_moved);

}  // namespace heddle::bench_dist
