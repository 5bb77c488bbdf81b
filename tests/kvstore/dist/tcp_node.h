// A node for tests of the TCP transport: records what its transport tells it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/env.h"
#include "kvstore/dist/transport/tcp/tcp_transport.h"

namespace heddle::kvstore::dist_test {

using dist::Kind;
using dist::Message;
using dist::NodeId;
using dist::Reception;
using dist::Role;

using TestClock = std::chrono::steady_clock;

inline TestClock::time_point In(std::chrono::milliseconds time) { return TestClock::now() + time; }
// Far beyond what anything here takes; only a broken transport reaches it.
inline TestClock::time_point Long() { return In(std::chrono::seconds(60)); }

inline constexpr NodeId kServer0{Role::kServer, 0};
inline constexpr NodeId kWorker0{Role::kWorker, 0};

inline dist::TcpOptions OptionsOf(NodeId self, Reception reception = Reception::kCallersFirst) {
  dist::TcpOptions options;
  options.self = self;
  options.incarnation = 1000 * static_cast<std::uint64_t>(self.role) + self.rank + 1;
  options.job_id = "test";
  options.listen = self.role != Role::kWorker;
  options.reception = reception;
  options.shared_memory = EnvBool("HEDDLE_SHARED_MEMORY", true);  // both are tested
  return options;
}

inline dist::Payload PayloadOf(std::string text) {
  auto owner = std::make_shared<const std::string>(std::move(text));
  const auto bytes = std::as_bytes(std::span(*owner));
  return {owner, bytes};
}

inline std::string TextOf(const dist::Payload& payload) {
  std::string text;
  for (const auto& run : payload.runs()) {
    text.append(reinterpret_cast<const char*>(run.data()), run.size());
  }
  return text;
}

class TcpNode : public dist::TransportEvents {
 public:
  struct Loss {
    NodeId peer;
    std::string address;
    std::string why;
  };

  explicit TcpNode(dist::TcpOptions options)
      : transport(dist::TcpTransport::Create(std::move(options), *this)) {}
  ~TcpNode() override { transport->Close(); }

  void OnConnected(NodeId peer, dist::Incarnation, const std::string&) override {
    const std::lock_guard lock(mutex);
    connected.push_back(peer);
    changed.notify_all();
  }
  std::shared_ptr<dist::Landing> OnHeader(NodeId from, const Message& header,
                                          std::uint64_t bytes) override {
    return land ? land(from, header, bytes) : nullptr;
  }
  void OnMessage(NodeId from, Message&& message) override {
    if (answer) answer(from, message);
    const std::lock_guard lock(mutex);
    received.emplace_back(from, std::move(message));
    changed.notify_all();
  }
  void OnLost(NodeId peer, const std::string& address, const std::string& why) override {
    const std::lock_guard lock(mutex);
    lost.push_back({peer, address, why});
    changed.notify_all();
  }

  // Runs the transport, or sleeps while others do, until `done`, which is called under `mutex`.
  // False at `until`.
  bool WaitFor(const std::function<bool()>& done, TestClock::time_point until = Long()) {
    for (;;) {
      {
        const std::lock_guard lock(mutex);
        if (done()) return true;
      }
      if (TestClock::now() >= until) return false;
      if (!transport->RunOne(In(std::chrono::milliseconds(5)))) {
        std::unique_lock lock(mutex);
        changed.wait_for(lock, std::chrono::milliseconds(1));
      }
    }
  }
  bool WaitForMessages(std::size_t count) {
    return WaitFor([&] { return received.size() >= count; });
  }
  bool WaitForLoss() {
    return WaitFor([&] { return !lost.empty(); });
  }

  // Copies, for when the transport may still receive.
  std::vector<std::pair<NodeId, Message>> Received() {
    const std::lock_guard lock(mutex);
    return received;
  }
  std::vector<Loss> Lost() {
    const std::lock_guard lock(mutex);
    return lost;
  }

  // All under `mutex`.
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<NodeId> connected;
  std::vector<std::pair<NodeId, Message>> received;
  std::vector<Loss> lost;
  // Set before the transport is used.
  std::function<std::shared_ptr<dist::Landing>(NodeId, const Message&, std::uint64_t)> land;
  std::function<void(NodeId, const Message&)> answer;

  std::unique_ptr<dist::TcpTransport> transport;  // last: it calls the above
};

// Memory for one payload, in runs of `run_bytes`.
class TestLanding : public dist::Landing {
 public:
  TestLanding(std::uint64_t bytes, std::size_t run_bytes) : text_(bytes, '?') {
    for (std::size_t at = 0; at < bytes; at += run_bytes) {
      runs_.push_back(std::as_writable_bytes(
          std::span(text_).subspan(at, std::min<std::size_t>(run_bytes, bytes - at))));
    }
  }

  std::span<const std::span<std::byte>> runs() override { return runs_; }
  bool BeginRead() override {
    mutex_.lock();
    if (!revoked_) return true;
    mutex_.unlock();
    return false;
  }
  void EndRead() override {
    if (++reads == revoked_after) revoked_ = true;
    mutex_.unlock();
  }
  dist::Payload Finish() override { return PayloadOf(text_); }

  void Revoke() {
    const std::lock_guard lock(mutex_);
    revoked_ = true;
  }
  std::string text() {
    const std::lock_guard lock(mutex_);
    return text_;
  }

  std::atomic<int> reads{0};
  // Given up, as by Revoke, once so many reads are done: 0 is never.
  int revoked_after = 0;

 private:
  std::mutex mutex_;
  bool revoked_ = false;
  std::string text_;
  std::vector<std::span<std::byte>> runs_;
};

}  // namespace heddle::kvstore::dist_test
