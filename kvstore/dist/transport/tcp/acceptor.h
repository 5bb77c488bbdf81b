// The listening end: accepts, makes strangers prove themselves, and hands over who has.
// Threads: Close and the destructor after the reactor's end, between them its handlers must run
// once more (Reactor::RunStopped).
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>

#include "kvstore/dist/transport/tcp/handshake.h"
#include "kvstore/dist/transport/tcp/reactor.h"
#include "kvstore/dist/transport/tcp/tcp_transport.h"

namespace heddle::kvstore::dist {

class Acceptor {
 public:
  struct Callbacks {
    std::function<Identity()> identity;
    // Who has proved itself, on descriptor `fd`. Returns why it is refused all the same. Empty: it
    // is admitted, has been sent what `welcome` returns, and the descriptor is the callee's.
    std::function<std::string(const HelloBody& peer, const std::string& address, int fd,
                              const std::function<std::string()>& welcome)>
        admit;
  };

  // Listens. NetworkError if that is not possible.
  Acceptor(Reactor& reactor, const TcpOptions& options, Callbacks callbacks);

  void Close();

  const std::string& address() const { return address_; }
  std::uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }

 private:
  struct Stranger;

  void Listen(const TcpOptions& options);
  void Accept();
  void Receive(std::shared_ptr<Stranger> stranger);
  void OnReadable(const std::shared_ptr<Stranger>& stranger);
  void Decide(const std::shared_ptr<Stranger>& stranger);
  void TurnAway(const std::shared_ptr<Stranger>& stranger, const std::string& why);
  void LogRefusal(const std::string& address, const std::string& why);

  Reactor& reactor_;
  const Callbacks callbacks_;
  const std::chrono::milliseconds handshake_limit_;
  const std::size_t strangers_max_;
  boost::asio::ip::tcp::acceptor acceptor_;
  boost::asio::steady_timer pause_;
  std::string address_;
  std::unordered_set<Stranger*> strangers_;  // the reactor's
  std::atomic<std::uint64_t> refused_{0};
};

}  // namespace heddle::kvstore::dist
