// What a wait for an answer from a socket costs, beside a bare poll() on the same socket.
//
// A peer thread sends each message back with the time at which it does. Counted is the time from
// then until the waiting thread goes on, and the whole trip. Bound to expect: the engine adds a
// microsecond to the bare poll where the waiting thread runs the loop, and a wake-up where another
// one does.

#include <heddle/wait_poller.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "benchmarks/engine/modes.h"

namespace heddle::bench {
namespace {

void Require(bool good) {
  if (good) return;
  std::perror("bench_engine echo");
  std::exit(2);
}

// One message at a time.
class EchoPeer {
 public:
  EchoPeer() {
    Require(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets_) == 0);
    thread_ = std::thread([far = sockets_[1]] {
      std::uint64_t message = 0;
      while (recv(far, &message, sizeof(message), MSG_WAITALL) == sizeof(message)) {
        message = Ticks();
        Require(send(far, &message, sizeof(message), MSG_NOSIGNAL) == sizeof(message));
      }
    });
  }
  ~EchoPeer() {
    shutdown(sockets_[0], SHUT_RDWR);
    thread_.join();
    for (const int fd : sockets_) close(fd);
  }
  EchoPeer(const EchoPeer&) = delete;
  EchoPeer& operator=(const EchoPeer&) = delete;

  int fd() const { return sockets_[0]; }
  void Send() const {
    const std::uint64_t message = 0;
    Require(send(fd(), &message, sizeof(message), MSG_NOSIGNAL) == sizeof(message));
  }
  // When the peer sent it.
  std::uint64_t Receive() const {
    std::uint64_t message = 0;
    Require(recv(fd(), &message, sizeof(message), MSG_DONTWAIT) == sizeof(message));
    return message;
  }

 private:
  int sockets_[2] = {-1, -1};
  std::thread thread_;
};

class EchoPoller final : public WaitPoller {
 public:
  explicit EchoPoller(const EchoPeer& peer) : peer_(peer), event_(eventfd(0, EFD_NONBLOCK)) {
    Require(event_ >= 0);
  }
  ~EchoPoller() override { close(event_); }

  void Start(Completion done) {
    done_ = std::move(done);
    peer_.Send();
  }
  std::uint64_t sent_at() const { return sent_at_; }

  // The benchmark sets no deadlines.
  bool RunOne(Clock::time_point /*until*/) noexcept override {
    pollfd fds[] = {{peer_.fd(), POLLIN, 0}, {event_, POLLIN, 0}};
    Require(poll(fds, 2, -1) > 0);
    std::uint64_t count = 0;
    if (fds[1].revents != 0) Require(read(event_, &count, sizeof(count)) == sizeof(count));
    if (fds[0].revents != 0) {
      sent_at_ = peer_.Receive();
      std::exchange(done_, std::nullopt).value()();
    }
    return true;
  }
  void Interrupt() noexcept override {
    const std::uint64_t one = 1;
    Require(write(event_, &one, sizeof(one)) == sizeof(one));
  }

 private:
  const EchoPeer& peer_;
  const int event_;
  std::optional<Completion> done_;
  std::uint64_t sent_at_ = 0;
};

struct Times {
  std::vector<std::uint64_t> returns, trips;  // ticks
};

// trip() sends, waits, and says when the answer was sent.
template <class Trip>
Times TimeTrips(int count, const Trip& trip) {
  Times times;
  for (int i = 0; i < count; ++i) {
    const std::uint64_t start = Ticks();
    const std::uint64_t sent_at = trip();
    const std::uint64_t end = Ticks();
    times.returns.push_back(end - sent_at);
    times.trips.push_back(end - start);
  }
  return times;
}

void Print(const char* name, Times times, const char* end) {
  const auto quantile = [](std::vector<std::uint64_t>& ticks, double q) {
    std::sort(ticks.begin(), ticks.end());
    const auto at = static_cast<std::size_t>(q * static_cast<double>(ticks.size() - 1));
    return static_cast<double>(ticks[at]) / TicksPerNanosecond();
  };
  std::printf("\"%s_return_p50_ns\":%.0f,\"%s_return_p99_ns\":%.0f,\"%s_trip_p50_ns\":%.0f%s", name,
              quantile(times.returns, 0.5), name, quantile(times.returns, 0.99), name,
              quantile(times.trips, 0.5), end);
}

Times TimeEngine(const HarnessOptions& options, int count, bool waiting_thread_polls) {
  const EchoPeer peer;
  EchoPoller poller(peer);
  Engine engine(OptionsFor(options.workers));
  std::atomic<bool> over = false;
  std::thread io_thread;
  if (waiting_thread_polls) {
    Require(engine.AddPoller(poller));
  } else {
    io_thread = std::thread([&] {
      while (!over.load(std::memory_order_relaxed)) poller.RunOne({});
    });
  }
  const Var var = engine.NewVar();
  Times times = TimeTrips(count, [&] {
    engine.PushAsync({.writes = {var}, .start_inline = waiting_thread_polls},
                     [&poller](Completion done) { poller.Start(std::move(done)); });
    engine.WaitForVar(var);
    return poller.sent_at();
  });
  if (waiting_thread_polls) {
    engine.RemovePoller(poller);
  } else {
    over = true;
    poller.Interrupt();
    io_thread.join();
  }
  return times;
}

}  // namespace

void MeasureEcho(const HarnessOptions& options) {
  const int count = std::max(100, options.ops / 20);
  const EchoPeer peer;
  std::printf("{");
  Print("bare",
        TimeTrips(count,
                  [&peer] {
                    peer.Send();
                    pollfd fd = {peer.fd(), POLLIN, 0};
                    Require(poll(&fd, 1, -1) > 0);
                    return peer.Receive();
                  }),
        ",");
  Print("waiting_thread", TimeEngine(options, count, /*waiting_thread_polls=*/true), ",");
  Print("io_thread", TimeEngine(options, count, /*waiting_thread_polls=*/false), "}\n");
}

}  // namespace heddle::bench
