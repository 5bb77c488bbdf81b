#include "kvstore/dist/transport/tcp/connector.h"

#include <heddle/error.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <exception>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/system/system_error.hpp>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/socket.h>

#include "base/log.h"
#include "engine/wait_checks.h"

namespace heddle::kvstore::dist {
namespace {

using boost::asio::ip::tcp;
using boost::system::error_code;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kFirstPause{10};
constexpr milliseconds kPauseMax{500};
// So long a step may go without a look at `cancelled`, and a pause without one at the check of the
// thread's WaitCheckScope.
constexpr milliseconds kStep{50};

class Attempts {
 public:
  Attempts(const ConnectTarget& target, const Identity& self, Link link)
      : target_(target), self_(self), link_(link) {}

  Connected Run() {
    const auto [host, port] = SplitAddress();
    for (milliseconds pause = kFirstPause;; pause = std::min(2 * pause, kPauseMax)) {
      std::optional<Connected> connected = TryAll(host, port);
      if (connected) return *std::move(connected);
      if (target_.cut && !listens_) Refused(seen_);
      Sleep(pause);
    }
  }

 private:
  std::string What() const {
    return fmt::format("connect to {} at {}", ToString(target_.peer), target_.address);
  }
  [[noreturn]] void Refused(const std::string& why) const {
    throw NetworkError(fmt::format("{}: {}", What(), why));
  }
  // Throws if it is time to give up.
  void CheckTime() const {
    if (target_.cancelled()) Refused("it was given up; last seen: " + seen_);
    if (Clock::now() < target_.deadline) return;
    throw TimeoutError(fmt::format("{}: not done by the deadline; last seen: {}", What(), seen_));
  }
  void Sleep(milliseconds time) const {
    const auto end = Clock::now() + time;
    for (auto now = Clock::now(); now < end; now = Clock::now()) {
      CheckTime();
      internal::WaitChecks::Look();
      std::this_thread::sleep_until(std::min({end, now + kStep, target_.deadline}));
    }
    CheckTime();
  }

  std::pair<std::string, std::uint16_t> SplitAddress() const {
    const std::string& text = target_.address;
    const std::size_t colon = text.rfind(':');
    std::uint16_t port = 0;
    if (colon != std::string::npos) {
      const char* const end = text.data() + text.size();
      const auto [at, error] = std::from_chars(text.data() + colon + 1, end, port);
      std::string host = text.substr(0, colon);
      if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
      if (error == std::errc() && at == end && port != 0 && !host.empty()) return {host, port};
    }
    throw InvalidArgument(fmt::format("{}: expected an address such as '127.0.0.1:9091'", What()));
  }

  // Nothing if it is worth another try: also if this process has no descriptor left for it, or no
  // thread.
  std::optional<Connected> TryAll(const std::string& host, std::uint16_t port) {
    try {
      const std::vector<tcp::endpoint> endpoints = Resolve(host, port);
      listens_ = endpoints.empty();
      for (const tcp::endpoint& endpoint : endpoints) {
        std::optional<Connected> connected = Try(endpoint, host);
        if (connected) return connected;
      }
    } catch (const boost::system::system_error& error) {  // Asio's, which is no std::system_error
      NotTried(error.code().message());
    } catch (const std::system_error& error) {
      NotTried(error.code().message());
    }
    return std::nullopt;
  }
  void NotTried(const std::string& why) {
    seen_ = fmt::format("it could not be tried: {}", why);
    listens_ = true;  // for all that is known
  }

