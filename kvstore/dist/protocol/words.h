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
// "0.4 s".
std::string InSeconds(Time time);
// "a, b, c"; of a long list the first ones, and how many more there are: "a, b and 98 more".
std::string JoinWords(const std::vector<std::string>& words);
// Of ascending ranks: "ranks 0, 2-5, 9".
std::string Ranks(const std::vector<std::int32_t>& ranks);

}  // namespace heddle::kvstore::dist
