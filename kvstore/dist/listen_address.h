// Where a process of a job listens, and what others are told to connect to.
#pragma once

#include <heddle/dist.h>

#include <string>

namespace heddle::kvstore::dist {

struct ListenAddress {
  std::string bind;        // numeric: "127.0.0.1", "::1", "0.0.0.0"
  int port = 0;            // 0: any free one
  std::string advertised;  // address or name without port
  std::string settings;    // that `bind` and `port` follow from, for errors
};

// What follows from the options. The first that is there counts:
//   bind:       bind_address; the address of `interface`; node_host; for a scheduler root_host, for
//               others the address of this machine from which root_host is reached (loopback if
//               root_host is), so that without further settings nothing listens beyond loopback.
//   advertised: node_host; bind, unless it stands for all interfaces; for a scheduler root_host,
//               for others the address from which root_host is reached.
// Names are looked up. Without a token nothing but loopback is bound: InvalidArgument naming
// HEDDLE_TOKEN and HEDDLE_TOKEN_FILE, unless `insecure`, which logs a warning.
// InvalidArgument, naming field, source, value and the system's error, for a name that does not
// resolve, an interface that is not there, and for a server that would listen on loopback while the
// scheduler does not: nobody elsewhere could reach it.
ListenAddress ResolveListenAddress(const DistOptions& options);

bool IsLoopback(const std::string& numeric_address);

}  // namespace heddle::kvstore::dist
