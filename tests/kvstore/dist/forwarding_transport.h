// A transport that leaves all to another one: for tests that look on, or step in, at some calls.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "kvstore/dist/transport/transport.h"

namespace heddle::kvstore::dist {

class ForwardingTransport : public Transport {
 public:
  explicit ForwardingTransport(std::unique_ptr<Transport> transport)
      : transport_(std::move(transport)) {}

  SendId Send(NodeId to, Message message, std::function<void()> sent) override {
    return transport_->Send(to, std::move(message), std::move(sent));
  }
  void Raise(NodeId to, SendId id, std::int32_t priority) override {
    transport_->Raise(to, id, priority);
  }
  Revoked Revoke(NodeId to, SendId id) override { return transport_->Revoke(to, id); }
  void Flush() override { transport_->Flush(); }
  bool RunOne(std::chrono::steady_clock::time_point until) override {
    return transport_->RunOne(until);
  }
  void TakeArrived() override { transport_->TakeArrived(); }
  void Interrupt() override { transport_->Interrupt(); }
  std::string address() const override { return transport_->address(); }
  void SetSelf(NodeId self) override { transport_->SetSelf(self); }
  bool Rename(NodeId from, NodeId to) override { return transport_->Rename(from, to); }
  void Connect(NodeId peer, const std::string& address,
               std::chrono::steady_clock::time_point deadline,
               const std::function<bool()>& given_up) override {
    transport_->Connect(peer, address, deadline, given_up);
  }
  void Disconnect(NodeId peer) override { transport_->Disconnect(peer); }
  void Close() override { transport_->Close(); }

 protected:
  Transport& transport() { return *transport_; }

 private:
  const std::unique_ptr<Transport> transport_;
};

}  // namespace heddle::kvstore::dist
