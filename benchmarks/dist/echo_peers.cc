#include "benchmarks/dist/echo_peers.h"

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <thread>
#include <vector>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <dirent.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/check.h"

namespace heddle::bench_dist {
namespace {

using boost::asio::ip::tcp;

void SetAffinity(pid_t thread, int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (cpu < 0 || i == cpu) CPU_SET(i, &set);
  }
  CHECK(sched_setaffinity(thread, sizeof set, &set) == 0);
}

int PortOf(const std::string& address) {
  return std::atoi(address.substr(address.rfind(':') + 1).c_str());
}

void SetTcpOption(int fd, int name, int value) {
  CHECK(setsockopt(fd, IPPROTO_TCP, name, &value, sizeof value) == 0);
}

void Prepare(int fd, const PlainOptions& options) {
  SetTcpOption(fd, TCP_NODELAY, 1);
  if (options.unsent_bytes > 0) SetTcpOption(fd, TCP_NOTSENT_LOWAT, options.unsent_bytes);
}

// False: the other end has closed.
bool ReceiveAll(int fd, std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t got = recv(fd, bytes.data(), bytes.size(), 0);
    if (got <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(got));
  }
  return true;
}

bool SendAll(int fd, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(sent));
  }
  return true;
}

// The size of a round trip comes first, so that one server serves all sizes.
void ServePlain(int fd, const PlainOptions& options) {
  std::vector<std::byte> slice(options.slice_bytes);
  for (std::uint64_t rest = 0; ReceiveAll(fd, std::as_writable_bytes(std::span(&rest, 1)));) {
    while (rest > 0) {
      const auto part = std::span(slice).first(std::min<std::uint64_t>(rest, slice.size()));
      if (!ReceiveAll(fd, part) || !SendAll(fd, part)) return;
      rest -= part.size();
    }
  }
}

class PlainClient : public EchoClient {
 public:
  PlainClient(const std::string& address, PlainOptions options)
      : options_(options), fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to.sin_port = htons(static_cast<std::uint16_t>(PortOf(address)));
    CHECK(connect(fd_, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0);
    Prepare(fd_, options);
  }
  ~PlainClient() override { close(fd_); }

  void RoundTrip(std::span<const std::byte> out, std::span<std::byte> in) override {
    const std::uint64_t bytes = out.size();
    const auto size = std::as_bytes(std::span(&bytes, 1));
    const auto send_slices = [&] {
      for (auto rest = out; !rest.empty();) {
        const auto slice = rest.first(std::min(rest.size(), options_.slice_bytes));
        CHECK(SendAll(fd_, slice));
        rest = rest.subspan(slice.size());
      }
    };
    if (bytes <= kShort) {
      std::array<std::byte, sizeof bytes + kShort> together;
      std::copy(size.begin(), size.end(), together.begin());
      std::copy(out.begin(), out.end(), together.begin() + sizeof bytes);
      CHECK(SendAll(fd_, std::span(together).first(sizeof bytes + out.size())));
      CHECK(ReceiveAll(fd_, in));
      return;
    }
    CHECK(SendAll(fd_, size));
    std::thread sender(send_slices);
    CHECK(ReceiveAll(fd_, in));
    sender.join();
  }

 private:
  static constexpr std::size_t kShort = 16 << 10;
  const PlainOptions options_;
  const int fd_;
};

class AsioSession : public std::enable_shared_from_this<AsioSession> {
 public:
  AsioSession(tcp::socket socket, std::size_t bytes) : socket_(std::move(socket)), buffer_(bytes) {
    socket_.set_option(tcp::no_delay(true));
  }
  void Read() {
    boost::asio::async_read(socket_, boost::asio::buffer(buffer_),
                            [self = shared_from_this()](const auto& error, std::size_t) {
                              if (!error) self->Write();
                            });
  }

 private:
  void Write() {
    boost::asio::async_write(socket_, boost::asio::buffer(buffer_),
                             [self = shared_from_this()](const auto& error, std::size_t) {
                               if (!error) self->Read();
                             });
  }

