#include "kvstore/dist/transport/tcp/acceptor.h"

#include <heddle/error.h>

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/socket.h>

#include "base/log.h"
#include "kvstore/dist/protocol/words.h"

namespace heddle::kvstore::dist {
namespace {

using boost::asio::ip::tcp;
using boost::system::error_code;

constexpr std::chrono::seconds kPatience{1};
constexpr int kLogLinesMax = 20;
constexpr std::chrono::seconds kLogPeriod{10};
constexpr const char* kTlsExpected =
    "expected TLS, given none (HEDDLE_TLS_CERTIFICATE, HEDDLE_TLS_KEY, HEDDLE_TLS_AUTHORITIES)";
constexpr const char* kCrowded = "too many connections that have not proved themselves";

// Who is young may be an honest process of a large job in the midst of its handshake.
bool IsYoung(std::chrono::steady_clock::time_point since) {
  return std::chrono::steady_clock::now() - since < kPatience;
}

std::string AddressText(const tcp::endpoint& endpoint) {
  return JoinAddress(endpoint.address().to_string(), endpoint.port());
}

}  // namespace

struct Acceptor::Stranger {
  Stranger(Acceptor& acceptor, tcp::socket accepted, const tcp::endpoint& from)
      : owner(acceptor),
        socket(std::move(accepted)),
        host(from.address()),
        address(AddressText(from)),
        limit(acceptor.reactor_.context(), acceptor.handshake_limit_),
        handshake(Handshake::Accepting(acceptor.callbacks_.identity())) {
    owner.strangers_[host].push_back(this);
    ++owner.stranger_count_;
  }
  ~Stranger() { Leave(); }
  Stranger(const Stranger&) = delete;
  Stranger& operator=(const Stranger&) = delete;
  // It does not count any more.
  void Leave() {
    const auto of_host = owner.strangers_.find(host);
    if (of_host == owner.strangers_.end()) return;
    owner.stranger_count_ -= std::erase(of_host->second, this);
    if (of_host->second.empty()) owner.strangers_.erase(of_host);
  }

