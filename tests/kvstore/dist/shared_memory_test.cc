// Which peers share memory, what happens where the system does not let them, and that a peer which
// does what it likes with the memory is lost like any other.
#include <heddle/error.h>
#include <heddle/logging.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "kvstore/dist/transport/shm/meeting.h"
#include "tests/kvstore/dist/plain_socket.h"
#include "tests/kvstore/dist/random_bodies.h"
#include "tests/kvstore/dist/tcp_node.h"

namespace heddle::kvstore::dist_test {
namespace {

using namespace dist;  // NOLINT(google-build-using-namespace)
using testing::HasSubstr;

// How many connected TCP sockets this process has at the port of that address. Not by
// /proc/self/net/tcp, which may leave some out while others come and go.
int ConnectionsAt(const std::string& address) {
  const auto port = static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename());
    sockaddr_in local{};
    socklen_t length = sizeof local;
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&local), &length) != 0 ||
        local.sin_family != AF_INET || ntohs(local.sin_port) != port) {
      continue;
    }
    tcp_info info{};
    length = sizeof info;
    getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length);
    if (info.tcpi_state == TCP_ESTABLISHED) ++count;
  }
  return count;
}

TcpOptions Options(NodeId self, bool shared_memory) {
  TcpOptions options =
      OptionsOf(self, self == kServer0 ? Reception::kThread : Reception::kCallersFirst);
  options.shared_memory = shared_memory;
  return options;
}

// A message of each connection, there and back.
void ExpectService(TcpNode& server, TcpNode& worker) {
  const std::size_t before = worker.Received().size();
  for (const std::size_t bytes : {std::size_t{100}, std::size_t{3} << 20}) {
    Message message;
    message.kind = Kind::kPush;
    message.payload = PayloadOf(std::string(bytes, 'x'));
    worker.transport->Send(kServer0, message);
  }
  ASSERT_TRUE(worker.WaitForMessages(before + 2));
  EXPECT_TRUE(server.Lost().empty());
}

struct Echo {
  explicit Echo(bool server_shares = true, bool worker_shares = true)
      : server(Options(kServer0, server_shares)), worker(Options(kWorker0, worker_shares)) {
    server.answer = [this](NodeId from, const Message& message) {
      Message value = message;
      value.kind = Kind::kValue;
      server.transport->Send(from, std::move(value));
    };
    worker.transport->Connect(kServer0, server.transport->address(), Long());
  }
  std::string address() const { return server.transport->address(); }

  TcpNode server;
  TcpNode worker;
};

TEST(SharedMemory, PeersOfOneHostLeaveTcp) {
  Echo echo;
  EXPECT_EQ(ConnectionsAt(echo.address()), 0);
  ExpectService(echo.server, echo.worker);
}

TEST(SharedMemory, EitherEndSwitchesItOff) {
  for (const bool server_shares : {false, true}) {
    Echo echo(server_shares, !server_shares);
    EXPECT_EQ(ConnectionsAt(echo.address()), 2);
    ExpectService(echo.server, echo.worker);
  }
}

// ---- Where the system does not allow it

// This thread, and those that it starts, may not call this; with `argument`, if that is the first.
// False where the test may not say so.
bool Forbid(std::uint32_t call, std::optional<std::uint32_t> argument) {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[0])),
      BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, argument.value_or(0), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  if (argument) filter[3].code = BPF_JMP | BPF_JEQ | BPF_K;
  const sock_fprog program{std::size(filter), filter};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// Collects the log's lines from debug on, while it lives.
class DebugLog {
 public:
  DebugLog() {
    SetLogLevel(LogLevel::kDebug);
    SetLogSink([this](LogLevel level, std::string_view message) {
      if (level == LogLevel::kDebug) text_ += std::string(message) + "\n";
    });
  }
  ~DebugLog() {
    SetLogSink({});
    SetLogLevel(before_);
  }
  const std::string& text() const { return text_; }  // once nobody logs any more

 private:
  const LogLevel before_ = GetLogLevel();
  std::string text_;
};