  tcp::socket socket_;
  std::vector<std::byte> buffer_;
};

class AsioClient : public EchoClient {
 public:
  explicit AsioClient(const std::string& address) : socket_(context_) {
    socket_.connect(
        {boost::asio::ip::address_v4::loopback(), static_cast<std::uint16_t>(PortOf(address))});
    socket_.set_option(tcp::no_delay(true));
  }

  void RoundTrip(std::span<const std::byte> out, std::span<std::byte> in) override {
    int pending = 2;
    const auto done = [&pending](const boost::system::error_code& error, std::size_t) {
      CHECK(!error);
      --pending;
    };
    boost::asio::async_write(socket_, boost::asio::buffer(out.data(), out.size()), done);
    boost::asio::async_read(socket_, boost::asio::buffer(in.data(), in.size()), done);
    context_.restart();
    while (pending > 0) context_.run_one();
  }

 private:
  boost::asio::io_context context_{1};
  tcp::socket socket_;
};

}  // namespace

void PinThisThread(int cpu) { SetAffinity(0, cpu); }

ServerProcess::ServerProcess(const Serve& serve) {
  int ends[2];
  CHECK(pipe(ends) == 0);
  pid_ = fork();
  CHECK(pid_ >= 0);
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    serve([&](const std::string& address) {
      CHECK(write(ends[1], address.data(), address.size()) == static_cast<ssize_t>(address.size()));
      close(ends[1]);
    });
    _exit(1);
  }
  close(ends[1]);
  std::array<char, 64> text;
  const ssize_t bytes = read(ends[0], text.data(), text.size());
  CHECK(bytes > 0);
  address_.assign(text.data(), static_cast<std::size_t>(bytes));
  close(ends[0]);
}

ServerProcess::~ServerProcess() {
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

double ServerProcess::CpuSeconds() const {
  clockid_t clock;
  timespec time{};
  CHECK(clock_getcpuclockid(pid_, &clock) == 0 && clock_gettime(clock, &time) == 0);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

void ServerProcess::Pin(int cpu) const {
  const std::string folder = "/proc/" + std::to_string(pid_) + "/task";
  DIR* const tasks = opendir(folder.c_str());
  CHECK(tasks != nullptr);
  while (const dirent* task = readdir(tasks)) {
    if (task->d_name[0] != '.') SetAffinity(std::atoi(task->d_name), cpu);
  }
  closedir(tasks);
}

ServerProcess::Serve PlainServer(PlainOptions options) {
  return [options](const auto& ready) {
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in here{};
    here.sin_family = AF_INET;
    here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof here;
    CHECK(bind(listener, reinterpret_cast<sockaddr*>(&here), length) == 0);
    CHECK(listen(listener, 8) == 0);
    CHECK(getsockname(listener, reinterpret_cast<sockaddr*>(&here), &length) == 0);
    ready("127.0.0.1:" + std::to_string(ntohs(here.sin_port)));
    for (;;) {
      const int fd = accept(listener, nullptr, nullptr);
      CHECK(fd >= 0);
      Prepare(fd, options);
      ServePlain(fd, options);
      close(fd);
    }
  };
}

std::unique_ptr<EchoClient> ConnectPlain(const std::string& address, PlainOptions options) {
  return std::make_unique<PlainClient>(address, options);
}

ServerProcess::Serve AsioServer(std::size_t bytes) {
  return [bytes](const auto& ready) {
    boost::asio::io_context context(1);
    tcp::acceptor acceptor(context, {boost::asio::ip::address_v4::loopback(), 0});
    ready("127.0.0.1:" + std::to_string(acceptor.local_endpoint().port()));
    std::make_shared<AsioSession>(acceptor.accept(), bytes)->Read();
    context.run();
  };
}

std::unique_ptr<EchoClient> ConnectAsio(const std::string& address) {
  return std::make_unique<AsioClient>(address);
}

}  // namespace heddle::bench_dist
