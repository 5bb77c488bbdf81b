#include "kvstore/dist/worker/worker_node.h"

#include <heddle/error.h>

#include <random>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "base/log.h"
#include "engine/fork.h"
#include "engine/wait_checks.h"
#include "kvstore/dist/membership.h"

namespace heddle::kvstore::dist {

namespace {

// How long what it waits for may keep a thread from looking at anything else.
constexpr std::chrono::milliseconds kStep{50};
// Requests between two looks: so many are answered with a few calls to the system.
constexpr std::size_t kTakeAnswersEvery = 128;

WorkerOptions MachineOptions(const DistOptions& options, Incarnation incarnation) {
  WorkerOptions machine;
  machine.incarnation = incarnation;
  machine.warn_after = options.warning_time;
  machine.unfinished_bytes_max = static_cast<std::uint64_t>(options.peer_bytes_max);
  return machine;
}

}  // namespace

std::shared_ptr<WorkerNode> WorkerNode::Join(const DistOptions& options,
                                             const TransportFactory& make_transport) {
  std::shared_ptr<WorkerNode> node(new WorkerNode(options, make_transport));
  node->Meet();
  return node;
}

WorkerNode::WorkerNode(const DistOptions& options, const TransportFactory& make_transport)
    : MemberNode(machine_),
      options_(options),
      incarnation_(NewIncarnation()),
      machine_(MachineOptions(options, incarnation_)) {
  member_.emplace(OptionsOfMember(options, incarnation_, /*address=*/""));
  {
    MutexLock lock(mutex_);
    transport_ = make_transport(*this, incarnation_);
    Start(*transport_);
  }
  state_signal_.emplace([this] { return DescribeState(); });
}

WorkerNode::~WorkerNode() {
  state_signal_.reset();
  Stop();
}

void WorkerNode::Meet() {
  const auto deadline = std::chrono::steady_clock::now() + options_.connect_deadline;
  JoinJob(*transport_, options_, deadline);
  const auto has_met = [this] {
    const MutexLock lock(mutex_);
    if (member_->roster() || member_->failure()) return true;
    changed_.WaitUntil(mutex_, std::chrono::steady_clock::now() + kStep);
    return false;
  };
  while (!has_met()) internal::WaitChecks::Look();
  RosterBody roster;
  {
    MutexLock lock(mutex_);
    ThrowIfFailed(*member_, options_);
    roster = *member_->roster();
    rank_ = roster.rank;
    num_workers_ = roster.num_workers;
    placement_.num_servers = roster.num_servers;
    placement_.slice_bytes = roster.slice_bytes;
    placement_.cut_bytes = roster.cut_bytes;
  }
  transport_->SetSelf({Role::kWorker, rank_});
  trace_.SetPlace({Role::kWorker, rank_}, incarnation_, options_.job_id);
  ConnectToServers(roster, deadline);
  Drive([&](Time now, Outputs& out) REQUIRES(mutex_) { machine_.OnRoster(now, roster, out); });
}

// A server may be gone already: its job has failed, which the scheduler tells within a moment.
void WorkerNode::ConnectToServers(const RosterBody& roster,
                                  std::chrono::steady_clock::time_point deadline) {
  const auto job_failed = [this] {
    MutexLock lock(mutex_);
    return member_->failure().has_value();
  };
  for (const NodeEntry& node : roster.nodes) {
    if (node.node.role != Role::kServer) continue;
    try {
      transport_->Connect(node.node, node.address, deadline, job_failed);
    } catch (const NetworkError&) {
      const auto until = std::chrono::steady_clock::now() + kWordOfScheduler;
      MutexLock lock(mutex_);
      while (!member_->failure() && changed_.WaitUntil(mutex_, until)) continue;
      ThrowIfFailed(*member_, options_);
      throw;
    }
  }
}

void WorkerNode::Close() {
  Drive([&](Time now, Outputs& out) REQUIRES(mutex_) { machine_.Leave(now, kNoSink, out); });
  const auto is_over = [this] {
    const MutexLock lock(mutex_);
    const auto over = [this]() REQUIRES(mutex_) {
      return member_->left() || member_->failure() || machine_.failure();
    };
    if (!over()) changed_.WaitUntil(mutex_, std::chrono::steady_clock::now() + kStep);
    return over();
  };
  while (!is_over()) {
    if (!internal::WaitChecks::Any()) continue;
    std::exception_ptr left = internal::WaitChecks::Call();
    if (left == nullptr) continue;
    Fail("its program was interrupted while it left the job");
    internal::WaitChecks::Keep(std::move(left));  // this is called by a destructor
  }
  MutexLock lock(mutex_);
  if (member_->failure()) {
    Log(LogLevel::kWarning, "this worker leaves a job that has failed: {}",
        TextOf(*member_->failure()));
  }
}

std::uint32_t WorkerNode::NewStore() {
  MutexLock lock(mutex_);
  return stores_++;
}

bool WorkerNode::StoreMade() {
  MutexLock lock(mutex_);
  if (stores_ > 0 && stores_open_ == 0) return false;
  ++stores_alive_;
  ++stores_open_;
  return true;
}

bool WorkerNode::Stay() {
  MutexLock lock(mutex_);
  if (stores_ > 0 && stores_alive_ == 0) return false;
  ++stores_alive_;
  stays_ = true;
  return true;
}

void WorkerNode::StoreGone(bool orderly) {
  {
    MutexLock lock(mutex_);
    if (--stores_alive_ > 0) return;
    orderly = orderly_ = orderly_ && orderly;
  }
  if (orderly) {
    Close();
  } else {
    Fail("an exception ended the part of its program that had its stores");
  }
}

void WorkerNode::Fail(const std::string& why) {
  Drive([&](Time now, Outputs& out) REQUIRES(mutex_) {
    orderly_ = false;
    // Else that is the cause, and the scheduler has been told.
    if (!machine_.failure()) FailMember(now, why, out);
  });
  transport_->Flush();
}

std::optional<std::string> WorkerNode::failure() {
  MutexLock lock(mutex_);
  const std::optional<FailureBody>& failure =
      member_->failure() ? member_->failure() : machine_.failure();
  if (!failure) return std::nullopt;
  return TextOf(*failure);
}

void WorkerNode::Serve(Engine& engine, UnsentCalls& calls) {
  {
    MutexLock lock(watched_mutex_);
    watched_.push_back(&calls);
  }
  MutexLock serving(serving_mutex_);
  {
    MutexLock lock(mutex_);
    if (served_ != nullptr) {
      if (served_ == &engine) ++served_stores_;
      return;
    }
  }
  trace_.Use(engine::TraceOf(engine));
  if (!engine.AddPoller(*this)) return;
  MutexLock lock(mutex_);
  served_ = &engine;
  served_stores_ = 1;
}

void WorkerNode::Leave(Engine& engine, UnsentCalls& calls) {
  {
    MutexLock lock(watched_mutex_);
    std::erase(watched_, &calls);
  }
  MutexLock serving(serving_mutex_);
  {
    MutexLock lock(mutex_);
    if (served_ != &engine || --served_stores_ > 0) return;
    served_ = nullptr;
  }
  engine.RemovePoller(*this);
}

void WorkerNode::WillRequest(std::int32_t server, const PartId& part, std::uint64_t requests) {
  MutexLock lock(mutex_);
  machine_.WillRequest(server, part, requests);
}

void WorkerNode::WontRequest(std::int32_t server, const PartId& part) {
  MutexLock lock(mutex_);
  machine_.WontRequest(server, part);
}

void WorkerNode::CloseStore(std::uint32_t store) {
  bool last = false;
  Drive([&](Time now, Outputs& out) REQUIRES(mutex_) {
    last = --stores_open_ == 0 && !stays_;
    if (stays_) return;  // it may have failed: nobody goes on without it before that is known
    machine_.CloseStore(now, store, out);
    if (last) machine_.CloseBarriers(now);
  });
  if (!last) return;
  // This stays until all stores have waited for their calls, whose pushes hold the gate.
  pushes().WhenEmpty([this] {
    Outputs opened;
    OpenBarrier(&opened);
    Carry(opened);
  });
}

void WorkerNode::CorrectClose(std::uint32_t store) {
  Drive([&](Time now, Outputs& out) REQUIRES(mutex_) {
    if (!stays_) machine_.CloseStore(now, store, out);
  });
}

void WorkerNode::DropStore() {
  MutexLock lock(mutex_);
  --stores_open_;
}

void WorkerNode::StoreClosed(std::uint32_t store) {
  Drive([&](Time now, Outputs& out) REQUIRES(mutex_) { machine_.StoreClosed(now, store, out); });
}

std::string WorkerNode::DescribeState() {
  constexpr std::chrono::milliseconds kAnswersTake{200};
  bool asks = false;
  Drive([&](Time, Outputs& out) REQUIRES(mutex_) { asks = machine_.AskWhatWaits(out); });
  transport_->Flush();
  if (asks) std::this_thread::sleep_for(kAnswersTake);
  return DescribeMachines();
}

std::optional<Time> WorkerNode::OnClock(Time now) {
  UnsentFound found;
  {
    MutexLock lock(watched_mutex_);
    for (UnsentCalls* calls : watched_) calls->CheckUnsent(now, options_.warning_time, &found);
    if (!watched_.empty()) found.LookAt(now + options_.heartbeat_interval);
  }
  found.given_back.clear();
  for (const std::string& warning : found.warnings) Log(LogLevel::kWarning, "{}", warning);
  for (auto& [call, answer] : found.answers) GiveAnswer(std::move(answer));
  return found.next;
}

std::int32_t WorkerNode::num_dead() {
  const engine::CallLock lock(mutex_, "a store");
  return member_->failure() || machine_.failure() ? 1 : 0;
}

Time WorkerNode::deadline() const {
  return options_.op_deadline.count() > 0 ? Now() + options_.op_deadline : Time{0};
}

void WorkerNode::Submit(std::span<const std::span<Request>> calls, Outputs* out) {
  const SpinningLock lock(mutex_);
  const Time now = Now();
  const std::size_t before = out->messages.size();
  if (calls.size() > 1) {
    for (const std::span<Request> requests : calls) {
      for (const Request& request : requests) machine_.Expect(request.part);
    }
  }
  for (const std::span<Request> requests : calls) {
    for (Request& request : requests) machine_.Submit(now, std::move(request), *out);
  }
  RegisterSends(now, out, before);
  NoteTimeLocked();
}

void WorkerNode::Supply(std::int32_t server, const PartId& part, std::uint64_t token,
                        PushValue&& value, Outputs* out) {
  const SpinningLock lock(mutex_);
  const std::size_t before = out->messages.size();
  const Time now = Now();
  machine_.Supply(now, server, part, token, std::move(value), *out);
  RegisterSends(now, out, before);
  NoteTimeLocked();
}

void WorkerNode::TakeAnswers(std::size_t requests) {
  // relaxed: only a count
  if (untaken_.fetch_add(requests, std::memory_order_relaxed) + requests < kTakeAnswersEvery) {
    return;
  }
  untaken_.store(0, std::memory_order_relaxed);
  transport_->TakeArrived();
}

bool WorkerNode::Barrier(AnswerSink& sink, Outputs* out) {
  MutexLock lock(mutex_);
  const bool waits = machine_.Barrier(Now(), TokenOf(sink), deadline(), *out);
  NoteTimeLocked();
  return waits;
}

void WorkerNode::OpenBarrier(Outputs* out) {
  MutexLock lock(mutex_);
  machine_.OpenBarrier(Now(), *out);
  NoteTimeLocked();
}

// A message is registered once, by the input that it comes from.
void WorkerNode::OnInput(Time now, Outputs& out, std::size_t before) {
  RegisterSends(now, &out, before);
  if (machine_.left() && !std::exchange(left_, true)) member_->OnLeft(now);
}

std::shared_ptr<Landing> WorkerNode::OnHeader(NodeId from, const Message& header,
                                              std::uint64_t payload_bytes) {
  if (payload_bytes <= kSmallBytes || from.role != Role::kServer) return nullptr;
  HandleSmall();
  MutexLock lock(mutex_);
  const Request* const request = machine_.Find(from.rank, header.part, header.sequence);
  if (request == nullptr || request->token <= kNoSink) return nullptr;  // 0: the machine's own
  auto* const sink = reinterpret_cast<AnswerSink*>(static_cast<std::uintptr_t>(request->token));
  return sink->LandingFor(header, payload_bytes);
}

namespace {

bool LendsMemory(const Outgoing& outgoing) {
  return outgoing.token > kNoSink && outgoing.message.body_bytes() > Transport::kCopiedMax;
}

Payload CopyOf(const Payload& payload) {
  const auto copy = std::make_shared<std::vector<std::byte>>();
  for (const std::span<const std::byte> run : payload.runs()) {
    copy->insert(copy->end(), run.begin(), run.end());
  }
  return {copy, std::span<const std::byte>(*copy)};
}

}  // namespace

// A small message is copied as it is sent, by a thread that may stop just before: if the program
// may have its memory back by then, it is copied here.
void WorkerNode::RegisterSends(Time now, Outputs* out, std::size_t from) {
  constexpr Time kThreadsStopFor = std::chrono::seconds(5);  // at most, as good as always
  for (std::size_t i = from; i < out->messages.size(); ++i) {
    Outgoing& outgoing = out->messages[i];
    if (!LendsMemory(outgoing)) {
      if (outgoing.deadline != Time{0} && outgoing.deadline - now < kThreadsStopFor &&
          !outgoing.message.payload.empty()) {
        outgoing.message.payload = CopyOf(outgoing.message.payload);
      }
      continue;
    }
    sends_[outgoing.token] = {outgoing.to, outgoing.message.part, outgoing.message.sequence, {}};
  }
  sends_open_.store(sends_.size(), std::memory_order_relaxed);
}

// Of one that another thread is about to hand to the transport nothing is known yet: it keeps the
// priority that it has.
void WorkerNode::RaisePriority(const Raised& raised) {
  Transport::SendId id = 0;
  {
    MutexLock lock(mutex_);
    const auto found = sends_.find(raised.token);
    if (found == sends_.end() || !found->second.id || !(found->second.part == raised.part) ||
        found->second.sequence != raised.sequence) {
      return;
    }
    id = *found->second.id;
  }
  transport_->Raise(raised.to, id, raised.priority);
}

void WorkerNode::SendMessage(Outgoing&& outgoing) {
  if (!LendsMemory(outgoing)) {
    transport_->Send(outgoing.to, std::move(outgoing.message));
    return;
  }
  const PartId part = outgoing.message.part;
  const std::uint64_t sequence = outgoing.message.sequence;
  const Transport::SendId id = transport_->Send(outgoing.to, std::move(outgoing.message));
  MutexLock lock(mutex_);
  const auto found = sends_.find(outgoing.token);
  // The token may be that of another request by now, and this one be answered.
  if (found == sends_.end() || !(found->second.part == part) ||
      found->second.sequence != sequence) {
    return;
  }
  found->second.id = id;
  send_has_id_.NotifyAll();
}

// When it returns with `failed`, nothing reads the request's payload any more.
void WorkerNode::EndSend(std::uint64_t token, bool failed) {
  // relaxed: an answer comes after the input that its request was registered with
  if (sends_open_.load(std::memory_order_relaxed) == 0) return;
  Sending sending;
  {
    MutexLock lock(mutex_);
    auto found = sends_.find(token);
    if (found == sends_.end()) return;
    while (failed && !found->second.id) {
      send_has_id_.Wait(mutex_);
      found = sends_.find(token);
    }
    sending = found->second;
    sends_.erase(found);
    sends_open_.store(sends_.size(), std::memory_order_relaxed);
  }
  if (!failed || transport_->Revoke(sending.to, *sending.id) != Revoked::kDropped) return;
  Drive([&](Time, Outputs& out) REQUIRES(mutex_) {
    machine_.OnDropped(sending.to.rank, sending.part, sending.sequence, out);
  });
}

void WorkerNode::GiveAnswer(Answer&& answer) {
  if (answer.token == kNoSink) return;
  EndSend(answer.token, answer.error != nullptr);
  auto* const sink = reinterpret_cast<AnswerSink*>(static_cast<std::uintptr_t>(answer.token));
  sink->OnAnswer(std::move(answer));
}

}  // namespace heddle::kvstore::dist