void ExpectTcpWithout(std::uint32_t call, std::optional<std::uint32_t> argument,
                      const std::string& line) {
  const DebugLog log;
  bool allowed = false;
  // Whoever is forbidden something stays so: a thread of its own.
  std::thread([&] {
    allowed = Forbid(call, argument);
    if (!allowed) return;
    Echo echo;
    EXPECT_EQ(ConnectionsAt(echo.address()), 2);
    ExpectService(echo.server, echo.worker);
  }).join();
  if (!allowed) GTEST_SKIP() << "this system does not let threads forbid themselves calls";
  EXPECT_THAT(log.text(), HasSubstr(line));
}

TEST(SharedMemory, WithoutAnonymousMemoryTcpServes) {
  ExpectTcpWithout(SYS_memfd_create, std::nullopt,
                   "without shared memory: make shared memory: Operation not permitted");
}

TEST(SharedMemory, WithoutUnixSocketsTcpServes) {
  ExpectTcpWithout(SYS_socket, AF_UNIX,
                   "without shared memory: make a Unix socket: Operation not permitted");
}

// ---- Meetings

TEST(SharedMemory, WhereNobodyWaitsIsAnError) {
  MeetingName name{};
  name[3] = std::byte{7};
  EXPECT_THROW(MeetAt(name, SharedRings::kRingBytesMin), NetworkError);
  EXPECT_THROW(MeetingPoint().Take(), NetworkError);
}

// Connects to a meeting point and leaves bytes and descriptors of its own.
UniqueFd LeaveAt(const MeetingName& name, const std::vector<int>& fds) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  std::string path("\0heddle-", 8);
  for (const std::byte byte : name) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned>(byte));
    path += digits;
  }
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::copy(path.begin(), path.end(), address.sun_path);
  EXPECT_EQ(connect(socket.get(), reinterpret_cast<const sockaddr*>(&address),
                    static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size())),
            0);
  char byte = 'm';
  iovec run{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &run;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  }
  EXPECT_EQ(sendmsg(socket.get(), &message, 0), 1);
  return socket;
}

TEST(SharedMemory, WhatIsLeftAtAMeetingPointMustBeMemory) {
  const UniqueFd null(open("/dev/null", O_RDWR | O_CLOEXEC));
  for (const std::vector<int>& fds : {std::vector<int>{},
                                      {null.get()},
                                      {null.get(), null.get(), null.get()},
                                      {null.get(), null.get(), null.get(), null.get()}}) {
    MeetingPoint meeting;
    const UniqueFd left = LeaveAt(meeting.name(), fds);
    EXPECT_THROW(meeting.Take(), NetworkError) << fds.size();
  }
  UniqueFd memory;
  const auto rings = SharedRings::Make(SharedRings::kRingBytesMin, &memory);
  MeetingPoint meeting;
  const UniqueFd left = LeaveAt(meeting.name(), {memory.get(), null.get(), null.get()});
  EXPECT_NE(meeting.Take().rings, nullptr);
}

// ---- Peers that do what they like

// A worker of the job behind a right handshake, with the memory in its own hands.
class Rogue {
 public:
  explicit Rogue(const std::string& address) {
    PlainSocket socket(address);
    MeetingPoint meeting;
    Handshake handshake = Handshake::Connecting(
        {.node = {Role::kWorker, 7}, .incarnation = 7, .job_id = "test", .token = ""},
        Link::kUrgent, meeting.name());
    socket.Say(handshake.Start());
    while (handshake.wanted() > 0) {
      const std::string heard = socket.Hear(handshake.wanted());
      if (heard.empty()) break;
      socket.Say(handshake.Feed(std::as_bytes(std::span(heard))));
    }
    EXPECT_TRUE(handshake.welcome().shares) << handshake.why();
    channel = meeting.Take();
  }

  void Say(std::string text) const {
    const iovec run{text.data(), text.size()};
    const auto moved = channel.rings->Write(&run, 1);
    EXPECT_TRUE(moved && moved->bytes == text.size());
    Ring();
  }
  void Ring() const {
    const std::uint64_t count = 1;
    EXPECT_EQ(write(channel.peer_bell.get(), &count, sizeof count), 8);
  }
  // The process of it has ended, by whatever.
  void Die() { channel.socket = UniqueFd(); }

