#include "examples/digits/comparison.h"

#include <heddle/error.h>

#include <csignal>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string_view>
#include <utility>

#include <fmt/format.h>

namespace digits {
namespace {

// A gnuplot string in single quotes: in double ones it would run what stands in backquotes.
std::string Quoted(std::string_view text) {
  std::string quoted = "'";
  for (const char c : text) {
    if (c == '\'') quoted += c;
    quoted += c;
  }
  return quoted + '\'';
}

}  // namespace

void CheckPlotFile(const std::string& file) {
  if (!file.ends_with(".svg") && !file.ends_with(".png")) {
    throw heddle::InvalidArgument(
        fmt::format("plot file {}: expected a name that ends in .svg or .png", file));
  }
  if (file.find('\n') != std::string::npos) {
    throw heddle::InvalidArgument(fmt::format("plot file {}: expected a name of one line", file));
  }
  const bool is_there = std::filesystem::exists(file);
  if (!std::ofstream(file, std::ios::app)) {
    throw heddle::IoError(fmt::format("plot file {}: cannot be opened for writing", file));
  }
  if (!is_there) std::filesystem::remove(file);
}

std::vector<Method> MethodsToCompare(const TrainingOptions& options) {
  using Parameters = std::vector<std::pair<std::string_view, double>>;
  const auto with = [&](std::string name, std::string optimizer, Parameters parameters) {
    Method method{std::move(name), options};
    method.options.optimizer = std::move(optimizer);
    method.options.parameters = std::move(parameters);
    return method;
  };
  const Parameters sgd = {{"learning_rate", 0.5}};
  Method compressed = with("SGD, 2-bit gradients", "sgd", sgd);
  compressed.options.compression = {.type = "2bit", .threshold = 0.5};
  return {with("SGD", "sgd", sgd), std::move(compressed),
          with("Adam", "adam", {{"learning_rate", 0.002}}),
          with("LAMB", "lamb", {{"learning_rate", 0.002}})};
}

void PrintComparison(const std::vector<Method>& methods,
                     const std::vector<TrainingResult>& results) {
  fmt::print("{:<22}{:>14}{:>12}{:>10}{:>12}{:>12}\n", "method", "test accuracy", "last loss",
             "steps/s", "MB pushed", "MB pulled");
  for (std::size_t i = 0; i < results.size(); ++i) {
    const TrainingResult& result = results[i];
    fmt::print("{:<22}{:>14.3f}{:>12.5f}{:>10.0f}{:>12.1f}{:>12.1f}\n", methods[i].name,
               result.accuracy, result.losses.back(), result.steps_per_second,
               static_cast<double>(result.transfers.pushed_bytes) / 1e6,
               static_cast<double>(result.transfers.pulled_bytes) / 1e6);
  }
}

bool PlotLosses(const std::vector<Method>& methods, const std::vector<TrainingResult>& results,
                const std::string& file) {
  std::string script = fmt::format(
      "set terminal {}\nset output {}\nset title 'Training on handwritten digits'\n"
      "set xlabel 'epoch'\nset ylabel 'mean cross-entropy'\nset logscale y\n"
      "set format y '10^{{%L}}'\nset grid\nset key top right\n",
      file.ends_with(".png") ? "pngcairo size 900,560 font 'sans,11'"
                             : "svg size 900,560 font 'sans,13' background 'white'",
      Quoted(file));
  std::string plot = "plot ";
  for (std::size_t i = 0; i < results.size(); ++i) {
    fmt::format_to(std::back_inserter(script), "$losses{} << EOD\n", i);
    for (std::size_t epoch = 0; epoch < results[i].losses.size(); ++epoch) {
      fmt::format_to(std::back_inserter(script), "{} {}\n", epoch + 1, results[i].losses[epoch]);
    }
    script += "EOD\n";
    fmt::format_to(std::back_inserter(plot),
                   "$losses{} using 1:2 with lines linewidth 2 dashtype {} title '{}', ", i,
                   methods[i].options.compression ? 2 : 1, methods[i].name);
  }
  script += plot + "\nset output\n";
  // What gnuplot cannot write to the file it would write to the terminal. One that ends before it
  // has read everything is no reason for this program to end.
  auto* const before = std::signal(SIGPIPE, SIG_IGN);
  std::FILE* const gnuplot = popen("gnuplot > /dev/null", "w");
  bool drawn = false;
  if (gnuplot != nullptr) {
    const bool written = std::fwrite(script.data(), 1, script.size(), gnuplot) == script.size();
    drawn = pclose(gnuplot) == 0 && written;
  }
  std::signal(SIGPIPE, before);
  return drawn;
}

}  // namespace digits
