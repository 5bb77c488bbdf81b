#include "tests/kvstore/dist/cutting_proxy.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <functional>
#include <utility>
#include <vector>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/check.h"

namespace heddle::kvstore::dist_test {
namespace {

sockaddr_in Loopback(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

// The next close is a reset.
void MakeReset(int fd) {
  const linger now{.l_onoff = 1, .l_linger = 0};
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
}

// One direction of a connection.
struct Stream {
  bool wants_to_read() const { return !ended && begin == end; }
  bool wants_to_write() const { return begin < end; }

  std::array<char, 16 << 10> buffer;
  std::size_t begin = 0, end = 0;
  bool ended = false;  // the sender has said its last
  bool told = false;   // so has the receiver been
};

}  // namespace

struct CuttingProxy::Pair {
  // False: a socket has failed, or the budget is used up. `mute`: what was read is lost.
  bool Move(int direction, int from, int to, bool mute = false) {
    Stream& stream = streams[static_cast<std::size_t>(direction)];
    if (from < 0) return true;  // cut already; `to` is reset when it says something
    if (stream.wants_to_read()) {
      const std::size_t room = std::min<std::uint64_t>(stream.buffer.size(), budget);
      const ssize_t bytes = recv(from, stream.buffer.data(), room, MSG_DONTWAIT);
      if (bytes < 0 && errno != EAGAIN) return false;
      if (bytes == 0) stream.ended = true;
      stream.begin = 0;
      stream.end = bytes > 0 ? static_cast<std::size_t>(bytes) : 0;
      budget -= stream.end;
      if (mute) stream.end = 0;
    }
    if (stream.wants_to_write()) {
      const ssize_t bytes = send(to, stream.buffer.data() + stream.begin, stream.end - stream.begin,
                                 MSG_DONTWAIT | MSG_NOSIGNAL);
      if (bytes < 0 && errno != EAGAIN) return false;
      if (bytes > 0) stream.begin += static_cast<std::size_t>(bytes);
    }
    if (stream.ended && !stream.wants_to_write() && !std::exchange(stream.told, true)) {
      shutdown(to, SHUT_WR);
    }
    return budget > 0;
  }
  bool over() const { return streams[0].told && streams[1].told; }

