// One client and one server beside those that move the same bytes: what is asked of the transport
// and of the store alike. A contest's peers are forked when it is made.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "benchmarks/dist/echo_peers.h"
#include "benchmarks/dist/turns.h"
#include "benchmarks/support/bars.h"

namespace heddle::bench_dist {

inline constexpr std::size_t kMiB = 1 << 20;

// Whom the bars are about. The client is this process.
struct Ours {
  std::string what;  // it does: "pushpull"
  // What sends so many bytes to the server and waits until as many are back.
  std::function<std::function<void()>(std::size_t bytes)> operation_of;
  std::function<void(int cpu)> pin_server;
  std::function<double()> server_cpu_seconds;
};

// 4 KiB, sleeping waits, back to back and with pauses, beside a bare Boost.Asio echo. The machine's
// limit is a round trip of a thread that wakes another, which differs by a factor of three with
// where the two run: on one CPU no other has to be woken from its idle state. Left to itself, the
// system leaves two processes where they happened to meet, on one CPU or on two, so it would be a
// comparison of chances. So both are measured on one CPU and on a CPU each.
class ShortContest {
 public:
  void Run(bench::BarReport& report, const Ours& ours, bool quick) const;

 private:
  const ServerProcess asio_{AsioServer(4096)};
};

// 4 KiB where both sides poll, against fixed limits.
void RunPolling(bench::BarReport& report, const Ours& ours, bool quick);

// Plain sockets of some kinds.
class PlainPeers {
 public:
  // Forks the servers. `host`: the file of a host of a TestNetwork, which has that address; empty:
  // this one.
  explicit PlainPeers(std::span<const PlainOptions> kinds, const std::string& host = "",
                      const std::string& address = "127.0.0.1");
  // Connects this process to them.
  void Connect();
  void Pin(int cpu) const;  // the servers
  // A round trip of each kind; both spans stay as long as the contenders.
  void AddTo(std::vector<Contender>& contenders, std::span<const std::byte> out,
             std::span<std::byte> in) const;

 private:
  const std::span<const PlainOptions> kinds_;
  std::vector<std::unique_ptr<ServerProcess>> servers_;
  std::vector<std::unique_ptr<EchoClient>> clients_;
};

// Calls report(best, suffix) with the best of the plain sockets that go as the system has it, and
// with the best of those that do not pace if there are any: `contenders` are heddle and all kinds.
void ForBestPlain(std::span<const Contender> contenders,
                  const std::function<void(const Contender& best, const char* suffix)>& report);

// 1, 16 and 64 MiB beside plain sockets by slices, time and CPU seconds; each process on a CPU.
class LongContest {
 public:
  void Run(bench::BarReport& report, const Ours& ours, bool quick);

 private:
  PlainPeers plain_{PlainKinds()};
};

// 1 000 short values sent and as many asked for, beside one round trip each, of which only some are
// measured.
inline constexpr int kSmallCount = 1000;
struct SmallContest {
  std::string what;
  std::function<void(int values)> together;
  std::function<void(int values)> one_by_one;
};
void RunSmall(bench::BarReport& report, const SmallContest& ours, bool quick);

// 4 KiB there and back behind 20 MiB of lower priority, beside either alone.
inline constexpr int kBulkMebibytes = 20;
struct UrgentContest {
  std::string what;
  std::function<void()> urgent;
  std::function<void(int mebibytes)> send_bulk;
  std::function<void()> wait;  // until all that was sent is answered
};
void RunUrgent(bench::BarReport& report, const UrgentContest& ours, bool quick);

}  // namespace heddle::bench_dist
