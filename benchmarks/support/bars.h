// Bars: measured figures held against limits, printed and written as JSON, one a line.
#pragma once

#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace heddle::bench {

double Median(std::vector<double> values);
std::vector<double> Spread(const std::vector<double>& values);  // least and greatest

// "64 KiB", "16 MiB"
std::string BytesText(std::size_t bytes);

// Prints each bar as it comes. A bar is an object with the fields what, ours, unit, against, limit,
// ratio, spread, bar, holds, and any others. `holds` is null where nothing is demanded: a line for
// comparison, which is no bar.
class BarReport {
 public:
  bool Open(const std::string& path);  // writes the bars there, too; false: cannot
  void Add(const nlohmann::json& bar);
  // Instead of bars that need what this machine does not have: its name, and why. Written as an
  // object with the field `missing`.
  void AddMissing(const std::string& what);
  bool all_hold() const { return all_hold_; }

 private:
  std::ofstream json_;
  bool all_hold_ = true;
};

// The command line `[--json FILE] [--quick] [SECTION...]` that benchmark programs share.
struct BenchArguments {
  bool quick = false;
  std::vector<std::string> sections;
};
// Opens `report`. Nothing, after a message: the program ends with status 2. A program without
// sections passes none.
std::optional<BenchArguments> ParseArguments(int argc, char** argv, BarReport& report,
                                             const std::vector<std::string>& known_sections = {});

}  // namespace heddle::bench
