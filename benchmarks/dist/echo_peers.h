// What echoes over TCP, each kind in a process of its own: heddle's transport, and what it is held
// against: plain sockets and a bare Boost.Asio echo.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include <sys/types.h>

namespace heddle::bench_dist {

// A process that serves; ends with this object. Make all before the first thread.
class ServerProcess {
 public:
  // `serve` runs in it: it gives the address where it listens to `ready` and serves for ever.
  using Serve = std::function<void(const std::function<void(const std::string& address)>& ready)>;
  explicit ServerProcess(const Serve& serve);
  ~ServerProcess();
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  const std::string& address() const { return address_; }
  // Seconds of CPU that it has used.
  double CpuSeconds() const;
  // All its threads run on `cpu` alone; -1: anywhere.
  void Pin(int cpu) const;

 private:
  pid_t pid_ = -1;
  std::string address_;
};

// The calling thread, and those that it starts from now on.
void PinThisThread(int cpu);

// One connected client.
class EchoClient {
 public:
  virtual ~EchoClient() = default;
  // Sends `out` and receives as much into `in`; returns when all of it is back. They travel in
  // slices where the client has any.
  virtual void RoundTrip(std::span<const std::byte> out, std::span<std::byte> in) = 0;
};

// Blocking sockets: the server sends each slice back when it has it whole; long round trips are
// sent by one thread and received by another. `unsent_bytes`: TCP_NOTSENT_LOWAT, 0: not set.
struct PlainOptions {
  std::size_t slice_bytes = 1 << 20;
  int unsent_bytes = 0;
};
ServerProcess::Serve PlainServer(PlainOptions options);
std::unique_ptr<EchoClient> ConnectPlain(const std::string& address, PlainOptions options);

// Asio's composed reads and writes of `bytes`, one io_context a side.
ServerProcess::Serve AsioServer(std::size_t bytes);
std::unique_ptr<EchoClient> ConnectAsio(const std::string& address);

}  // namespace heddle::bench_dist
