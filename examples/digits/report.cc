#include "examples/digits/report.h"

#include <cstdio>
#include <utility>

#include <fmt/format.h>
#include <unistd.h>

namespace digits {
namespace {

constexpr int kBarCells = 30;
constexpr int kPlainLines = 8;  // where no terminal shows a bar

std::string Bar(int done, int all) {
  const int full = kBarCells * done / all;
  std::string bar;
  for (int i = 0; i < kBarCells; ++i) bar += i < full ? "█" : "░";
  return bar;
}

}  // namespace

ProgressBar::ProgressBar(std::string title)
    : title_(std::move(title)), terminal_(isatty(STDOUT_FILENO) != 0) {}

void ProgressBar::Show(const Progress& progress) {
  const bool last = progress.epoch == progress.epochs;
  const std::string numbers =
      fmt::format("epoch {:>3}/{}  loss {:.4f}  {:>7.0f} images/s", progress.epoch, progress.epochs,
                  progress.loss, progress.images_per_second);
  if (terminal_) {
    fmt::print("\r{:<22}{}  {}\x1b[K{}", title_, Bar(progress.epoch, progress.epochs), numbers,
               last ? "\n" : "");
  } else if (last || progress.epoch % ((progress.epochs + kPlainLines - 1) / kPlainLines) == 0) {
    fmt::print("{:<22}{}\n", title_, numbers);
  }
  std::fflush(stdout);
}

void PrintConfusion(const ConfusionMatrix& confusion) {
  fmt::print("\nTest images, by digit (rows) and answer (columns)\n   ");
  for (int answer = 0; answer < kClasses; ++answer) fmt::print("{:>4}", answer);
  fmt::print("\n");
  for (std::size_t label = 0; label < confusion.size(); ++label) {
    fmt::print("{:>3}", label);
    for (const int count : confusion[label]) {
      fmt::print("{:>4}", count == 0 ? "." : std::to_string(count));
    }
    fmt::print("\n");
  }
}

void PrintTimes(const std::vector<KeyTimes>& times) {
  fmt::print(
      "\nTimes in us, median and 99th percentile; exchange: from the last gradient until all "
      "devices can read the new value\n");
  fmt::print("{:<16}{:>7}{:>18}{:>18}{:>20}\n", "key", "bytes", "push call", "pull call",
             "exchange");
  const auto spread = [](Spread s) { return fmt::format("{:.1f} {:>8.1f}", s.median, s.p99); };
  for (const KeyTimes& key : times) {
    fmt::print("{:<16}{:>7}{:>18}{:>18}{:>20}\n", key.key, key.bytes, spread(key.push_call),
               spread(key.pull_call), spread(key.exchange));
  }
}

}  // namespace digits
