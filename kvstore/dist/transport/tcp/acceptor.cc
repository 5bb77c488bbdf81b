#include "kvstore/dist/transport/tcp/acceptor.h"

#include <heddle/error.h>

#include <array>
#include <span>
#include <utility>

#include <boost/asio/ip/address.hpp>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/log.h"

namespace heddle::kvstore::dist {
namespace {

using boost::asio::ip::tcp;
using boost::system::error_code;

std::string AddressText(const tcp::endpoint& endpoint) {
  const std::string host = endpoint.address().to_string();
  return endpoint.address().is_v6() ? fmt::format("[{}]:{}", host, endpoint.port())
                                    : fmt::format("{}:{}", host, endpoint.port());
}

}  // namespace

struct Acceptor::Stranger {
  Stranger(Acceptor& acceptor, tcp::socket accepted, Handshake handshake)
      : owner(acceptor),
        socket(std::move(accepted)),
        limit(acceptor.reactor_.context(), acceptor.handshake_limit_),
        handshake(std::move(handshake)) {
    owner.strangers_.insert(this);
  }
  ~Stranger() { owner.strangers_.erase(this); }

  Acceptor& owner;
  tcp::socket socket;
  std::string address;
  boost::asio::steady_timer limit;
  Handshake handshake;
};

Acceptor::Acceptor(Reactor& reactor, const TcpOptions& options, Callbacks callbacks)
    : reactor_(reactor),
      callbacks_(std::move(callbacks)),
      handshake_limit_(options.handshake_limit),
      strangers_max_(options.strangers_max),
      acceptor_(reactor.context()),
      pause_(reactor.context()) {
  Listen(options);
  Accept();
}

void Acceptor::Close() {
  error_code ignored;
  acceptor_.close(ignored);
  pause_.cancel();
  for (Stranger* stranger : strangers_) {
    stranger->limit.cancel();
    stranger->socket.close(ignored);
  }
}

void Acceptor::Listen(const TcpOptions& options) {
  const std::string where =
      fmt::format("{}:{}{}", options.bind_address, options.port,
                  options.setting.empty() ? "" : fmt::format(" ({})", options.setting));
  const auto check = [&](const error_code& error, const char* what) {
    if (error) throw NetworkError(fmt::format("{} {}: {}", what, where, error.message()));
  };
  error_code error;
  if (options.listen_fd >= 0) {
    sockaddr_storage name{};
    socklen_t length = sizeof name;
    const bool known =
        getsockname(options.listen_fd, reinterpret_cast<sockaddr*>(&name), &length) == 0;
    acceptor_.assign(known && name.ss_family == AF_INET6 ? tcp::v6() : tcp::v4(), options.listen_fd,
                     error);
    check(error, "take over the listening socket of");
  } else {
    const auto host = boost::asio::ip::make_address(options.bind_address, error);
    check(error, "listen on");
    const tcp::endpoint endpoint(host, options.port);
    acceptor_.open(endpoint.protocol(), error);
    check(error, "listen on");
    acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
    acceptor_.bind(endpoint, error);
    check(error, "listen on");
    acceptor_.listen(boost::asio::socket_base::max_listen_connections, error);
    check(error, "listen on");
  }
  fcntl(acceptor_.native_handle(), F_SETFD, FD_CLOEXEC);
  const tcp::endpoint local = acceptor_.local_endpoint(error);
  check(error, "listen on");
  address_ = options.node_host.empty() ? AddressText(local)
                                       : fmt::format("{}:{}", options.node_host, local.port());
}

void Acceptor::Accept() {
  acceptor_.async_accept([this](const error_code& error, tcp::socket socket) {
    reactor_.Awake();
    if (error == boost::asio::error::operation_aborted) return;
    if (error) {  // out of descriptors, for example: others may close theirs
      Log(LogLevel::kWarning, "accept a connection at {}: {}", address_, error.message());
      pause_.expires_after(std::chrono::milliseconds(100));
      pause_.async_wait([this](const error_code& aborted) {
        reactor_.Awake();
        if (!aborted) Accept();
      });
      return;
    }
    if (strangers_.size() < strangers_max_) {
      fcntl(socket.native_handle(), F_SETFD, FD_CLOEXEC);
      error_code ignored;
      const tcp::endpoint remote = socket.remote_endpoint(ignored);
      auto stranger = std::make_shared<Stranger>(*this, std::move(socket),
                                                 Handshake::Accepting(callbacks_.identity()));
      stranger->address = AddressText(remote);
      stranger->socket.native_non_blocking(true, ignored);
      stranger->limit.async_wait([this, stranger](const error_code& aborted) {
        reactor_.Awake();
        if (aborted || !stranger->socket.is_open()) return;
        TurnAway(stranger, "no complete handshake in time");
      });
      Receive(std::move(stranger));
    } else {
      refused_.fetch_add(1, std::memory_order_relaxed);
    }
    Accept();
  });
}

void Acceptor::Receive(std::shared_ptr<Stranger> stranger) {
  auto& socket = stranger->socket;
  socket.async_wait(tcp::socket::wait_read,
                    [this, stranger = std::move(stranger)](const error_code& error) {
                      reactor_.Awake();
                      if (!error && stranger->socket.is_open()) OnReadable(stranger);
                    });
}

void Acceptor::OnReadable(const std::shared_ptr<Stranger>& stranger) {
  std::array<std::byte, Handshake::kBytesMax> buffer;
  Handshake& handshake = stranger->handshake;
  const int fd = stranger->socket.native_handle();
  while (handshake.state() == Handshake::State::kGoing) {
    const ssize_t bytes =
        recv(fd, buffer.data(), std::min(buffer.size(), handshake.wanted()), MSG_DONTWAIT);
    if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) {
      Receive(stranger);
      return;
    }
    if (bytes <= 0) {
      TurnAway(stranger, "closed during the handshake");
      return;
    }
    const std::string answer =
        handshake.Feed(std::span(buffer).first(static_cast<std::size_t>(bytes)));
    // A few hundred bytes on a new connection: there is room.
    if (!answer.empty()) send(fd, answer.data(), answer.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  Decide(stranger);
}

void Acceptor::Decide(const std::shared_ptr<Stranger>& stranger) {
  Handshake& handshake = stranger->handshake;
  if (handshake.state() == Handshake::State::kFailed) {
    TurnAway(stranger, handshake.why());
    return;
  }
  error_code ignored;
  stranger->limit.cancel();
  const int fd = stranger->socket.release(ignored);
  const std::string why = callbacks_.admit(handshake.peer(), stranger->address, fd,
                                           [&handshake] { return handshake.Admit(); });
  if (why.empty()) return;
  LogRefusal(stranger->address, why);
  const std::string answer = handshake.Refuse(why);
  send(fd, answer.data(), answer.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  close(fd);
}

void Acceptor::TurnAway(const std::shared_ptr<Stranger>& stranger, const std::string& why) {
  LogRefusal(stranger->address, why);
  stranger->limit.cancel();
  error_code ignored;
  // What it has sent and nobody has read would make the close a reset, which may overtake the
  // answer.
  stranger->socket.shutdown(tcp::socket::shutdown_send, ignored);
  std::array<std::byte, 4096> trash;
  for (int i = 0; i < 16; ++i) {
    if (recv(stranger->socket.native_handle(), trash.data(), trash.size(), MSG_DONTWAIT) <= 0) {
      break;
    }
  }
  stranger->socket.close(ignored);
}

void Acceptor::LogRefusal(const std::string& address, const std::string& why) {
  refused_.fetch_add(1, std::memory_order_relaxed);
  Log(LogLevel::kWarning, "refused the connection from {} to {}: {}", address, address_, why);
}

}  // namespace heddle::kvstore::dist