  UniqueFd client, server;
  std::uint64_t budget;
  std::array<Stream, 2> streams;
};

CuttingProxy::CuttingProxy(std::string target, const Cuts& cuts)
    : options_(cuts),
      random_(cuts.seed),
      listener_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      target_(std::move(target)) {
  sockaddr_in address = Loopback(0);
  socklen_t length = sizeof address;
  auto* const name = reinterpret_cast<sockaddr*>(&address);
  CHECK(bind(listener_.get(), name, length) == 0 && listen(listener_.get(), 64) == 0 &&
        getsockname(listener_.get(), name, &length) == 0);
  port_ = ntohs(address.sin_port);
  thread_ = std::thread([this] { Run(); });
}

CuttingProxy::~CuttingProxy() {
  stop_ = true;
  Wake();
  thread_.join();
}

void CuttingProxy::Wake() {
  constexpr std::uint64_t kOne = 1;
  CHECK(write(wake_.get(), &kOne, sizeof kOne) == sizeof kOne);
}

void CuttingProxy::Cut() {
  cut_ = true;
  Wake();
  while (cut_) std::this_thread::yield();
}

void CuttingProxy::CutTowardsTarget() {
  cut_half_ = true;
  Wake();
  while (cut_half_) std::this_thread::yield();
}

void CuttingProxy::StopListening() {
  stop_listening_ = true;
  Wake();
  while (stop_listening_) std::this_thread::yield();
}

void CuttingProxy::Redirect(const std::string& target) {
  const std::lock_guard lock(mutex_);
  target_ = target;
}

std::uint64_t CuttingProxy::Budget() {
  if (options_.bytes_max == 0 || cut_count_ >= options_.count) return UINT64_MAX;
  return 1 + random_() % options_.bytes_max;
}

void CuttingProxy::Accept() {
  UniqueFd client(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (client.get() < 0) return;
  std::string target;
  {
    const std::lock_guard lock(mutex_);
    target = target_;
  }
  UniqueFd server(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto address =
      Loopback(static_cast<std::uint16_t>(std::stoi(target.substr(target.rfind(':') + 1))));
  if (down_ || connect(server.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address)) {
    MakeReset(client.get());
    return;
  }
  for (const int fd : {client.get(), server.get()}) {
    const int yes = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  }
  auto pair = std::make_unique<Pair>();
  pair->client = std::move(client);
  pair->server = std::move(server);
  pair->budget = Budget();
  pairs_.push_back(std::move(pair));
}

void CuttingProxy::Run() {
  while (!stop_) {
    std::vector<pollfd> waits{{wake_.get(), POLLIN, 0}};
    if (listener_.get() >= 0) waits.push_back({listener_.get(), POLLIN, 0});
    for (const auto& pair : pairs_) {
      const auto events = [&](int reads, int writes) {
        return static_cast<short>((pair->streams[reads].wants_to_read() ? POLLIN : 0) |
                                  (pair->streams[writes].wants_to_write() ? POLLOUT : 0));
      };
      waits.push_back({pair->client.get(), events(0, 1), 0});
      waits.push_back({pair->server.get(), events(1, 0), 0});
    }
    poll(waits.data(), waits.size(), -1);
    std::uint64_t count = 0;
    while (read(wake_.get(), &count, sizeof count) > 0) continue;
    if (stop_listening_) listener_ = UniqueFd();
    stop_listening_ = false;
    if (cut_half_) {
      for (const auto& pair : pairs_) {
        MakeReset(pair->server.get());
        pair->server = UniqueFd();
      }
    }
    cut_half_ = false;
    const bool cut_all = cut_;
    std::erase_if(pairs_, [&](const auto& pair) {
      const bool mute = options_.servers_are_mute != nullptr && *options_.servers_are_mute;
      const bool fine = !cut_all && pair->Move(0, pair->client.get(), pair->server.get()) &&
                        pair->Move(1, pair->server.get(), pair->client.get(), mute);
      if (fine) return pair->over();
      ++cut_count_;
      MakeReset(pair->client.get());
      MakeReset(pair->server.get());
      return true;
    });
    if (cut_all) cut_ = false;
    if (listener_.get() >= 0) Accept();
  }
}

namespace {

class Proxied final : public dist::Transport {
 public:
  Proxied(std::unique_ptr<dist::Transport> transport, const Cuts& cuts, std::atomic<int>& cut_count)
      : transport_(std::move(transport)), cuts_(cuts), cut_count_(cut_count) {}
  ~Proxied() override {
    transport_.reset();
    for (const auto& proxy : proxies_) cut_count_ += proxy->cuts();
  }

  SendId Send(dist::NodeId to, dist::Message message, std::function<void()> sent) override {
    return transport_->Send(to, std::move(message), std::move(sent));
  }
  dist::Revoked Revoke(dist::NodeId to, SendId id) override { return transport_->Revoke(to, id); }
  void Flush() override { transport_->Flush(); }
  bool RunOne(std::chrono::steady_clock::time_point until) override {
    return transport_->RunOne(until);
  }
  void Interrupt() override { transport_->Interrupt(); }
  std::string address() const override { return transport_->address(); }
  void SetSelf(dist::NodeId self) override { transport_->SetSelf(self); }
  bool Rename(dist::NodeId from, dist::NodeId to) override { return transport_->Rename(from, to); }
  void Connect(dist::NodeId peer, const std::string& address,
               std::chrono::steady_clock::time_point deadline,
               const std::function<bool()>& given_up) override {
    Cuts cuts = cuts_;
    if (peer.role != dist::Role::kServer) cuts.servers_are_mute = nullptr;
    std::string proxy;
    {
      const std::lock_guard lock(mutex_);
      cuts.seed += proxies_.size();
      proxies_.push_back(std::make_unique<CuttingProxy>(address, cuts));
      proxy = proxies_.back()->address();
    }
    transport_->Connect(peer, proxy, deadline, given_up);
  }
  void Disconnect(dist::NodeId peer) override { transport_->Disconnect(peer); }
  void Close() override { transport_->Close(); }

 private:
  std::unique_ptr<dist::Transport> transport_;
  const Cuts cuts_;
  std::atomic<int>& cut_count_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<CuttingProxy>> proxies_;
};

}  // namespace

std::unique_ptr<dist::Transport> ThroughProxies(std::unique_ptr<dist::Transport> transport,
                                                const Cuts& cuts, std::atomic<int>& cut_count) {
  return std::make_unique<Proxied>(std::move(transport), cuts, cut_count);
}

}  // namespace heddle::kvstore::dist_test
