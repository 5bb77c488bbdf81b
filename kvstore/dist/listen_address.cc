#include "kvstore/dist/listen_address.h"

#include <heddle/error.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <set>

#include <arpa/inet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/log.h"

namespace heddle::kvstore::dist {
namespace {

std::string Numeric(const sockaddr* address, socklen_t bytes) {
  std::array<char, NI_MAXHOST> text{};
  if (getnameinfo(address, bytes, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0) {
    return {};
  }
  return text.data();
}

using AddressInfo = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// Of `host`, the value of `field`.
AddressInfo LookUp(const DistOptions& options, const char* field, const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int status = getaddrinfo(host.c_str(), nullptr, &hints, &found);
  if (status != 0) {
    throw InvalidArgument(
        fmt::format("{}: cannot find its address: {}", options.Describe(field),
                    status == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(status)));
  }
  return {found, &freeaddrinfo};
}

// The first address of `host`, IPv4 before IPv6: "localhost" is 127.0.0.1 on every machine.
std::string Resolve(const DistOptions& options, const char* field, const std::string& host) {
  const AddressInfo found = LookUp(options, field, host);
  for (const addrinfo* info = found.get(); info != nullptr; info = info->ai_next) {
    if (info->ai_family == AF_INET) return Numeric(info->ai_addr, info->ai_addrlen);
  }
  return Numeric(found->ai_addr, found->ai_addrlen);
}

std::string InterfaceAddress(const DistOptions& options) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) {
    throw InvalidArgument(fmt::format("{}: cannot list the interfaces: {}",
                                      options.Describe("interface"), std::strerror(errno)));
  }
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, &freeifaddrs);
  std::set<std::string> names;
  std::string ipv6;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    names.insert(entry->ifa_name);
    if (options.interface != entry->ifa_name || entry->ifa_addr == nullptr) continue;
    if (entry->ifa_addr->sa_family == AF_INET) {
      return Numeric(entry->ifa_addr, sizeof(sockaddr_in));
    }
    if (entry->ifa_addr->sa_family == AF_INET6 && ipv6.empty()) {
      ipv6 = Numeric(entry->ifa_addr, sizeof(sockaddr_in6));
    }
  }
  if (!ipv6.empty()) return ipv6;
  if (names.count(options.interface) > 0) {
    throw InvalidArgument(
        fmt::format("{}: the interface has no address", options.Describe("interface")));
  }
  throw InvalidArgument(
      fmt::format("{}: expected one of {}", options.Describe("interface"), fmt::join(names, ", ")));
}

// The address of this machine that the system would use towards `host`. Sends nothing: connecting
// a datagram socket only asks the routing table.
std::string RouteTo(const DistOptions& options, const std::string& host) {
  constexpr in_port_t kAnyPort = 9;  // a port must be named, which one does not matter
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(kAnyPort).c_str(), &hints, &found) != 0) return {};
  const AddressInfo owner(found, &freeaddrinfo);
  const int probe = socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_storage local{};
  socklen_t bytes = sizeof(local);
  const bool routed = probe >= 0 && connect(probe, found->ai_addr, found->ai_addrlen) == 0 &&
                      getsockname(probe, reinterpret_cast<sockaddr*>(&local), &bytes) == 0;
  const int error = errno;
  if (probe >= 0) close(probe);
  if (!routed) {
    throw InvalidArgument(fmt::format("{}: this machine has no way to {}: {}",
                                      options.Describe("root_host"), host, std::strerror(error)));
  }
  return Numeric(reinterpret_cast<sockaddr*>(&local), bytes);
}

// Where the socket that is taken over listens.
ListenAddress InheritedAddress(const DistOptions& options) {
  sockaddr_storage local{};
  socklen_t bytes = sizeof(local);
  int listening = 0;
  socklen_t listening_bytes = sizeof(listening);
  if (getsockname(options.listen_fd, reinterpret_cast<sockaddr*>(&local), &bytes) != 0 ||
      getsockopt(options.listen_fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &listening_bytes) != 0) {
    throw InvalidArgument(fmt::format("{}: expected a listening socket: {}",
                                      options.Describe("listen_fd"), std::strerror(errno)));
  }
  if (listening == 0 || (local.ss_family != AF_INET && local.ss_family != AF_INET6)) {
    throw InvalidArgument(fmt::format("{}: expected a listening TCP socket, given another one",
                                      options.Describe("listen_fd")));
  }
  const in_port_t port = local.ss_family == AF_INET
                             ? reinterpret_cast<const sockaddr_in&>(local).sin_port
                             : reinterpret_cast<const sockaddr_in6&>(local).sin6_port;
  ListenAddress address;
  address.bind = Numeric(reinterpret_cast<sockaddr*>(&local), bytes);
  address.port = ntohs(port);
  return address;
}

