// What echoes over TCP, each kind in a process of its own: heddle's transport, and what it is held
// against: plain sockets and a bare Boost.Asio echo.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "benchmarks/dist/processes.h"

namespace heddle::bench_dist {

// One connected client.
class EchoClient {
 public:
  virtual ~EchoClient() = default;
  // Sends `out` and receives as much into `in`; returns when all of it is back. They travel in
  // slices where the client has any.
  virtual void RoundTrip(std::span<const std::byte> out, std::span<std::byte> in) = 0;
};

// Blocking sockets: the server sends each slice back when it has it whole, a thread a connection;
// long round trips are sent by one thread of the client and received by another.
struct PlainOptions {
  std::size_t slice_bytes = 1 << 20;
  int unsent_bytes = 0;  // TCP_NOTSENT_LOWAT; 0: not set
  bool paces = true;     // if the system's congestion control does; false: another one is taken
};
// Which of these is fastest differs from machine to machine and from size to size.
inline constexpr PlainOptions kSystemKinds[] = {
    {256 << 10, 0}, {256 << 10, 16 << 10}, {1 << 20, 0}, {1 << 20, 16 << 10}};
// Those; and, where the system paces (BBR), each again that does not.
std::span<const PlainOptions> PlainKinds();
std::string NameOf(const PlainOptions& options);
// It listens at that numeric address.
ServerProcess::Serve PlainServer(PlainOptions options, const std::string& host = "127.0.0.1");
std::unique_ptr<EchoClient> ConnectPlain(const std::string& address, PlainOptions options);

// Asio's composed reads and writes of `bytes`, one io_context a side.
ServerProcess::Serve AsioServer(std::size_t bytes);
std::unique_ptr<EchoClient> ConnectAsio(const std::string& address);

}  // namespace heddle::bench_dist