  // Looking names up blocks for as long as it likes: on a thread that is left alone if it takes
  // longer than there is time.
  std::vector<tcp::endpoint> Resolve(const std::string& host, std::uint16_t port) {
    error_code error;
    const auto numeric = boost::asio::ip::make_address(host, error);
    if (!error) return {tcp::endpoint(numeric, port)};
    using Found = std::pair<error_code, std::vector<tcp::endpoint>>;
    std::promise<Found> promise;
    auto future = promise.get_future();
    std::thread([host, port, promise = std::move(promise)]() mutable {
      try {
        boost::asio::io_context context;
        tcp::resolver resolver(context);
        Found found;
        for (const auto& entry : resolver.resolve(host, std::to_string(port), found.first)) {
          found.second.push_back(entry.endpoint());
        }
        promise.set_value(std::move(found));
      } catch (...) {
        promise.set_exception(std::current_exception());
      }
    }).detach();
    seen_ = fmt::format("no answer to the question where '{}' is", host);
    while (future.wait_until(std::min(target_.deadline, Clock::now() + kStep)) !=
           std::future_status::ready) {
      CheckTime();
    }
    auto [why, endpoints] = future.get();
    if (endpoints.empty()) seen_ = fmt::format("cannot find '{}': {}", host, why.message());
    return endpoints;
  }

  // Until `done`; throws if it is time to give up first.
  void RunUntil(boost::asio::io_context& context, const bool& done) {
    while (!done) {
      context.restart();
      context.run_one_until(std::min(target_.deadline, Clock::now() + kStep));
      if (!done) CheckTime();
    }
  }

  // Nothing if the system does not allow it, or nobody wants it.
  std::optional<MeetingPoint> Meeting() const {
    if (!target_.shared_memory) return std::nullopt;
    try {
      return std::make_optional<MeetingPoint>();
    } catch (const NetworkError& error) {
      Log(LogLevel::kDebug, "{}: without shared memory: {}", What(), error.what());
      return std::nullopt;
    }
  }

  // Where nobody listens on a port of those that the system gives to connecting sockets, one of
  // them may be given just that port, and is then connected to itself. Reset, so that nothing is
  // left of it on the port.
  static error_code DropIfOwn(tcp::socket& socket) {
    error_code error;
    if (socket.local_endpoint(error) != socket.remote_endpoint(error) || error) return {};
    socket.set_option(tcp::socket::linger(true, 0), error);
    socket.close(error);
    return boost::asio::error::connection_refused;
  }

  // Nothing if it is worth another try. Throws if it is not.
  std::optional<Connected> Try(const tcp::endpoint& endpoint, const std::string& host) {
    boost::asio::io_context context(1);
    tcp::socket socket(context);
    error_code error;
    bool done = false;
    socket.async_connect(endpoint, [&](const error_code& result) {
      error = result;
      done = true;
    });
    seen_ = "no answer";
    RunUntil(context, done);
    if (!error) error = DropIfOwn(socket);
    listens_ = listens_ || error != boost::asio::error::connection_refused;
    if (error) {
      seen_ = error.message();
      return std::nullopt;
    }
    fcntl(socket.native_handle(), F_SETFD, FD_CLOEXEC);
    socket.native_non_blocking(true, error);
    seen_ = "it listens, but has not answered the handshake";
    std::unique_ptr<TlsStream> tls;
    if (target_.tls != nullptr) {
      tls = target_.tls->Connecting(socket.native_handle(), host);
      if (!ShakeTls(context, socket, *tls)) return std::nullopt;
    }
    std::optional<MeetingPoint> meeting = Meeting();
    Handshake handshake = Handshake::Connecting(
        self_, link_, meeting ? meeting->name() : MeetingName{},
        target_.cut ? std::optional(target_.cut->received) : std::nullopt, ++*target_.attempts);
    if (!Shake(context, socket, tls.get(), handshake)) return std::nullopt;
    const HelloBody& peer = handshake.peer();
    if (peer.node.role != target_.peer.role ||
        (peer.node.rank != -1 && peer.node.rank != target_.peer.rank)) {
      Refused(fmt::format("{} listens there", ToString(peer.node)));
    }
    if (target_.cut && peer.incarnation != target_.cut->incarnation) {
      Refused("another process listens there");
    }
    Connected connected;
    connected.incarnation = peer.incarnation;
    connected.received = handshake.welcome().received;
    if (!handshake.welcome().shares) {
      connected.channel = {.socket = UniqueFd(socket.release(error)), .tls = std::move(tls)};
      return connected;
    }
    try {
      connected.channel = meeting->Take();
      return connected;
    } catch (const NetworkError& failed) {
      Refused(fmt::format("{}; without shared memory (HEDDLE_SHARED_MEMORY=0) it would go on",
                          failed.what()));
    }
  }

