#include "tools/heddle/hosts.h"

#include <heddle/error.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include <fmt/format.h>

#include "base/env.h"
#include "base/parse.h"

namespace heddle::tools {
namespace {

void AddSlots(std::vector<Host>& hosts, std::string_view name, int slots) {
  const auto known =
      std::find_if(hosts.begin(), hosts.end(), [&](const Host& host) { return host.name == name; });
  if (known != hosts.end()) {
    known->slots += slots;
  } else {
    hosts.push_back({std::string(name), slots});
  }
}

int ParseSlots(std::string_view text, std::string_view where) {
  constexpr int kSlotsMax = 1 << 16;
  const std::optional<int> slots = ParseWhole<int>(text);
  if (!slots || *slots < 1 || *slots > kSlotsMax) {
    throw InvalidArgument(fmt::format("{}: expected a number of slots from 1 to {}, given '{}'",
                                      where, kSlotsMax, text));
  }
  return *slots;
}

// The words of each line that has any, with "path:line".
void ForEachLine(const std::string& path,
                 const std::function<void(const std::vector<std::string>& words,
                                          const std::string& where)>& visit) {
  std::ifstream file(path);
  if (!file) throw IoError(fmt::format("hosts: cannot read '{}': {}", path, std::strerror(errno)));
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    std::istringstream stream(line.substr(0, line.find('#')));
    std::vector<std::string> words;
    for (std::string word; stream >> word;) words.push_back(word);
    if (!words.empty()) visit(words, fmt::format("{}:{}", path, number));
  }
}

std::vector<Host> ReadGridEngineFile(const std::string& path) {
  std::vector<Host> hosts;
  ForEachLine(path, [&](const std::vector<std::string>& words, const std::string& where) {
    AddSlots(hosts, words[0], words.size() > 1 ? ParseSlots(words[1], where) : 1);
  });
  return hosts;
}

// "2(x3),1": 2, 2, 2, 1.
std::vector<int> ExpandCounts(std::string_view text) {
  std::vector<int> counts;
  std::istringstream stream{std::string(text)};
  for (std::string item; std::getline(stream, item, ',');) {
    const std::size_t times = item.find("(x");
    const int count = ParseSlots(item.substr(0, times), "SLURM_TASKS_PER_NODE");
    const int repeats = times == std::string::npos
                            ? 1
                            : ParseSlots(item.substr(times + 2, item.find(')') - times - 2),
                                         "SLURM_TASKS_PER_NODE");
    counts.insert(counts.end(), static_cast<std::size_t>(repeats), count);
  }
  return counts;
}

std::vector<Host> SlurmHosts(const std::string& nodes, const std::optional<std::string>& tasks) {
  const std::vector<int> counts = tasks ? ExpandCounts(*tasks) : std::vector<int>();
  std::vector<Host> hosts;
  for (const std::string& name : ExpandNodeList(nodes)) {
    const std::size_t index = hosts.size();
    hosts.push_back({name, index < counts.size() ? counts[index] : 1});
  }
  return hosts;
}

[[noreturn]] void ThrowBadList(std::string_view text) {
  throw InvalidArgument(
      fmt::format("hosts: expected a list such as 'n[1-3,7],login', given '{}'", text));
}

// "1-3,07" between `before` and `after`. Numbers keep their leading zeros.
void AppendRange(std::string_view text, std::string_view before, std::string_view ranges,
                 std::string_view after, std::vector<std::string>& names) {
  constexpr std::size_t kNamesMax = 1 << 16;
  std::istringstream stream{std::string(ranges)};
  for (std::string range; std::getline(stream, range, ',');) {
    const std::size_t dash = range.find('-');
    const std::string first = range.substr(0, dash);
    const std::string last = dash == std::string::npos ? first : range.substr(dash + 1);
    const std::optional<int> begin = ParseWhole<int>(first), end = ParseWhole<int>(last);
    if (!begin || !end || *begin < 0 || *end < *begin ||
        static_cast<std::size_t>(*end - *begin) >= kNamesMax - std::min(kNamesMax, names.size())) {
      ThrowBadList(text);
    }
    for (int i = *begin; i <= *end; ++i) {
      names.push_back(fmt::format("{}{:0{}}{}", before, i, first.size(), after));
    }
  }
}

}  // namespace