  Channel channel;
};

class SharedMemoryRogue : public testing::Test {
 protected:
  ~SharedMemoryRogue() override {
    EXPECT_TRUE(echo.worker.Lost().empty());
    const std::size_t before = echo.worker.Received().size();
    Message message;
    message.kind = Kind::kPush;
    echo.worker.transport->Send(kServer0, message);
    EXPECT_TRUE(echo.worker.WaitForMessages(before + 1));
  }
  TcpNode::Loss WaitForLoss() {
    EXPECT_TRUE(echo.server.WaitForLoss());
    return echo.server.Lost().at(0);
  }

  Echo echo;
};

Message SmallPush() {
  Message push;
  push.kind = Kind::kPush;
  return push;
}

TEST_F(SharedMemoryRogue, NonsenseIsNamedAndEndsTheConnection) {
  const Rogue rogue(echo.address());
  rogue.Say(HeaderOf(SmallPush()));
  ASSERT_TRUE(echo.server.WaitForMessages(1));
  rogue.Say(std::string(64, '\xff'));
  const auto lost = WaitForLoss();
  EXPECT_EQ(lost.peer, (NodeId{Role::kWorker, 7}));
  EXPECT_THAT(lost.why, HasSubstr("unknown kind 255"));
}

// All that it says before its end is heard.
TEST_F(SharedMemoryRogue, ADeathIsNoticedBehindWhatWasSaid) {
  Rogue rogue(echo.address());
  for (int i = 0; i < 50; ++i) rogue.Say(HeaderOf(SmallPush()));
  rogue.Die();
  EXPECT_THAT(WaitForLoss().why, HasSubstr("closed the connection"));
  EXPECT_EQ(echo.server.Received().size(), 50u);
}

TEST_F(SharedMemoryRogue, ADeathInTheMiddleOfAMessageIsNamedSo) {
  Rogue rogue(echo.address());
  rogue.Say(HeaderOf(SmallPush()).substr(0, 30));
  rogue.Die();
  EXPECT_THAT(WaitForLoss().why, HasSubstr("in the middle of a message"));
}

// However often it rings, it is heard, and the others are.
TEST_F(SharedMemoryRogue, BellsHarmNobody) {
  const Rogue rogue(echo.address());
  for (int i = 0; i < 20; ++i) {
    for (int j = 0; j < 1000; ++j) rogue.Ring();
    rogue.Say(HeaderOf(SmallPush()));
    ASSERT_TRUE(echo.server.WaitForMessages(static_cast<std::size_t>(i) + 1));
  }
}

// What comes through the socket is none of its business.
TEST_F(SharedMemoryRogue, BytesBesideTheMemoryEndTheConnection) {
  const Rogue rogue(echo.address());
  send(rogue.channel.socket.get(), "x", 1, MSG_NOSIGNAL);
  EXPECT_EQ(WaitForLoss().peer, (NodeId{Role::kWorker, 7}));
}

// Another mapping of the same memory, found among this process' own.
TEST_F(SharedMemoryRogue, BrokenPositionsAreNamedAndEndTheConnection) {
  const Rogue rogue(echo.address());
  std::ifstream maps("/proc/self/maps");
  std::string line;
  std::vector<std::uint64_t*> controls;
  while (std::getline(maps, line)) {
    if (line.find("memfd:heddle") == std::string::npos) continue;
    controls.push_back(reinterpret_cast<std::uint64_t*>(std::stoull(line, nullptr, 16)));
  }
  rogue.Say(HeaderOf(SmallPush()));
  ASSERT_TRUE(echo.server.WaitForMessages(1));
  // The one in which 64 bytes have been written by who did not make it.
  int broken = 0;
  for (std::uint64_t* const control : controls) {
    std::atomic_ref written(control[256 / 8]);
    if (written.load() != 64) continue;
    written.store(64 + (std::uint64_t{1} << 40));
    ++broken;
  }
  ASSERT_GT(broken, 0);
  rogue.Ring();
  EXPECT_THAT(WaitForLoss().why, HasSubstr("broken"));
}

}  // namespace
}  // namespace heddle::kvstore::dist_test