  Acceptor& owner;
  tcp::socket socket;
  const boost::asio::ip::address host;
  const std::string address;
  const std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
  boost::asio::steady_timer limit;
  bool begun = false;    // its first byte has come
  bool shaking = false;  // in the handshake of TLS
  std::unique_ptr<TlsStream> tls;
  Handshake handshake;
};

Acceptor::Acceptor(Reactor& reactor, const TcpOptions& options, const TlsContext* tls,
                   Callbacks callbacks)
    : reactor_(reactor),
      tls_(tls),
      callbacks_(std::move(callbacks)),
      handshake_limit_(options.handshake_limit),
      strangers_max_(options.strangers_max),
      acceptor_(reactor.context()),
      pause_(reactor.context()),
      log_limit_(kLogLinesMax, kLogPeriod) {
  Listen(options);
  Accept();
}

void Acceptor::Close() {
  error_code ignored;
  acceptor_.close(ignored);
  pause_.cancel();
  for (const auto& [host, strangers] : strangers_) {
    for (Stranger* stranger : strangers) {
      stranger->limit.cancel();
      stranger->socket.close(ignored);
    }
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
    const auto bind = [&] {
      acceptor_.open(endpoint.protocol(), error);
      check(error, "listen on");
      acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
      acceptor_.bind(endpoint, error);
      check(error, "listen on");
    };
    bind();
    const std::uint16_t bound = acceptor_.local_endpoint(error).port();
    if (options.port == 0 && bound == options.reserved_port) {
      // Held meanwhile, so that the system chooses another.
      const tcp::acceptor reserved = std::exchange(acceptor_, tcp::acceptor(reactor_.context()));
      bind();
    }
    acceptor_.listen(boost::asio::socket_base::max_listen_connections, error);
    check(error, "listen on");
  }
  fcntl(acceptor_.native_handle(), F_SETFD, FD_CLOEXEC);
  acceptor_.non_blocking(true, error);
  check(error, "listen on");
  // Else accept waits for the next connection where one has gone again.
  acceptor_.set_option(boost::asio::socket_base::enable_connection_aborted(true), error);
  check(error, "listen on");
  const tcp::endpoint local = acceptor_.local_endpoint(error);
  check(error, "listen on");
  address_ =
      options.node_host.empty() ? AddressText(local) : JoinAddress(options.node_host, local.port());
}

void Acceptor::Accept() {
  // async_accept would want a descriptor also while nobody waits.
  acceptor_.async_wait(tcp::acceptor::wait_read, [this](const error_code& aborted) {
    reactor_.Awake();
    if (aborted || !acceptor_.is_open()) return;
    error_code error;
    tcp::endpoint from;
    tcp::socket socket = acceptor_.accept(from, error);
    if (error && error != boost::asio::error::would_block) {
      OnNotAccepted(error);
      return;
    }
    if (!error) OnAccepted(std::move(socket), from);
    Accept();
  });
}

void Acceptor::OnNotAccepted(const error_code& error) {
  const bool out_of_descriptors = error == boost::system::errc::too_many_files_open ||
                                  error == boost::system::errc::too_many_files_open_in_system;
  if (out_of_descriptors && stranger_count_ > 0 && !IsYoung(Oldest().since)) {
    TurnAway(Oldest(), fmt::format("{}: {}", kCrowded, error.message()));
    Accept();
    return;
  }
  Warn(fmt::format("accept a connection at {}: {}", address_, error.message()));
  // Others may close theirs.
  pause_.expires_after(std::chrono::milliseconds(100));
  pause_.async_wait([this](const error_code& aborted) {
    reactor_.Awake();
    if (!aborted) Accept();
  });
}

void Acceptor::OnAccepted(tcp::socket socket, const tcp::endpoint& from) {
  if (!MakeRoom(from.address())) {
    NoteRefusal(AddressText(from), kCrowded);
    return;
  }
  fcntl(socket.native_handle(), F_SETFD, FD_CLOEXEC);
  error_code ignored;
  socket.native_non_blocking(true, ignored);
  const auto stranger = std::make_shared<Stranger>(*this, std::move(socket), from);
  stranger->limit.async_wait([this, stranger](const error_code& aborted) {
    reactor_.Awake();
    if (aborted || !stranger->socket.is_open()) return;
    TurnAway(*stranger, "no complete handshake in time");
  });
  Await(stranger);
}

bool Acceptor::MakeRoom(const boost::asio::ip::address& host) {
  if (stranger_count_ < strangers_max_) return true;
  const auto own = strangers_.find(host);
  const std::size_t own_count = own == strangers_.end() ? 0 : own->second.size();
  Stranger& oldest = Oldest();
  if (IsYoung(oldest.since) && own_count + 1 >= strangers_.at(oldest.host).size()) return false;
  TurnAway(oldest, kCrowded);
  return true;
}

Acceptor::Stranger& Acceptor::Oldest() const {
  const auto crowd = std::max_element(
      strangers_.begin(), strangers_.end(),
      [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  return *crowd->second.front();
}

void Acceptor::Await(std::shared_ptr<Stranger> stranger) {
  auto& socket = stranger->socket;
  socket.async_wait(tcp::socket::wait_read,
                    [this, stranger = std::move(stranger)](const error_code& error) {
                      reactor_.Awake();
                      if (!error && stranger->socket.is_open()) OnReadable(stranger);
                    });
}

bool Acceptor::ShakeTls(const std::shared_ptr<Stranger>& stranger) {
  const int fd = stranger->socket.native_handle();
  if (!stranger->begun) {
    std::byte first{};
    const ssize_t bytes = recv(fd, &first, 1, MSG_PEEK | MSG_DONTWAIT);
    if (bytes == 1) {
      stranger->begun = true;
      stranger->shaking = BeginsTls(first);
      if (stranger->shaking) stranger->tls = tls_->Accepting(fd);
      // It shall hear why, in its own language.
      if (!stranger->shaking) stranger->handshake.RefuseAll(kTlsExpected);
    } else if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) {
      Await(stranger);
      return false;
    }
  }
  if (!stranger->shaking) return true;
  switch (stranger->tls->Shake()) {
    case TlsStream::State::kGoing:
      Await(stranger);
      return false;
    case TlsStream::State::kFailed:
      TurnAway(*stranger, stranger->tls->why());
      return false;
    case TlsStream::State::kOpen:
      stranger->shaking = false;
  }
  return true;
}

void Acceptor::OnReadable(const std::shared_ptr<Stranger>& stranger) {
  if (tls_ != nullptr && !ShakeTls(stranger)) return;
  std::array<std::byte, Handshake::kBytesMax> buffer;
  Handshake& handshake = stranger->handshake;
  const int fd = stranger->socket.native_handle();
  TlsStream* const tls = stranger->tls.get();
  while (handshake.state() == Handshake::State::kGoing) {
    const iovec run{buffer.data(), std::min(buffer.size(), handshake.wanted())};
    const auto [bytes, error] = ReadFrom(fd, tls, &run, 1);
    if (bytes < 0 && (error == EAGAIN || error == EINTR)) {
      Await(stranger);
      return;
    }
    if (bytes <= 0) {
      TurnAway(*stranger, "closed during the handshake");
      return;
    }
    Say(fd, tls, handshake.Feed(std::span(buffer).first(static_cast<std::size_t>(bytes))));
  }
  Decide(stranger);
}

void Acceptor::Decide(const std::shared_ptr<Stranger>& stranger) {
  Handshake& handshake = stranger->handshake;
  if (handshake.state() == Handshake::State::kFailed) {
    TurnAway(*stranger, handshake.why());
    return;
  }
  error_code ignored;
  stranger->limit.cancel();
  Channel channel{.socket = UniqueFd(stranger->socket.release(ignored)),
                  .tls = std::move(stranger->tls)};
  // The welcome may be said later, from elsewhere.
  const auto rest = std::make_shared<Handshake>(std::move(handshake));
  const std::string why =
      callbacks_.admit(rest->peer(), stranger->address, channel,
                       [rest](const WelcomeBody& body) { return rest->Admit(body); });
  if (why.empty()) return;
  NoteRefusal(stranger->address, why);
  Say(channel.socket.get(), channel.tls.get(), rest->Refuse(why));
}

void Acceptor::TurnAway(Stranger& stranger, const std::string& why) {
  NoteRefusal(stranger.address, why);
  stranger.Leave();
  stranger.limit.cancel();
  error_code ignored;
  // What it has sent and nobody has read would make the close a reset, which may overtake the
  // answer.
  stranger.socket.shutdown(tcp::socket::shutdown_send, ignored);
  std::array<std::byte, 4096> trash;
  for (int i = 0; i < 16; ++i) {
    if (recv(stranger.socket.native_handle(), trash.data(), trash.size(), MSG_DONTWAIT) <= 0) {
      break;
    }
  }
  stranger.socket.close(ignored);
}

void Acceptor::NoteRefusal(const std::string& address, const std::string& why) {
  refused_.fetch_add(1, std::memory_order_relaxed);
  Warn(fmt::format("refused the connection from {} to {}: {}", address, address_, why));
}

void Acceptor::Warn(const std::string& line) {
  const auto left_out = log_limit_.Take(std::chrono::steady_clock::now());
  if (!left_out) return;
  if (*left_out > 0) {
    Log(LogLevel::kWarning, "left out {} lines about connections to {}", *left_out, address_);
  }
  Log(LogLevel::kWarning, "{}", line);
}

}  // namespace heddle::kvstore::dist
