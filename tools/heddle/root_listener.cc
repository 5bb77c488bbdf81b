#include "tools/heddle/root_listener.h"

#include <heddle/error.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "kvstore/dist/listen_address.h"

namespace heddle::tools {
namespace {

using AddressInfo = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressInfo LookUp(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int status = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (status != 0) {
    throw InvalidArgument(
        fmt::format("root_host {} (--root-host): cannot find its address: {}", host,
                    status == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(status)));
  }
  return {found, &freeaddrinfo};
}

// IPv4 before IPv6, as the processes of the job choose.
const addrinfo& Choose(const addrinfo& found) {
  for (const addrinfo* info = &found; info != nullptr; info = info->ai_next) {
    if (info->ai_family == AF_INET) return *info;
  }
  return found;
}

// All addresses of this machine: to listen at, but nowhere to connect to from another one. "0", and
// for IPv6 "::ffff:0.0.0.0", are ways to write it.
bool IsWildcard(const addrinfo& address) {
  if (address.ai_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(address.ai_addr)->sin_addr.s_addr == INADDR_ANY;
  }
  if (address.ai_family != AF_INET6) return false;
  const in6_addr& ip = reinterpret_cast<const sockaddr_in6*>(address.ai_addr)->sin6_addr;
  constexpr in6_addr kMapped = {{{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff}}};
  return IN6_IS_ADDR_UNSPECIFIED(&ip) || IN6_ARE_ADDR_EQUAL(&ip, &kMapped);
}

int PortOf(int listener) {
  sockaddr_storage local{};
  socklen_t bytes = sizeof(local);
  if (getsockname(listener, reinterpret_cast<sockaddr*>(&local), &bytes) != 0) return 0;
  return ntohs(local.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(local).sin6_port
                                           : reinterpret_cast<const sockaddr_in&>(local).sin_port);
}

// The address of this machine that is used towards `host`, which may be "user@name".
std::string AddressTowards(const Host& host) {
  DistOptions options;
  options.role = DistRole::kServer;
  options.root_host = host.name.substr(host.name.find('@') + 1);
  options.sources["root_host"] = "a host of the job";
  options.token = "some";  // whether it may listen there is the scheduler's to say
  try {
    return kvstore::dist::ResolveListenAddress(options).bind;
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(fmt::format(
        "{}; to be started, give the address of this machine with --root-host", error.what()));
  }
}

std::string RootHost(const Job& job, const std::vector<Host>& hosts) {
  if (!job.root_host.empty()) return job.root_host;
  std::string address = "127.0.0.1";
  for (const Host& host : hosts) {
    address = AddressTowards(host);
    if (!kvstore::dist::IsLoopback(address)) return address;
  }
  return address;
}

}  // namespace

RootListener ListenAt(const std::string& host, int port) {
  const AddressInfo found = LookUp(host, port);
  const addrinfo& address = Choose(*found);
  if (IsWildcard(address)) {
    throw InvalidArgument(fmt::format(
        "root_host {} (--root-host): expected one address of this machine, to which the "
        "processes of the job connect, given that of all interfaces",
        host));
  }
  FileDescriptor listener(socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int yes = 1;
  if (!listener || setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)) != 0 ||
      bind(listener.get(), address.ai_addr, address.ai_addrlen) != 0 ||
      listen(listener.get(), SOMAXCONN) != 0) {
    const int error = errno;
    const std::string setting =
        error == EADDRNOTAVAIL
            ? fmt::format("root_host {} (--root-host): expected an address of this machine", host)
            : fmt::format("root_port {} (--root-port)", port);
    throw IoError(
        fmt::format("{}: cannot listen on {}:{}: {}", setting, host, port, std::strerror(error)));
  }
  const int bound = PortOf(listener.get());
  return {std::move(listener), host, bound};
}

RootListener ListenFor(const Job& job, const std::vector<Host>& hosts) {
  return ListenAt(RootHost(job, hosts), job.root_port);
}

Task SchedulerTask(const Job& job, RootListener& listener) {
  const Place place = {.role = DistRole::kScheduler};
  Task task = {
      .name = PlaceName(place),
      .command = {.arguments = job.scheduler,
                  .environment = FullEnvironment(job, place, listener.host, listener.port)},
      .works = false};
  task.command.environment.push_back(fmt::format("HEDDLE_LISTEN_FD={}", listener.socket.get()));
  task.command.inherited.push_back(std::move(listener.socket));
  return task;
}

void AskForCause(Task& scheduler) {
  std::array<int, 2> ends;
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    throw IoError(fmt::format("cannot make a pair of sockets: {}", std::strerror(errno)));
  }
  scheduler.cause = FileDescriptor(ends[0]);
  scheduler.command.environment.push_back(fmt::format("HEDDLE_FAILURE_FD={}", ends[1]));
  scheduler.command.inherited.emplace_back(ends[1]);
}

}  // namespace heddle::tools
