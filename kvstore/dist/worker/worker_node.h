// The node of a worker: what the stores of a process share of a job.
#pragma once

#include <heddle/dist.h>
#include <heddle/engine.h>
#include <heddle/wait_poller.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "kvstore/dist/member_node.h"
#include "kvstore/dist/node.h"
#include "kvstore/dist/protocol/worker.h"
#include "kvstore/dist/state_signal.h"
#include "kvstore/dist/worker/worker_link.h"

namespace heddle::kvstore::dist {

// Life: Join; stores; Close. A worker that ends without Close has failed.
class WorkerNode final : public WorkerLink, private MemberNode<WorkerMachine>, private WaitPoller {
 public:
  // Returns when all nodes of the job have met. InvalidArgument, NetworkError or TimeoutError, as
  // RunServer.
  static std::shared_ptr<WorkerNode> Join(const DistOptions& options,
                                          const TransportFactory& make_transport);
  ~WorkerNode() override;

  // Tells the servers and the scheduler, once all pushes are acknowledged, that this worker leaves.
  // Returns when they know, or when the job has failed, which is logged.
  void Close();

  // The number of the next store.
  std::uint32_t NewStore();
  // A store begins; false: the last one goes, or has gone. When the last one is gone, the worker
  // closes, or has failed if one was not gone in order.
  bool StoreMade();
  // The same of what is no store, but counts as one for that. From here on the others hear of no
  // store's end before that of this: how the process ends is not known.
  bool Stay();
  void StoreGone(bool orderly);
  // This worker has failed, also if it has left in order, and its process ends: the job is told
  // why. Returns when the message has gone; what the stores wait for ends with an error.
  void Fail(const std::string& why) override;
  // Who has failed, and why, if somebody has: nothing of this job can go on.
  std::optional<std::string> failure();

  // For one engine at a time; threads that wait in others get their answers from the transport's
  // own thread.
  void Serve(Engine& engine, UnsentCalls& calls) override EXCLUDES(watched_mutex_, serving_mutex_);
  void Leave(Engine& engine, UnsentCalls& calls) override EXCLUDES(watched_mutex_, serving_mutex_);
  void WillRequest(std::int32_t server, const PartId& part, std::uint64_t requests) override
      EXCLUDES(mutex_);
  void WontRequest(std::int32_t server, const PartId& part) override EXCLUDES(mutex_);
  void CloseStore(std::uint32_t store) override EXCLUDES(mutex_);
  void CorrectClose(std::uint32_t store) override EXCLUDES(mutex_);
  void StoreClosed(std::uint32_t store) override EXCLUDES(mutex_);
  void DropStore() override EXCLUDES(mutex_);
  std::int32_t rank() const override { return rank_; }
  std::int32_t num_workers() const override { return num_workers_; }
  const PlacementOptions& placement() const override { return placement_; }
  std::int32_t num_dead() override;
  Time deadline() const override;
  using WorkerLink::Submit;
  void Submit(std::span<const std::span<Request>> calls, Outputs* out) override;
  void Supply(std::int32_t server, const PartId& part, std::uint64_t token, PushValue&& value,
              Outputs* out) override;
  bool Barrier(AnswerSink& sink, Outputs* out) override;
  void OpenBarrier(Outputs* out) override;
  void Carry(Outputs& out) override { Perform(out); }
  void TakeAnswers(std::size_t requests) override;
  // Asks the servers and the scheduler first why what waits does, which takes a moment.
  std::string DescribeState() EXCLUDES(mutex_);

 private:
  WorkerNode(const DistOptions& options, const TransportFactory& make_transport);
  void Meet();
  void ConnectToServers(const RosterBody& roster, std::chrono::steady_clock::time_point deadline);

  // Node
  void OnInput(Time now, Outputs& out, std::size_t before) override REQUIRES(mutex_);
  bool MayBeAwaited() const override REQUIRES(mutex_) {
    return member_->roster() || member_->failure() || machine_.failure();
  }
  std::shared_ptr<Landing> OnHeader(NodeId from, const Message& header,
                                    std::uint64_t payload_bytes) override EXCLUDES(mutex_);
  std::optional<Time> OnClock(Time now) override EXCLUDES(watched_mutex_);
  void RaisePriority(const Raised& raised) override;
  void SendMessage(Outgoing&& outgoing) override;
  void GiveAnswer(Answer&& answer) override;

  // Sends of the program's own memory: it is given up before the answer is given, if that is an
  // error. Registered with the request, so that no answer can come before; `id` follows.
  struct Sending {
    NodeId to;
    PartId part;
    std::uint64_t sequence = 0;
    std::optional<Transport::SendId> id;
  };
  void RegisterSends(Time now, Outputs* out, std::size_t from) REQUIRES(mutex_);
  void EndSend(std::uint64_t token, bool failed) EXCLUDES(mutex_);

  // WaitPoller
  bool RunOne(Clock::time_point until) noexcept override { return transport_->RunOne(until); }
  void Interrupt() noexcept override { transport_->Interrupt(); }
  void OnWait() noexcept override { transport_->Flush(); }

  const DistOptions options_;
  const Incarnation incarnation_;
  std::unique_ptr<Transport> transport_;
  WorkerMachine machine_ GUARDED_BY(mutex_);
  std::unordered_map<std::uint64_t, Sending> sends_ GUARDED_BY(mutex_);  // by token
  CondVar send_has_id_;
  std::atomic<std::size_t> sends_open_{0};  // size of sends_
  std::atomic<std::size_t> untaken_{0};     // requests since the last TakeAnswers that looked
  std::uint32_t stores_ GUARDED_BY(mutex_) = 0;
  Mutex serving_mutex_;  // changes of served_, with those of the engine's pollers; before mutex_
  Engine* served_ GUARDED_BY(mutex_) = nullptr;
  int served_stores_ GUARDED_BY(mutex_) = 0;
  bool left_ GUARDED_BY(mutex_) = false;
  int stores_alive_ GUARDED_BY(mutex_) = 0;
  int stores_open_ GUARDED_BY(mutex_) = 0;  // of those that are stores, neither closed nor dropped
  bool orderly_ GUARDED_BY(mutex_) = true;
  bool stays_ GUARDED_BY(mutex_) = false;

  // Calls that the machine knows nothing of yet. Locks of stores and keys are taken under this one.
  Mutex watched_mutex_;
  std::vector<UnsentCalls*> watched_ GUARDED_BY(watched_mutex_);

  // Constant after Join.
  std::int32_t rank_ = -1;
  std::int32_t num_workers_ = 0;
  PlacementOptions placement_;
  std::optional<StateOnSignal> state_signal_;  // goes first
};

}  // namespace heddle::kvstore::dist
