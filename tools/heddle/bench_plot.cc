#include "tools/heddle/bench_plot.h"

#include <heddle/error.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <sys/wait.h>

#include "tools/heddle/program_path.h"

namespace heddle::tools {
namespace {

// A gnuplot string in single quotes: in double ones it would run what stands in backquotes.
std::string GnuplotString(std::string_view text) {
  std::string quoted = "'";
  for (const char c : text) {
    if (c == '\'') quoted += c;
    quoted += c;
  }
  return quoted + '\'';
}

std::string_view TerminalFor(std::string_view path) {
  if (path.ends_with(".png")) return "pngcairo size 1200,560 font \"sans,11\"";
  if (path.ends_with(".svg")) return "svg size 1200,560 font \"sans,13\" background \"white\"";
  throw InvalidArgument(
      fmt::format("plot file {}: expected a name that ends in .png or .svg", path));
}

// gnuplot does not say when the disk is full.
bool IsWholePicture(const std::string& path) {
  if (!std::filesystem::exists(path)) return false;
  if (!std::filesystem::is_regular_file(path)) return true;  // it cannot be read again
  std::ifstream file(path, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), {});
  constexpr std::size_t kEndBytesMax = 16;
  const std::string_view end =
      std::string_view(bytes).substr(bytes.size() - std::min(bytes.size(), kEndBytesMax));
  return end.find(path.ends_with(".png") ? "IEND" : "</svg>") != std::string_view::npos;
}

// Where `value` stands in the list; at its end if it was new.
template <class T>
std::size_t IndexIn(std::vector<T>& values, const T& value) {
  const auto found = std::find(values.begin(), values.end(), value);
  const std::size_t index = static_cast<std::size_t>(found - values.begin());
  if (found == values.end()) values.push_back(value);
  return index;
}

}  // namespace

void CheckPlot(const std::string& path) {
  TerminalFor(path);
  if (path.find('\n') != std::string::npos) {
    throw InvalidArgument(fmt::format("plot file {}: expected a name of one line", path));
  }
  if (!FindProgram("gnuplot")) {
    throw InvalidState(
        "plotting needs gnuplot, which is not installed here (Debian package gnuplot-nox)");
  }
}

// gnuplot warns of axes whose values are all the same.
std::string RangeAround(std::string_view axis, double least, double most) {
  return least < most ? "" : fmt::format("set {}range [{}:{}]\n", axis, least / 2, most * 2);
}

std::string PlotScript(const std::vector<BenchResult>& results, const std::string& path) {
  // By store and number of devices; points are joined in their order, that of the sizes.
  std::map<std::pair<std::string, int>, std::multimap<std::int64_t, std::string>> curves;
  std::set<std::int64_t> sizes;
  std::vector<std::string> stores;  // a kind of line each
  std::vector<int> devices;         // a colour each
  std::set<double> latencies;
  for (const BenchResult& result : results) {
    curves[{result.store, result.devices}].emplace(
        result.bytes,
        fmt::format("{} {:.3f} {:.4f}\n", result.bytes, result.latency_us, result.bandwidth_gb_s));
    sizes.insert(result.bytes);
    latencies.insert(result.latency_us);
    IndexIn(stores, result.store);
    IndexIn(devices, result.devices);
  }
  std::string script =
      fmt::format("set terminal {}\nset output {}\n", TerminalFor(path), GnuplotString(path));
  std::string latency = "plot ", bandwidth = "plot ", tics;
  for (const std::int64_t bytes : sizes) {
    tics +=
        fmt::format("{}{} {}", tics.empty() ? "" : ", ", GnuplotString(BytesText(bytes)), bytes);
  }
  std::size_t number = 0;
  for (const auto& [curve, points] : curves) {
    const auto& [store, device_count] = curve;
    script += fmt::format("$curve{} << EOD\n", number);
    for (const auto& [bytes, point] : points) script += point;
    script += "EOD\n";
    const std::string style = fmt::format(
        "with linespoints linewidth 2 pointtype 7 pointsize 0.6 linecolor {} dashtype {} title "
        "{}, ",
        IndexIn(devices, device_count) + 1, IndexIn(stores, store) + 1,
        GnuplotString(
            fmt::format("{}, {} device{}", store, device_count, device_count == 1 ? "" : "s")));
    latency += fmt::format("$curve{} using 1:2 {}", number, style);
    bandwidth += fmt::format("$curve{} using 1:3 {}", number, style);
    ++number;
  }
  script += fmt::format(
      "set multiplot layout 1,2\nset logscale x 2\nset xlabel \"array size\"\n"
      "set xtics ({}) rotate by 30 right\nset offsets graph 0.05, graph 0.05, 0, 0\nset grid\n"
      "set key outside below maxcols 3\n"
      "set title \"Push to one key, then pull, until readable\"\n"
      "set ylabel \"median latency in us\"\nset logscale y 10\n{}{}{}\n"
      "set title \"The same with several keys in flight\"\n"
      "unset logscale y\nset yrange [0:*]\nset ylabel \"GB/s pushed and pulled\"\n{}\n"
      "unset multiplot\nset output\n",
      tics,
      RangeAround("x", static_cast<double>(*sizes.begin()), static_cast<double>(*sizes.rbegin())),
      RangeAround("y", *latencies.begin(), *latencies.rbegin()), latency, bandwidth);
  return script;
}

void PlotBench(const std::vector<BenchResult>& results, const std::string& path) {
  CheckPlot(path);
  const std::string script = PlotScript(results, path);
  // What gnuplot cannot write to the file it would write to the terminal.
  std::FILE* const gnuplot = popen("gnuplot > /dev/null", "w");
  if (gnuplot == nullptr) throw IoError(fmt::format("plot file {}: gnuplot did not start", path));
  const bool written = std::fwrite(script.data(), 1, script.size(), gnuplot) == script.size();
  const int status = pclose(gnuplot);
  if (!written || status != 0) {
    throw IoError(fmt::format("plot file {}: gnuplot ended with status {}", path,
                              WIFEXITED(status) ? WEXITSTATUS(status) : status));
  }
  if (!IsWholePicture(path)) {
    throw IoError(fmt::format("plot file {}: could not be written completely", path));
  }
}

}  // namespace heddle::tools
