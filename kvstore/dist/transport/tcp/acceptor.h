// The listening end: accepts, makes strangers prove themselves, and hands over who has.
//
// Strangers cost little: there are at most `strangers_max` at a time, each for `handshake_limit`
// and with one message of the handshake in memory. When there are too many, one goes to make room:
// the oldest of the host that has most of them, so that a host cannot keep others out; the
// newcomer, if it is of that host itself and the oldest may still be in the midst of its handshake.
// When descriptors run out, the oldest goes once it has had some time for its handshake.
// The log gets some lines a period about them, and their number.
//
// Threads: Close and the destructor after the reactor's end, between them its handlers must run
// once more (Reactor::RunStopped).
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <boost/asio/ip/address.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>

#include "base/log_limit.h"
#include "kvstore/dist/transport/tcp/channel.h"
#include "kvstore/dist/transport/tcp/handshake.h"
#include "kvstore/dist/transport/tcp/reactor.h"
#include "kvstore/dist/transport/tcp/tcp_transport.h"

namespace heddle::kvstore::dist {

class Acceptor {
 public:
  using Welcome = std::function<std::string(const WelcomeBody& body)>;
  struct Callbacks {
    std::function<Identity()> identity;
    // Who has proved itself. Returns why it is refused all the same. Empty: it is admitted, has
    // been sent what `welcome` returns, or will be, from any thread, and the channel was taken.
    std::function<std::string(const HelloBody& peer, const std::string& address, Channel& channel,
                              const Welcome& welcome)>
        admit;
  };

  // Listens. NetworkError if that is not possible. `tls`, which outlives it, is null without TLS.
  Acceptor(Reactor& reactor, const TcpOptions& options, const TlsContext* tls, Callbacks callbacks);

  void Close();

  const std::string& address() const { return address_; }
  std::uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }

 private:
  struct Stranger;

  void Listen(const TcpOptions& options);
  void Accept();
  void OnAccepted(boost::asio::ip::tcp::socket socket, const boost::asio::ip::tcp::endpoint& from);
  void OnNotAccepted(const boost::system::error_code& error);
  // False: there is none for one more of that host.
  bool MakeRoom(const boost::asio::ip::address& host);
  // Of the host that has most of them, of which there must be one.
  Stranger& Oldest() const;
  void Await(std::shared_ptr<Stranger> stranger);
  void OnReadable(const std::shared_ptr<Stranger>& stranger);
  // With TLS. False: it must go on before the stranger is listened to, or has failed.
  bool ShakeTls(const std::shared_ptr<Stranger>& stranger);
  void Decide(const std::shared_ptr<Stranger>& stranger);
  void TurnAway(Stranger& stranger, const std::string& why);
  // Counts it and warns.
  void NoteRefusal(const std::string& address, const std::string& why);
  // As far as there is room for it in the log.
  void Warn(const std::string& line);

  Reactor& reactor_;
  const TlsContext* const tls_;
  const Callbacks callbacks_;
  const std::chrono::milliseconds handshake_limit_;
  const std::size_t strangers_max_;
  boost::asio::ip::tcp::acceptor acceptor_;
  boost::asio::steady_timer pause_;
  std::string address_;

  // The reactor's.
  std::map<boost::asio::ip::address, std::vector<Stranger*>> strangers_;  // the oldest first
  std::size_t stranger_count_ = 0;
  LogLimit log_limit_;

  std::atomic<std::uint64_t> refused_{0};
};

}  // namespace heddle::kvstore::dist