bool IsWildcard(const std::string& numeric) { return numeric == "0.0.0.0" || numeric == "::"; }

// The option that the address to bind follows from.
const char* BindField(const DistOptions& options) {
  if (!options.bind_address.empty()) return "bind_address";
  if (!options.interface.empty()) return "interface";
  return options.node_host.empty() ? "root_host" : "node_host";
}

// `root` is the address of root_host.
std::string BindAddress(const DistOptions& options, const std::string& root) {
  if (!options.bind_address.empty()) {
    return Resolve(options, "bind_address", options.bind_address);
  }
  if (!options.interface.empty()) return InterfaceAddress(options);
  if (!options.node_host.empty()) return Resolve(options, "node_host", options.node_host);
  if (options.role == DistRole::kScheduler) return root;
  return RouteTo(options, root);
}

void CheckReachable(const DistOptions& options, const std::string& bind, const std::string& root) {
  if (options.role == DistRole::kScheduler || !IsLoopback(bind) || IsLoopback(root)) return;
  throw InvalidArgument(fmt::format(
      "{}: it would listen on {}, which contradicts {}: nobody on another machine could reach it; "
      "set HEDDLE_BIND_ADDRESS, HEDDLE_INTERFACE or HEDDLE_NODE_HOST",
      options.Describe("role"), bind, options.Describe("root_host")));
}

void CheckToken(const DistOptions& options, const std::string& bind) {
  if (IsLoopback(bind) || !options.token.empty()) return;
  if (!options.insecure) {
    throw InvalidArgument(fmt::format(
        "{}: it would listen on {}, beyond loopback, without a token: set HEDDLE_TOKEN or "
        "HEDDLE_TOKEN_FILE to the job's secret (or HEDDLE_INSECURE=1 to let anybody join)",
        options.Describe("role"), bind));
  }
  Log(LogLevel::kWarning, "{} listens on {} without a token: anybody who reaches it may join ({})",
      DistRoleName(options.role), bind, options.Describe("insecure"));
}

}  // namespace

bool IsLoopback(const std::string& numeric_address) {
  in_addr ipv4{};
  if (inet_pton(AF_INET, numeric_address.c_str(), &ipv4) == 1) {
    return (ntohl(ipv4.s_addr) >> 24) == 127;
  }
  in6_addr ipv6{};
  if (inet_pton(AF_INET6, numeric_address.c_str(), &ipv6) != 1) return false;
  if (IN6_IS_ADDR_V4MAPPED(&ipv6)) return ipv6.s6_addr[12] == 127;
  return IN6_IS_ADDR_LOOPBACK(&ipv6);
}

ListenAddress ResolveListenAddress(const DistOptions& options) {
  const bool scheduler = options.role == DistRole::kScheduler;
  const std::string root = Resolve(options, "root_host", options.root_host);
  ListenAddress address;
  if (options.listen_fd >= 0) {
    address = InheritedAddress(options);
    address.settings = options.Describe("listen_fd");
  } else {
    address.bind = BindAddress(options, root);
    address.port = scheduler ? options.root_port : 0;
    address.settings = options.Describe(BindField(options));
    if (scheduler) address.settings += ", " + options.Describe("root_port");
  }
  CheckReachable(options, address.bind, root);
  CheckToken(options, address.bind);
  if (!options.node_host.empty()) {
    address.advertised = options.node_host;
  } else if (!IsWildcard(address.bind)) {
    address.advertised = address.bind;
  } else {
    address.advertised = scheduler ? options.root_host : RouteTo(options, root);
  }
  return address;
}

}  // namespace heddle::kvstore::dist
