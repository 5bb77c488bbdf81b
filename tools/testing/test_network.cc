#include "tools/testing/test_network.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <span>
#include <stdexcept>

#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <unistd.h>

namespace heddle::tools {
namespace {

constexpr int kMtuMax = 64 << 10;
constexpr std::size_t kEthernetBytes = 14;

// What the system refuses.
[[noreturn]] void Refuse(const std::string& what) {
  throw std::runtime_error(what + ": " + std::strerror(errno));
}

std::string PathOf(int fd) {
  return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(fd);
}

void Do(const std::string& command) {
  if (std::system((command + " > /dev/null 2>&1").c_str()) != 0) throw std::runtime_error(command);
}

// In a thread of its own, which ends in whatever namespace `body` took it to.
template <class Body>
void Elsewhere(const Body& body) {
  std::exception_ptr error;
  std::thread([&] {
    try {
      body();
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
}

UniqueFd NewSpace() {
  UniqueFd space;
  Elsewhere([&] {
    if (unshare(CLONE_NEWNET) != 0) Refuse("a network namespace");
    space = UniqueFd(open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC));
    if (space.get() < 0) Refuse("/proc/thread-self/ns/net");
  });
  return space;
}

// A TAP device named `name` of a namespace; its descriptor works everywhere.
UniqueFd OpenTap(const std::string& space, const std::string& name) {
  UniqueFd tap;
  Elsewhere([&] {
    TestNetwork::Enter(space);
    tap = UniqueFd(open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC));
    if (tap.get() < 0) Refuse("/dev/net/tun");
    ifreq request{};
    request.ifr_flags = IFF_TAP | IFF_NO_PI;
    std::strncpy(request.ifr_name, name.c_str(), IFNAMSIZ - 1);
    if (ioctl(tap.get(), TUNSETIFF, &request) != 0) Refuse("a TAP device");
  });
  return tap;
}

}  // namespace

std::string TestNetwork::WhyNot() {
  try {
    const TestNetwork network(1, 1, {}, 0);
    return "";
  } catch (const std::runtime_error& error) {
    return std::string("a network between namespaces: ") + error.what();
  }
}

TestNetwork::TestNetwork(int hosts, int networks, const Link& link, std::uint64_t seed)
    : link_(link), random_(seed) {
  for (int host = 1; host <= hosts; ++host) {
    spaces_.push_back(NewSpace());
    Do("nsenter --net=" + FileOf(host) + " ip link set lo up");
    for (int network = 0; network < networks; ++network) AddPort(host, network);
  }
  thread_ = std::thread([this] { Run(); });
}

TestNetwork::~TestNetwork() {
  stopping_ = true;
  thread_.join();
}

void TestNetwork::Cut(int host, bool cut) {
  for (const auto& port : ports_) {
    if (port->host == host) port->cut = cut;
  }
}

std::vector<std::string> TestNetwork::On(int host) const {
  return {"/usr/bin/env", "nsenter", "--net=" + FileOf(host), "--"};
}

std::string TestNetwork::FileOf(int host) const {
  return PathOf(spaces_[static_cast<std::size_t>(host - 1)].get());
}

void TestNetwork::Enter(const std::string& file) {
  const UniqueFd space(open(file.c_str(), O_RDONLY | O_CLOEXEC));
  if (space.get() < 0 || setns(space.get(), CLONE_NEWNET) != 0) Refuse(file);
}

void TestNetwork::AddPort(int host, int network) {
  auto port = std::make_unique<Port>();
  port->host = host;
  port->network = network;
  const std::string name = "eth" + std::to_string(network);
  port->tap = OpenTap(FileOf(host), name);
  const std::string ip = "nsenter --net=" + FileOf(host) + " ip ";
  const std::string last = std::to_string(host);
  const std::string v6 = network == 0 ? "fd00:77::" : "fd00:77:" + std::to_string(network) + "::";
  Do(ip + "addr add 10.77." + std::to_string(network) + "." + last + "/24 dev " + name);
  Do(ip + "addr add " + v6 + last + "/64 dev " + name + " nodad");
  Do(ip + "link set " + name + " mtu " + std::to_string(link_.mtu) + " up");
  ports_.push_back(std::move(port));
}

void TestNetwork::Run() {
  std::vector<pollfd> waits;
  for (const auto& port : ports_)
    waits.push_back({.fd = port->tap.get(), .events = POLLIN, .revents = 0});
  while (!stopping_) {
    auto until = Clock::now() + std::chrono::milliseconds(20);
    if (!under_way_.empty()) until = std::min(until, under_way_.top().at);
    const auto rest = std::max(Clock::duration::zero(), until - Clock::now());
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(rest).count();
    const timespec time{.tv_sec = 0, .tv_nsec = static_cast<long>(ns)};
    ppoll(waits.data(), waits.size(), &time, nullptr);
    for (std::size_t i = 0; i < waits.size(); ++i) {
      if (waits[i].revents != 0) Take(*ports_[i]);
    }
    Deliver(Clock::now());
  }
}

// Some frames of one port.
void TestNetwork::Take(Port& from) {
  std::array<char, kEthernetBytes + kMtuMax> buffer;
  for (int i = 0; i < 64; ++i) {
    const ssize_t bytes = read(from.tap.get(), buffer.data(), buffer.size());
    if (bytes < static_cast<ssize_t>(kEthernetBytes)) return;
    const auto now = Clock::now();
    const bool dropped = from.cut || static_cast<double>(random_() >> 11) * 0x1p-53 < link_.loss;
    Address to, sender;
    std::memcpy(to.data(), buffer.data(), to.size());
    std::memcpy(sender.data(), buffer.data() + to.size(), sender.size());
    known_[{from.network, sender}] = &from;
    from.free = std::max(from.free, now);
    if (link_.bits_per_second > 0) {
      const double seconds = static_cast<double>(bytes) * 8 / link_.bits_per_second;
      const double waiting = std::chrono::duration<double>(from.free - now).count();
      if (waiting * link_.bits_per_second / 8 > static_cast<double>(link_.queue_bytes)) {
        ++frames_lost_;
        continue;
      }
      from.free +=
          std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    }
    if (dropped) {
      ++frames_lost_;
      continue;
    }
    const std::vector<char> frame(buffer.begin(), buffer.begin() + bytes);
    const auto known = known_.find({from.network, to});
    for (const auto& port : ports_) {
      if (port.get() == &from || port->network != from.network) continue;
      if (known == known_.end() || known->second == port.get()) Send(from, *port, frame, from.free);
    }
  }
}

void TestNetwork::Send(Port& from, Port& to, const std::vector<char>& bytes,
                       Clock::time_point leaves) {
  if (from.cut || to.cut) return;
  under_way_.push({leaves + link_.delay, next_number_++, &to, bytes});
}

void TestNetwork::Deliver(Clock::time_point now) {
  for (; !under_way_.empty() && under_way_.top().at <= now; under_way_.pop()) {
    const Frame& frame = under_way_.top();
    // A port whose host takes no more loses the frame, as a real one.
    if (frame.to->cut || write(frame.to->tap.get(), frame.bytes.data(), frame.bytes.size()) < 0) {
      ++frames_lost_;
    }
  }
}

}  // namespace heddle::tools
