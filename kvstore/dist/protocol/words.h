// How the machines speak to people.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvstore/dist/protocol/ids.h"

namespace heddle::kvstore::dist {

// "scheduler", "server", "worker".
std::string_view RoleName(Role role);
// "127.0.0.1:9091", "[::1]:9091".
std::string JoinAddress(const std::string& host, int port);
// `text` as one line: runs of white space and control characters are a space; at most 1000 bytes,
// of a longer one the first, up to the end of a letter in UTF-8, and "...".
std::string InOneLine(std::string_view text);
// "0.4 s".
std::string InSeconds(Time time);
// "a, b, c"; of a long list the first ones, and how many more there are: "a, b and 98 more".
std::string JoinWords(const std::vector<std::string>& words);
// Of ascending ranks: "ranks 0, 2-5, 9".
std::string Ranks(const std::vector<std::int32_t>& ranks);

}  // namespace heddle::kvstore::dist
