// Hosts in network namespaces of this machine, joined by a switch that this process plays: it hands
// frames on, late, not at all, or no faster than a link carries them. Needs no more of the system
// than namespaces and TAP devices, root, and the commands ip and nsenter. The namespaces have no
// names, so that they end with the last process in them, whatever ends this one.
//
// Host 1 has the addresses 10.77.0.1 and fd00:77::1 on network 0, 10.77.1.1 and fd00:77:1::1 on
// network 1, and so on; its interfaces are eth0 for network 0, ...
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <queue>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/unique_fd.h"

namespace heddle::tools {

class TestNetwork {
 public:
  // Of what a host sends.
  struct Link {
    std::chrono::microseconds delay{0};
    double loss = 0;                                   // 0.01: one frame in a hundred
    double bits_per_second = 0;                        // 0: any
    std::size_t queue_bytes = std::size_t{256} << 10;  // more than waits for the link is dropped
    int mtu = 1500;
  };

  // Why this machine does not allow it; empty: it does.
  static std::string WhyNot();

  TestNetwork(int hosts, int networks, const Link& link, std::uint64_t seed);
  ~TestNetwork();
  TestNetwork(const TestNetwork&) = delete;
  TestNetwork& operator=(const TestNetwork&) = delete;

  // While it is cut, nothing goes from or to the host. From 1.
  void Cut(int host, bool cut);
  // What runs a command on a host: "nsenter ...".
  std::vector<std::string> On(int host) const;
  // The file of a host's namespace, for Enter; as long as this object lives.
  std::string FileOf(int host) const;
  // From now on the calling thread, and those that it starts, are on the host with this file.
  static void Enter(const std::string& file);
  std::uint64_t frames_lost() const { return frames_lost_; }

 private:
  using Clock = std::chrono::steady_clock;
  using Address = std::array<std::uint8_t, 6>;

  struct Port {
    int host = 0, network = 0;
    UniqueFd tap;
    std::atomic<bool> cut{false};
    Clock::time_point free{};  // when all that was sent has left
  };
  struct Frame {
    Clock::time_point at;  // when it arrives
    std::uint64_t number;  // frames of one time keep their order
    Port* to;
    std::vector<char> bytes;

    bool operator<(const Frame& other) const {
      return at != other.at ? at > other.at : number > other.number;
    }
  };

  void AddPort(int host, int network);
  void Run();
  void Take(Port& from);
  void Send(Port& from, Port& to, const std::vector<char>& bytes, Clock::time_point leaves);
  void Deliver(Clock::time_point now);

  const Link link_;
  std::vector<UniqueFd> spaces_;  // the hosts' namespaces
  std::vector<std::unique_ptr<Port>> ports_;
  std::atomic<bool> stopping_{false};
  std::atomic<std::uint64_t> frames_lost_{0};

  // The thread's.
  std::mt19937_64 random_;
  std::map<std::pair<int, Address>, Port*> known_;  // by network and sender
  std::priority_queue<Frame> under_way_;
  std::uint64_t next_number_ = 0;
  std::thread thread_;
};

}  // namespace heddle::tools
