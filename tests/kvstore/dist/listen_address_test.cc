// Where a process listens. Uses loopback and whatever other addresses the machine has; nothing is
// sent.
#include "kvstore/dist/listen_address.h"

#include <heddle/dist.h>
#include <heddle/error.h>
#include <heddle/logging.h>

#include <optional>
#include <string>
#include <vector>

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/message_of.h"

namespace heddle::kvstore::dist {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

DistOptions Options(DistRole role, const std::string& root_host = "127.0.0.1") {
  DistOptions options;
  options.role = role;
  options.root_host = root_host;
  options.root_port = 9091;
  options.num_workers = options.num_servers = 1;
  return options;
}

std::string ErrorOf(const DistOptions& options) {
  return MessageOf([&] { ResolveListenAddress(options); });
}

struct Interface {
  std::string name;
  std::string address;
};

// An interface with an IPv4 address, loopback or another one.
std::optional<Interface> FindInterface(bool loopback) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return std::nullopt;
  std::optional<Interface> found;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != AF_INET) continue;
    if (((entry->ifa_flags & IFF_LOOPBACK) != 0) != loopback) continue;
    char text[INET_ADDRSTRLEN];
    const auto* const address = reinterpret_cast<const sockaddr_in*>(entry->ifa_addr);
    inet_ntop(AF_INET, &address->sin_addr, text, sizeof(text));
    found = Interface{entry->ifa_name, text};
    break;
  }
  freeifaddrs(list);
  return found;
}

// The warnings that are logged while it lives.
class Warnings {
 public:
  Warnings() {
    SetLogSink([this](LogLevel, std::string_view text) { lines.emplace_back(text); });
  }
  ~Warnings() { SetLogSink({}); }
  std::vector<std::string> lines;
};

TEST(ListenAddress, IsLoopbackKnowsAllFormsOfIt) {
  for (const char* const yes : {"127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"}) {
    EXPECT_TRUE(IsLoopback(yes)) << yes;
  }
  for (const char* const no : {"0.0.0.0", "::", "10.0.0.1", "128.0.0.1", "::ffff:10.0.0.1", "x"}) {
    EXPECT_FALSE(IsLoopback(no)) << no;
  }
}

TEST(ListenAddress, IsLoopbackIfTheJobStaysOnOneMachine) {
  for (const char* const root : {"127.0.0.1", "localhost"}) {
    const ListenAddress scheduler = ResolveListenAddress(Options(DistRole::kScheduler, root));
    EXPECT_EQ(scheduler.bind, "127.0.0.1");
    EXPECT_EQ(scheduler.port, 9091);
    EXPECT_EQ(scheduler.advertised, "127.0.0.1");
    const ListenAddress server = ResolveListenAddress(Options(DistRole::kServer, root));
    EXPECT_EQ(server.bind, "127.0.0.1");
    EXPECT_EQ(server.port, 0);
    EXPECT_EQ(server.advertised, "127.0.0.1");
  }
}

TEST(ListenAddress, BeyondLoopbackATokenIsNeededAndBothVariablesAreNamed) {
  for (const DistRole role : {DistRole::kScheduler, DistRole::kServer}) {
    DistOptions options = Options(role);
    options.bind_address = "0.0.0.0";
    const Warnings warnings;
    EXPECT_THAT(ErrorOf(options),
                AllOf(HasSubstr(std::string(DistRoleName(role))), HasSubstr("0.0.0.0"),
                      HasSubstr("HEDDLE_TOKEN "), HasSubstr("HEDDLE_TOKEN_FILE"),
                      HasSubstr("HEDDLE_INSECURE=1")));
    options.token = "secret";
    EXPECT_EQ(ResolveListenAddress(options).bind, "0.0.0.0");
    EXPECT_THAT(warnings.lines, IsEmpty());
  }
}

TEST(ListenAddress, InsecureAcceptsAMissingTokenWithAWarning) {
  DistOptions options = Options(DistRole::kServer);
  options.bind_address = "0.0.0.0";
  options.insecure = true;
  const Warnings warnings;
  EXPECT_EQ(ResolveListenAddress(options).bind, "0.0.0.0");
  EXPECT_THAT(warnings.lines,
              ElementsAre(AllOf(HasSubstr("0.0.0.0"), HasSubstr("token"), HasSubstr("insecure"))));
}

TEST(ListenAddress, OnLoopbackInsecureSaysNothing) {
  DistOptions options = Options(DistRole::kServer);
  options.insecure = true;
  const Warnings warnings;
  ResolveListenAddress(options);
  EXPECT_THAT(warnings.lines, IsEmpty());
}

