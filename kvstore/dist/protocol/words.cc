#include "kvstore/dist/protocol/words.h"

#include <algorithm>
#include <chrono>
#include <span>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/utf8.h"

namespace heddle::kvstore::dist {

std::string_view RoleName(Role role) {
  switch (role) {
    case Role::kScheduler:
      return "scheduler";
    case Role::kServer:
      return "server";
    case Role::kWorker:
      return "worker";
  }
  return "node";
}

std::string JoinAddress(const std::string& host, int port) {
  const bool is_ipv6 = host.find(':') != std::string::npos;
  return is_ipv6 ? fmt::format("[{}]:{}", host, port) : fmt::format("{}:{}", host, port);
}

std::string InOneLine(std::string_view text) {
  constexpr std::size_t kBytesMax = 1000;
  std::string line;
  bool space = false;
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (code <= ' ' || code == 0x7F) {
      space = true;
      continue;
    }
    if (std::exchange(space, false) && !line.empty()) line += ' ';
    line += c;
    if (line.size() > kBytesMax) break;
  }
  if (line.size() <= kBytesMax) return line;
  return std::string(CutAtLetter(line, kBytesMax)) + "...";
}

std::string InSeconds(Time time) {
  return fmt::format("{:.1f} s", std::chrono::duration<double>(time).count());
}

std::string JoinWords(const std::vector<std::string>& words) {
  constexpr std::size_t kShown = 12;
  const std::span<const std::string> shown(words.data(), std::min(words.size(), kShown));
  std::string text = fmt::format("{}", fmt::join(shown, ", "));
  if (words.size() > kShown) text += fmt::format(" and {} more", words.size() - kShown);
  return text;
}

std::string Ranks(const std::vector<std::int32_t>& ranks) {
  std::vector<std::string> runs;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    runs.push_back(i == last ? fmt::format("{}", ranks[i])
                             : fmt::format("{}-{}", ranks[i], ranks[last]));
    i = last + 1;
  }
  return (ranks.size() == 1 ? "rank " : "ranks ") + JoinWords(runs);
}

}  // namespace heddle::kvstore::dist
