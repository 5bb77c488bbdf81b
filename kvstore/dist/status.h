// Asks a job how it is.
#pragma once

#include <heddle/dist.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/mutex.h"
#include "kvstore/dist/node.h"
#include "kvstore/dist/transport/transport.h"

namespace heddle::kvstore::dist {

// A connection to a job's scheduler by somebody who has proved the job's token, but is no part of
// it: of the options only where the scheduler is, job_id and token count.
class StatusClient final : private TransportEvents {
 public:
  // Connects by `deadline`. Errors as those of a worker that does not reach its scheduler.
  StatusClient(DistOptions options, const TransportFactory& make_transport,
               std::chrono::steady_clock::time_point deadline);
  ~StatusClient() override;
  StatusClient(const StatusClient&) = delete;
  StatusClient& operator=(const StatusClient&) = delete;

  // The JSON object of docs/wire.md. Nothing: the scheduler has gone. TimeoutError at the deadline.
  std::optional<std::string> Ask(std::chrono::steady_clock::time_point deadline) EXCLUDES(mutex_);

 private:
  std::shared_ptr<Landing> OnHeader(NodeId /*from*/, const Message& /*header*/,
                                    std::uint64_t /*payload_bytes*/) override {
    return nullptr;
  }
  void OnMessage(NodeId from, Message&& message) override EXCLUDES(mutex_);
  void OnLost(NodeId peer, const std::string& address, const std::string& why) override
      EXCLUDES(mutex_);

  const DistOptions options_;
  Mutex mutex_;
  CondVar changed_;
  std::optional<std::string> answer_ GUARDED_BY(mutex_);
  bool lost_ GUARDED_BY(mutex_) = false;
  std::unique_ptr<Transport> transport_;  // its events come until it is closed
};

}  // namespace heddle::kvstore::dist
