#include "kvstore/dist/status.h"

#include <heddle/error.h>

#include <utility>

#include <fmt/format.h>

#include "kvstore/dist/membership.h"
#include "kvstore/dist/protocol/bodies.h"

namespace heddle::kvstore::dist {

constexpr NodeId kScheduler = {Role::kScheduler, 0};

StatusClient::StatusClient(DistOptions options, const TransportFactory& make_transport,
                           std::chrono::steady_clock::time_point deadline)
    : options_(std::move(options)), transport_(make_transport(*this, NewIncarnation())) {
  ConnectToScheduler(*transport_, options_, deadline);
}

StatusClient::~StatusClient() { transport_->Close(); }

std::optional<std::string> StatusClient::Ask(std::chrono::steady_clock::time_point deadline) {
  {
    MutexLock lock(mutex_);
    answer_.reset();
  }
  transport_->Send(kScheduler, {.kind = Kind::kStatus});
  transport_->Flush();
  MutexLock lock(mutex_);
  while (!answer_ && !lost_) {
    if (!changed_.WaitUntil(mutex_, deadline) && !answer_ && !lost_) {
      throw TimeoutError(fmt::format("the scheduler at {} has not said how the job is",
                                     SchedulerAddress(options_)));
    }
  }
  return std::exchange(answer_, std::nullopt);
}

void StatusClient::OnMessage(NodeId /*from*/, Message&& message) {
  TextBody body;
  if (message.kind != Kind::kStatusReply || !Decode(message.meta, &body)) return;
  MutexLock lock(mutex_);
  answer_ = std::move(body.text);
  changed_.NotifyAll();
}

void StatusClient::OnLost(NodeId /*peer*/, const std::string& /*address*/,
                          const std::string& /*why*/) {
  MutexLock lock(mutex_);
  lost_ = true;
  changed_.NotifyAll();
}

}  // namespace heddle::kvstore::dist