  void AwaitBytes(boost::asio::io_context& context, tcp::socket& socket) {
    bool done = false;
    socket.async_wait(tcp::socket::wait_read, [&](const error_code&) { done = true; });
    RunUntil(context, done);
  }

  // False: it is worth another try.
  bool ShakeTls(boost::asio::io_context& context, tcp::socket& socket, TlsStream& tls) {
    TlsStream::State state = tls.Shake();
    for (bool first = true; state == TlsStream::State::kGoing; first = false) {
      AwaitBytes(context, socket);
      if (first) CheckAnswersInTls(socket.native_handle());
      state = tls.Shake();
    }
    if (state == TlsStream::State::kOpen) return true;
    seen_ = tls.why();
    if (tls.refused()) Refused(seen_);
    return false;
  }

  // A peer without TLS says why it does not go on: nothing of the handshake has been said to it.
  void CheckAnswersInTls(int fd) const {
    std::array<std::byte, Handshake::kBytesMax> buffer;
    const ssize_t bytes = recv(fd, buffer.data(), buffer.size(), MSG_PEEK | MSG_DONTWAIT);
    if (bytes <= 0 || !CheckPreamble(std::span(buffer).first(1)).empty()) return;
    auto rest = std::span(buffer).first(static_cast<std::size_t>(bytes));
    Handshake handshake = Handshake::Connecting(self_, link_);
    while (!rest.empty() && handshake.state() == Handshake::State::kGoing) {
      const std::size_t next = std::min(rest.size(), handshake.wanted());
      handshake.Feed(rest.first(next));
      rest = rest.subspan(next);
    }
    Refused(handshake.refused_by_peer() ? handshake.why()
                                        : "expected TLS, given none (HEDDLE_TLS_CERTIFICATE)");
  }

  // False: it is worth another try.
  bool Shake(boost::asio::io_context& context, tcp::socket& socket, TlsStream* tls,
             Handshake& handshake) {
    const int fd = socket.native_handle();
    Say(fd, tls, handshake.Start());
    std::array<std::byte, Handshake::kBytesMax> buffer;
    while (handshake.state() == Handshake::State::kGoing) {
      const iovec run{buffer.data(), std::min(buffer.size(), handshake.wanted())};
      const auto [bytes, error] = ReadFrom(fd, tls, &run, 1);
      if (bytes > 0) {
        Say(fd, tls, handshake.Feed(std::span(buffer).first(static_cast<std::size_t>(bytes))));
      } else if (bytes < 0 && (error == EAGAIN || error == EINTR)) {
        AwaitBytes(context, socket);
      } else if (bytes < 0 && error == EPROTO && tls != nullptr) {
        Refused(tls->why());  // what it made of this process's certificate
      } else {
        seen_ = bytes == 0 ? "it closed the connection during the handshake"
                           : std::generic_category().message(error);
        return false;
      }
    }
    if (handshake.state() == Handshake::State::kFailed) Refused(handshake.why());
    return true;
  }

  const ConnectTarget& target_;
  const Identity& self_;
  const Link link_;
  std::string seen_ = "nothing";
  bool listens_ = true;  // somebody, at one of the endpoints tried last
};

}  // namespace

Connected ConnectTo(const ConnectTarget& target, const Identity& self, Link link) {
  return Attempts(target, self, link).Run();
}

}  // namespace heddle::kvstore::dist
