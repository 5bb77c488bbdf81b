#include "tests/tools/test_network.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
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

constexpr std::size_t kFrameBytesMax = 2048;

bool Try(const std::string& command) {
  return std::system((command + " > /dev/null 2>&1").c_str()) == 0;
}

void Do(const std::string& command) {
  if (!Try(command)) throw std::runtime_error(command);
}

// A TAP device named `name` of a namespace; its descriptor works everywhere.
int OpenTap(const std::string& space, const std::string& name) {
  int tap = -1;
  std::thread([&] {  // a thread of its own, which ends in that namespace
    const int there = open(("/run/netns/" + space).c_str(), O_RDONLY | O_CLOEXEC);
    if (there < 0 || setns(there, CLONE_NEWNET) != 0) return;
    close(there);
    tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    ifreq request{};
    request.ifr_flags = IFF_TAP | IFF_NO_PI;
    std::strncpy(request.ifr_name, name.c_str(), IFNAMSIZ - 1);
    if (tap >= 0 && ioctl(tap, TUNSETIFF, &request) != 0) {
      close(tap);
      tap = -1;
    }
  })
      .join();
  return tap;
}

}  // namespace

std::string TestNetwork::WhyNot() {
  const std::string space = "heddle-try-" + std::to_string(getpid());
  if (!Try("ip netns add " + space)) return "no network namespaces here";
  const int tap = OpenTap(space, "eth0");
  if (tap >= 0) close(tap);
  Try("ip netns del " + space);
  return tap >= 0 ? "" : "no TAP devices here";
}

TestNetwork::TestNetwork(int hosts, int networks, const Link& link, std::uint64_t seed)
    : link_(link), random_(seed) {
  for (int host = 1; host <= hosts; ++host) {
    Do("ip netns add " + NameOf(host));
    Do("ip -n " + NameOf(host) + " link set lo up");
    for (int network = 0; network < networks; ++network) AddPort(host, network);
  }
  thread_ = std::thread([this] { Run(); });
}

TestNetwork::~TestNetwork() {
  stopping_ = true;
  thread_.join();
  for (const auto& port : ports_) {
    close(port->tap);
    if (port->network == 0) Try("ip netns del " + NameOf(port->host));
  }
}

void TestNetwork::Cut(int host, bool cut) {
  for (const auto& port : ports_) {
    if (port->host == host) port->cut = cut;
  }
}

std::vector<std::string> TestNetwork::On(int host) const {
  return {"/usr/bin/env", "ip", "netns", "exec", NameOf(host)};
}

std::string TestNetwork::NameOf(int host) const {
  return "heddle-" + std::to_string(getpid()) + "-" + std::to_string(host);
}

void TestNetwork::AddPort(int host, int network) {
  auto port = std::make_unique<Port>();
  port->host = host;
  port->network = network;
  const std::string name = "eth" + std::to_string(network);
  port->tap = OpenTap(NameOf(host), name);
  if (port->tap < 0) throw std::runtime_error("no TAP device in " + NameOf(host));
  const std::string ip = "ip -n " + NameOf(host) + " ";
  const std::string last = std::to_string(host);
  const std::string v6 = network == 0 ? "fd00:77::" : "fd00:77:" + std::to_string(network) + "::";
  Do(ip + "addr add 10.77." + std::to_string(network) + "." + last + "/24 dev " + name);
  Do(ip + "addr add " + v6 + last + "/64 dev " + name + " nodad");
  Do(ip + "link set " + name + " up");
  ports_.push_back(std::move(port));
}

void TestNetwork::Run() {
  std::vector<pollfd> waits;
  for (const auto& port : ports_)
    waits.push_back({.fd = port->tap, .events = POLLIN, .revents = 0});
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
  std::array<char, kFrameBytesMax> buffer;
  for (int i = 0; i < 64; ++i) {
    const ssize_t bytes = read(from.tap, buffer.data(), buffer.size());
    if (bytes < 14) return;
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
    if (frame.to->cut || write(frame.to->tap, frame.bytes.data(), frame.bytes.size()) < 0) {
      ++frames_lost_;
    }
  }
}

}  // namespace heddle::tools
