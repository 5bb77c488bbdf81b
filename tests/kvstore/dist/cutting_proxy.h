// A stretch of network, in the test's process: what connects to the proxy is connected to `target`,
// until the proxy resets it.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#include "base/unique_fd.h"
#include "kvstore/dist/transport/transport.h"

namespace heddle::kvstore::dist_test {

struct Cuts {
  std::uint64_t seed = 0;
  // Each connection is reset after up to so many bytes, of both directions together; 0: it is not.
  std::uint64_t bytes_max = 0;
  // So many connections are; then the network is sound.
  int count = 0;
  // If there is one, and once it holds: what servers say is lost, and what is said to them is not.
  const std::atomic<bool>* servers_are_mute = nullptr;
};

// Threads: every method from any thread.
class CuttingProxy {
 public:
  explicit CuttingProxy(std::string target, const Cuts& cuts = {});
  ~CuttingProxy();
  CuttingProxy(const CuttingProxy&) = delete;
  CuttingProxy& operator=(const CuttingProxy&) = delete;

  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  // Resets all connections that there are, after what is said next has been done.
  void Cut();
  // Resets them towards the target alone: who has connected learns it when it next says something.
  void CutTowardsTarget();
  // From now on whoever connects is reset at once.
  void GoDown() { down_ = true; }
  void GoUp() { down_ = false; }
  // From now on nobody listens.
  void StopListening();
  // From now on whoever connects is connected to that one.
  void Redirect(const std::string& target);
  // Connections that it has reset, of those that reached the target.
  int cuts() const { return cut_count_; }

 private:
  struct Pair;

  void Run();
  void Accept();
  std::uint64_t Budget();
  void Wake();

  const Cuts options_;
  std::mt19937_64 random_;  // the thread's
  UniqueFd listener_, wake_;
  std::uint16_t port_ = 0;
  std::mutex mutex_;
  std::string target_;
  std::atomic<bool> down_{false}, cut_{false}, cut_half_{false}, stop_listening_{false},
      stop_{false};
  std::atomic<std::uint64_t> turns_{0};
  std::atomic<int> cut_count_{0};
  std::list<std::unique_ptr<Pair>> pairs_;  // the thread's
  std::thread thread_;
};

// A transport that reaches every address through a proxy of its own.
std::unique_ptr<dist::Transport> ThroughProxies(std::unique_ptr<dist::Transport> transport,
                                                const Cuts& cuts, std::atomic<int>& cut_count);

}  // namespace heddle::kvstore::dist_test