std::vector<Host> ParseHosts(std::string_view text) {
  std::vector<Host> hosts;
  std::istringstream stream{std::string(text)};
  for (std::string name; std::getline(stream, name, ',');) {
    const bool has_space = name.find_first_of(" \t\n") != std::string::npos;
    if (name.empty() || name.starts_with('-') || has_space) {
      throw InvalidArgument(
          fmt::format("--hosts: expected names such as 'node1,node2'{}, given '{}'",
                      has_space ? " without spaces" : "", text));
    }
    AddSlots(hosts, name, 1);
  }
  return hosts;
}

std::vector<Host> ReadHostsFile(const std::string& path) {
  constexpr std::string_view kSlots = "slots=";
  std::vector<Host> hosts;
  ForEachLine(path, [&](const std::vector<std::string>& words, const std::string& where) {
    if (words[0].starts_with('-') || words.size() > 2 ||
        (words.size() == 2 && !words[1].starts_with(kSlots))) {
      throw InvalidArgument(fmt::format("{}: expected 'name' or 'name slots=4', given '{}'", where,
                                        words.size() > 1 ? words[0] + " " + words[1] : words[0]));
    }
    AddSlots(hosts, words[0],
             words.size() == 2 ? ParseSlots(words[1].substr(kSlots.size()), where) : 1);
  });
  if (hosts.empty()) {
    throw InvalidArgument(fmt::format("hosts: expected a host in '{}', which has none", path));
  }
  return hosts;
}

std::vector<Host> HostsFromEnvironment(const VariableLookup& variables) {
  if (const auto path = variables("PE_HOSTFILE")) return ReadGridEngineFile(*path);
  if (const auto path = variables("PBS_NODEFILE")) return ReadHostsFile(*path);
  if (const auto nodes = variables("SLURM_JOB_NODELIST")) {
    return SlurmHosts(*nodes, variables("SLURM_TASKS_PER_NODE"));
  }
  return {};
}

std::vector<Host> HostsOf(const Job& job) {
  std::vector<Host> hosts = job.hosts;
  if (hosts.empty()) {
    hosts = HostsFromEnvironment([](const std::string& name) { return EnvString(name.c_str()); });
  }
  if (hosts.empty()) {
    throw InvalidArgument(
        "no hosts: give --hosts or --hosts-file, or launch inside a job of a batch system");
  }
  return hosts;
}

std::vector<std::string> ExpandNodeList(std::string_view text) {
  std::vector<std::string> names;
  std::size_t begin = 0;
  while (begin < text.size()) {
    const std::size_t comma = text.find(',', begin), bracket = text.find('[', begin);
    if (bracket >= comma) {  // a plain name
      if (comma == begin) ThrowBadList(text);
      names.emplace_back(text.substr(begin, comma - begin));
      if (comma == std::string_view::npos) break;
      begin = comma + 1;
      continue;
    }
    const std::size_t close = text.find(']', bracket);
    if (close == std::string_view::npos) ThrowBadList(text);
    const std::size_t end = std::min(text.find(',', close), text.size());
    const std::string_view after = text.substr(close + 1, end - close - 1);
    if (after.find('[') != std::string_view::npos) ThrowBadList(text);
    AppendRange(text, text.substr(begin, bracket - begin),
                text.substr(bracket + 1, close - bracket - 1), after, names);
    begin = end + 1;
  }
  if (names.empty() || text.ends_with(',')) ThrowBadList(text);
  return names;
}

std::vector<std::vector<Place>> PlacesOnHosts(const std::vector<Host>& hosts, DistRole role,
                                              int count) {
  std::vector<std::size_t> slots;  // the host of each
  for (std::size_t host = 0; host < hosts.size(); ++host) {
    slots.insert(slots.end(), static_cast<std::size_t>(hosts[host].slots), host);
  }
  std::vector<std::vector<Place>> places(hosts.size());
  const std::size_t total = std::max(slots.size(), static_cast<std::size_t>(count));
  for (int rank = 0; rank < count; ++rank) {
    // As many slots as ranks or more: the rank's own. Fewer: neighbours share one.
    const std::size_t slot = static_cast<std::size_t>(rank) * slots.size() / total;
    const std::size_t host =
        role == DistRole::kWorker ? slots[slot] : static_cast<std::size_t>(rank) % hosts.size();
    places[host].push_back({.role = role, .rank = rank});
  }
  for (std::vector<Place>& of_host : places) {
    for (std::size_t i = 0; i < of_host.size(); ++i) {
      of_host[i].local_rank = static_cast<int>(i);
      of_host[i].local_size = static_cast<int>(of_host.size());
    }
  }
  return places;
}

}  // namespace heddle::tools