TEST(ListenAddress, AnInterfaceStandsForItsAddress) {
  const std::optional<Interface> loopback = FindInterface(true);
  ASSERT_TRUE(loopback);
  DistOptions options = Options(DistRole::kServer);
  options.interface = loopback->name;
  EXPECT_EQ(ResolveListenAddress(options).bind, loopback->address);
  options.interface = "no-such-if";
  EXPECT_THAT(ErrorOf(options), AllOf(HasSubstr("interface no-such-if"), HasSubstr("one of"),
                                      HasSubstr(loopback->name)));
}

TEST(ListenAddress, TheFirstOfBindAddressInterfaceAndNodeHostCounts) {
  DistOptions options = Options(DistRole::kServer);
  options.node_host = "127.0.0.3";
  EXPECT_EQ(ResolveListenAddress(options).bind, "127.0.0.3");
  options.interface = FindInterface(true).value().name;
  EXPECT_EQ(ResolveListenAddress(options).bind, "127.0.0.1");
  options.bind_address = "127.0.0.2";
  EXPECT_EQ(ResolveListenAddress(options).bind, "127.0.0.2");
  EXPECT_EQ(ResolveListenAddress(options).advertised, "127.0.0.3")
      << "node_host is what others use";
}

TEST(ListenAddress, AllInterfacesAreNeverAdvertised) {
  for (const char* const all : {"0.0.0.0", "::"}) {
    DistOptions options = Options(DistRole::kServer);
    options.token = "secret";
    options.bind_address = all;
    EXPECT_EQ(ResolveListenAddress(options).advertised, "127.0.0.1");
    options.role = DistRole::kScheduler;
    EXPECT_EQ(ResolveListenAddress(options).advertised, "127.0.0.1");
  }
}

TEST(ListenAddress, NamesThatDoNotResolveNameFieldSourceAndTheSystemsError) {
  for (const char* const field : {"root_host", "node_host", "bind_address"}) {
    DistOptions options = Options(DistRole::kScheduler);
    const std::string name = "no such host";  // never a name, so no server is asked
    if (std::string(field) == "root_host") options.root_host = name;
    if (std::string(field) == "node_host") options.node_host = name;
    if (std::string(field) == "bind_address") options.bind_address = name;
    options.sources[field] = "SOME_VARIABLE";
    EXPECT_THAT(ErrorOf(options), AllOf(HasSubstr(std::string(field) + " no such host"),
                                        HasSubstr("(SOME_VARIABLE)"), HasSubstr("not known")));
  }
}

TEST(ListenAddress, ServersOfANetworkedJobListenWhereTheSchedulerIsReached) {
  const std::optional<Interface> outer = FindInterface(false);
  if (!outer) GTEST_SKIP() << "this machine has loopback only";
  DistOptions options = Options(DistRole::kServer, outer->address);
  options.token = "secret";
  EXPECT_EQ(ResolveListenAddress(options).bind, outer->address);
  EXPECT_EQ(ResolveListenAddress(options).advertised, outer->address);
  options.role = DistRole::kScheduler;
  EXPECT_EQ(ResolveListenAddress(options).bind, outer->address);
  options.token.clear();
  EXPECT_THAT(ErrorOf(options), HasSubstr("without a token"));
}

TEST(ListenAddress, AServerOnLoopbackContradictsASchedulerThatIsNot) {
  DistOptions options = Options(DistRole::kServer, "192.0.2.1");
  options.bind_address = "127.0.0.1";
  EXPECT_THAT(ErrorOf(options), AllOf(HasSubstr("127.0.0.1"), HasSubstr("root_host 192.0.2.1"),
                                      HasSubstr("HEDDLE_BIND_ADDRESS")));
}

TEST(ListenAddress, ASocketThatIsTakenOverSaysWhereItListens) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in local{};
  local.sin_family = AF_INET;
  local.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof(local);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&local), bytes), 0);
  DistOptions options = Options(DistRole::kScheduler);
  options.listen_fd = listener;
  EXPECT_THAT(ErrorOf(options), AllOf(HasSubstr("listen_fd"), HasSubstr("another one")))
      << "bound, but not listening";
  ASSERT_EQ(listen(listener, 1), 0);
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&local), &bytes), 0);
  const ListenAddress address = ResolveListenAddress(options);
  EXPECT_EQ(address.bind, "127.0.0.1");
  EXPECT_EQ(address.port, ntohs(local.sin_port));
  close(listener);
  EXPECT_THAT(ErrorOf(options), AllOf(HasSubstr("listen_fd"), HasSubstr("Bad file descriptor")));
}

}  // namespace
}  // namespace heddle::kvstore::dist
