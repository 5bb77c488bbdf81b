#include "benchmarks/dist/echo_peers.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <string_view>
#include <thread>
#include <vector>

#include <arpa/inet.h>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/check.h"
#include "base/mutex.h"
#include "benchmarks/support/bars.h"

namespace heddle::bench_dist {
namespace {

using boost::asio::ip::tcp;

int PortOf(const std::string& address) {
  return std::atoi(address.substr(address.rfind(':') + 1).c_str());
}

sockaddr_in SocketAddress(const std::string& host, int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  CHECK(inet_pton(AF_INET, host.c_str(), &address.sin_addr) == 1);
  return address;
}

void SetTcpOption(int fd, int name, int value) {
  CHECK(setsockopt(fd, IPPROTO_TCP, name, &value, sizeof value) == 0);
}

// As heddle's connections within a host.
void DoNotPace(int fd) {
  constexpr std::string_view kUnpaced = "reno";
  setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, kUnpaced.data(), kUnpaced.size());
}

bool SystemPaces() {
  std::string name;
  std::ifstream("/proc/sys/net/ipv4/tcp_congestion_control") >> name;
  return name == "bbr";
}

void Prepare(int fd, const PlainOptions& options) {
  if (!options.paces) DoNotPace(fd);
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
    const sockaddr_in to = SocketAddress(address.substr(0, address.rfind(':')), PortOf(address));
    CHECK(connect(fd_, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0);
    Prepare(fd_, options);
    sender_ = std::thread([this] { SendSlices(); });
  }
  ~PlainClient() override {
    Hand({}, /*last=*/true);
    sender_.join();
    close(fd_);
  }

  void RoundTrip(std::span<const std::byte> out, std::span<std::byte> in) override {
    const std::uint64_t bytes = out.size();
    const auto size = std::as_bytes(std::span(&bytes, 1));
    if (bytes <= kShort) {
      std::array<std::byte, sizeof bytes + kShort> together;
      std::copy(size.begin(), size.end(), together.begin());
      std::copy(out.begin(), out.end(), together.begin() + sizeof bytes);
      CHECK(SendAll(fd_, std::span(together).first(sizeof bytes + out.size())));
      CHECK(ReceiveAll(fd_, in));
      return;
    }
    CHECK(SendAll(fd_, size));
    Hand(out, /*last=*/false);
    CHECK(ReceiveAll(fd_, in));
    MutexLock lock(mutex_);
    while (!rest_.empty()) changed_.Wait(mutex_);
  }

 private:
  static constexpr std::size_t kShort = 16 << 10;

  void Hand(std::span<const std::byte> out, bool last) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    rest_ = out;
    last_ = last;
    changed_.NotifyAll();
  }

  void SendSlices() EXCLUDES(mutex_) {
    for (;;) {
      std::span<const std::byte> rest;
      {
        MutexLock lock(mutex_);
        while (rest_.empty() && !last_) changed_.Wait(mutex_);
        if (last_) return;
        rest = rest_;
      }
      while (!rest.empty()) {
        const auto slice = rest.first(std::min(rest.size(), options_.slice_bytes));
        CHECK(SendAll(fd_, slice));
        rest = rest.subspan(slice.size());
      }
      MutexLock lock(mutex_);
      rest_ = {};
      changed_.NotifyAll();
    }
  }

  const PlainOptions options_;
  const int fd_;
  Mutex mutex_;
  CondVar changed_;
  std::span<const std::byte> rest_ GUARDED_BY(mutex_);  // what the sender is to send
  bool last_ GUARDED_BY(mutex_) = false;
  std::thread sender_;
};

class AsioSession : public std::enable_shared_from_this<AsioSession> {
 public:
  AsioSession(tcp::socket socket, std::size_t bytes) : socket_(std::move(socket)), buffer_(bytes) {
    socket_.set_option(tcp::no_delay(true));
    DoNotPace(socket_.native_handle());
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
    DoNotPace(socket_.native_handle());
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

ServerProcess::Serve PlainServer(PlainOptions options, const std::string& host) {
  return [options, host](const auto& ready) {
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in here = SocketAddress(host, 0);
    socklen_t length = sizeof here;
    CHECK(bind(listener, reinterpret_cast<sockaddr*>(&here), length) == 0);
    CHECK(listen(listener, 8) == 0);
    CHECK(getsockname(listener, reinterpret_cast<sockaddr*>(&here), &length) == 0);
    ready(host + ":" + std::to_string(ntohs(here.sin_port)));
    for (;;) {
      const int fd = accept(listener, nullptr, nullptr);
      CHECK(fd >= 0);
      Prepare(fd, options);
      std::thread([fd, options] {
        ServePlain(fd, options);
        close(fd);
      }).detach();
    }
  };
}

std::span<const PlainOptions> PlainKinds() {
  static const std::vector<PlainOptions> kinds = [] {
    std::vector<PlainOptions> all(std::begin(kSystemKinds), std::end(kSystemKinds));
    if (!SystemPaces()) return all;
    for (PlainOptions kind : kSystemKinds) {
      kind.paces = false;
      all.push_back(kind);
    }
    return all;
  }();
  return kinds;
}

std::string NameOf(const PlainOptions& options) {
  return fmt::format("plain sockets, slices of {}{}{}", bench::BytesText(options.slice_bytes),
                     options.unsent_bytes > 0 ? ", TCP_NOTSENT_LOWAT" : "",
                     options.paces ? "" : ", not paced");
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
