// A job of worker and server machines in one process, with a network that a test holds in its
// hands: messages wait in a queue until the test delivers, drops or repeats them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/protocol/server.h"
#include "kvstore/dist/protocol/worker.h"
#include "tests/kvstore/dist/integer_parts.h"

namespace heddle::kvstore::dist {

// Takes everything, and remembers what was asked of it.
class RecordedControl : public ServerControl {
 public:
  std::vector<std::string> calls;
  std::string fail;       // calls that begin with this throw
  bool deferred = false;  // Start returns false
  ControlId last{};

  void OpenStore(std::uint32_t store, const std::string& type) override {
    Note("open " + std::to_string(store) + " " + type);
  }
  void SetOptimizer(std::uint32_t /*store*/, std::uint64_t version,
                    const OptimizerBody& optimizer) override {
    Note("optimizer " + std::to_string(version >> 32) + " " + optimizer.name);
  }
  void DropOptimizer(std::uint32_t /*store*/, std::uint64_t version) override {
    calls.push_back("drop optimizer " + std::to_string(version >> 32));
  }
  void SetParameters(std::uint32_t /*store*/, std::uint64_t version,
                     const OptimizerBody& /*optimizer*/) override {
    Note("parameters " + std::to_string(version >> 32) + "." +
         std::to_string(version & 0xffffffff));
  }
  void SetCompression(std::uint32_t /*store*/, const CompressionOptions& options) override {
    Note("compression " + options.type);
  }
  void DropCompression(std::uint32_t /*store*/) override { calls.emplace_back("drop compression"); }
  bool Start(const ControlId& id, const Message& request, ControlResult* result) override {
    last = id;
    CommandBody body;
    Note(Decode(request.meta, &body) ? "command " + body.body : "states");
    result->meta = "done";
    return !deferred;
  }

 private:
  void Note(std::string call) {
    if (!fail.empty() && call.starts_with(fail)) throw InvalidState("refused: " + call);
    calls.push_back(std::move(call));
  }
};

inline constexpr NodeId kSchedulerNode{.role = Role::kScheduler, .rank = 0};
constexpr NodeId ServerNodeOf(std::int32_t rank) { return {.role = Role::kServer, .rank = rank}; }
constexpr NodeId WorkerNodeOf(std::int32_t rank) { return {.role = Role::kWorker, .rank = rank}; }

class SmallJob {
 public:
  struct Envelope {
    NodeId from;
    NodeId to;
    Message message;
  };

  explicit SmallJob(std::int32_t workers, std::int32_t servers = 1, ServerOptions server = {},
                    WorkerOptions worker = {}, const std::string& type = "dist_sync") {
    RosterBody roster{.num_workers = workers, .num_servers = servers};
    for (std::int32_t rank = 0; rank < servers; ++rank) {
      parts_.push_back(std::make_unique<IntegerParts>());
      controls_.push_back(std::make_unique<RecordedControl>());
      servers_.push_back(
          std::make_unique<ServerMachine>(server, *parts_.back(), *controls_.back()));
      roster.nodes.push_back({ServerNodeOf(rank), 1000u + rank, "host:90" + std::to_string(rank)});
    }
    for (std::int32_t rank = 0; rank < workers; ++rank) {
      worker.incarnation = IncarnationOf(rank);
      workers_.push_back(std::make_unique<WorkerMachine>(worker));
      roster.nodes.push_back(
          {WorkerNodeOf(rank), worker.incarnation, "host:80" + std::to_string(rank)});
    }
    for (std::int32_t rank = 0; rank < servers; ++rank) {
      roster.rank = rank;
      Do(ServerNodeOf(rank), [&](Outputs& out) { servers_[rank]->OnRoster(now, roster, out); });
    }
    for (std::int32_t rank = 0; rank < workers; ++rank) {
      roster.rank = rank;
      Do(WorkerNodeOf(rank), [&](Outputs& out) { workers_[rank]->OnRoster(now, roster, out); });
      for (std::int32_t s = 0; s < servers && !type.empty(); ++s) OpenStore(rank, s, type);
    }
    Run();
  }

  static constexpr Incarnation IncarnationOf(std::int32_t rank) { return 100u + rank; }
  static PartId IdOf(std::uint32_t part) { return {.store = 0, .part = part, .key = 7}; }

  // Requests; all return the token of their answer.
  std::uint64_t Submit(std::int32_t rank, Request request) {
    request.token = ++tokens_;
    if (request.what.empty()) request.what = "request of part " + std::to_string(request.part.part);
    Do(WorkerNodeOf(rank),
       [&](Outputs& out) { workers_[rank]->Submit(now, std::move(request), out); });
    return tokens_;
  }
  std::uint64_t OpenStore(std::int32_t rank, std::int32_t server, const std::string& type) {
    return Submit(rank, {.kind = Kind::kOpenStore,
                         .server = server,
                         .part = ControlPart(0),
                         .meta = Encode(OpenStoreBody{.type = type})});
  }
  std::uint64_t Init(std::int32_t rank, std::uint32_t part, std::vector<std::int64_t> values,
                     std::int32_t server = 0) {
    const auto size = static_cast<std::int64_t>(values.size());
    Request request{
        .kind = Kind::kInit,
        .server = server,
        .part = IdOf(part),
        .flags = rank == 0 ? std::uint8_t{0} : kFlagNoValue,
        .meta = Encode(InitBody{
            {.key = std::string("a"), .shape = {size}, .dtype = DType::kInt64, .end = size}})};
    if (rank == 0) request.payload = PayloadOf(std::move(values));
    return Submit(rank, std::move(request));
  }
  std::uint64_t Push(std::int32_t rank, std::uint32_t part, std::vector<std::int64_t> values,
                     std::uint64_t version = 0) {
    return Submit(rank, {.kind = Kind::kPush,
                         .part = IdOf(part),
                         .version = version,
                         .payload = PayloadOf(std::move(values))});
  }
  // A push whose value follows by Supply.
  std::uint64_t AwaitingPush(std::int32_t rank, std::uint32_t part, Time deadline = Time{0}) {
    return Submit(
        rank,
        {.kind = Kind::kPush, .part = IdOf(part), .deadline = deadline, .awaits_value = true});
  }
  void Supply(std::int32_t rank, std::uint32_t part, std::uint64_t token, PushValue value) {
    Do(WorkerNodeOf(rank), [&](Outputs& out) {
      workers_[rank]->Supply(now, 0, IdOf(part), token, std::move(value), out);
    });
  }
  std::uint64_t PushPull(std::int32_t rank, std::uint32_t part, std::vector<std::int64_t> values) {
    return Submit(
        rank,
        {.kind = Kind::kPushPull, .part = IdOf(part), .payload = PayloadOf(std::move(values))});
  }
  std::uint64_t FailedPush(std::int32_t rank, std::uint32_t part, const std::string& why) {
    return Submit(rank, {.kind = Kind::kPush,
                         .part = IdOf(part),
                         .flags = kFlagFailed,
                         .meta = Encode(ErrorBody{.message = why})});
  }
  std::uint64_t Pull(std::int32_t rank, std::uint32_t part) {
    return Submit(rank, {.kind = Kind::kPull, .part = IdOf(part)});
  }
  std::uint64_t Control(std::int32_t rank, Kind kind, std::string meta, std::uint64_t version = 0) {
    return Submit(
        rank, {.kind = kind, .part = ControlPart(0), .version = version, .meta = std::move(meta)});
  }
  std::uint64_t Barrier(std::int32_t rank) {
    const std::uint64_t token = CallBarrier(rank, Time{0});
    if (!Answered(token)) OpenBarrier(rank);
    return token;
  }
  // One that is not open.
  std::uint64_t CallBarrier(std::int32_t rank, Time deadline) {
    const std::uint64_t token = ++tokens_;
    Do(WorkerNodeOf(rank),
       [&](Outputs& out) { std::ignore = workers_[rank]->Barrier(now, token, deadline, out); });
    return token;
  }
  void OpenBarrier(std::int32_t rank) {
    Do(WorkerNodeOf(rank), [&](Outputs& out) { workers_[rank]->OpenBarrier(now, out); });
  }
  void Dropped(std::int32_t rank, std::uint32_t part, std::int32_t server, std::uint64_t sequence) {
    Do(WorkerNodeOf(rank),
       [&](Outputs& out) { workers_[rank]->OnDropped(server, IdOf(part), sequence, out); });
  }
  // With so many requests to come of each part.
  void CloseStore(std::int32_t rank, const std::map<std::uint32_t, std::uint64_t>& to_come = {}) {
    for (const auto& [part, requests] : to_come) {
      workers_[rank]->WillRequest(0, IdOf(part), requests);
    }
    Do(WorkerNodeOf(rank), [&](Outputs& out) { workers_[rank]->CloseStore(now, 0, out); });
  }
  void StoreClosed(std::int32_t rank) {
    Do(WorkerNodeOf(rank), [&](Outputs& out) { workers_[rank]->StoreClosed(now, 0, out); });
  }
  std::uint64_t Leave(std::int32_t rank) {
    const std::uint64_t token = ++tokens_;
    Do(WorkerNodeOf(rank), [&](Outputs& out) { workers_[rank]->Leave(now, token, out); });
    return token;
  }

  // Answers.
  bool Answered(std::uint64_t token) const { return answers_.contains(token); }
  std::vector<std::int64_t> ValueOf(std::uint64_t token) const {
    if (!Answered(token)) return {-404};
    if (answers_.at(token).error) return {-500};
    return ValuesOf(answers_.at(token).message.payload);
  }
  // "" of a success, "(open)" if there is no answer yet.
  std::string ErrorOf(std::uint64_t token) const {
    if (!Answered(token)) return "(open)";
    if (!answers_.at(token).error) return "";
    try {
      std::rethrow_exception(answers_.at(token).error);
    } catch (const std::exception& error) {
      return error.what();
    }
  }
  std::exception_ptr ExceptionOf(std::uint64_t token) const { return answers_.at(token).error; }
  const Message& AnswerOf(std::uint64_t token) const { return answers_.at(token).message; }

  // The network. The scheduler's messages are left to the test.
  std::deque<Envelope> queue;
  std::vector<Envelope> to_scheduler;
  std::vector<std::string> log;
  Time now{std::chrono::seconds(1)};

  void Deliver(Envelope envelope) {
    const auto rank = static_cast<std::size_t>(envelope.to.rank);
    Do(envelope.to, [&](Outputs& out) {
      if (envelope.to.role == Role::kServer) {
        servers_[rank]->OnMessage(now, envelope.from, std::move(envelope.message), out);
      } else {
        workers_[rank]->OnMessage(now, envelope.from, std::move(envelope.message), out);
      }
    });
  }
  // Delivers in order until nothing is under way; then servers end their turn.
  void Run() {
    while (true) {
      while (!queue.empty()) {
        Envelope envelope = std::move(queue.front());
        queue.pop_front();
        Deliver(std::move(envelope));
      }
      for (std::size_t rank = 0; rank < servers_.size(); ++rank) {
        Do(ServerNodeOf(static_cast<std::int32_t>(rank)),
           [&](Outputs& out) { servers_[rank]->EndTurn(out); });
      }
      if (queue.empty()) return;
    }
  }
  void Do(NodeId node, const std::function<void(Outputs&)>& call) {
    Outputs out;
    call(out);
    for (Outgoing& outgoing : out.messages) {
      Envelope envelope{node, outgoing.to, std::move(outgoing.message)};
      if (outgoing.to.role == Role::kScheduler) {
        to_scheduler.push_back(std::move(envelope));
      } else {
        queue.push_back(std::move(envelope));
      }
    }
    for (Answer& answer : out.answers) {
      EXPECT_TRUE(answers_.emplace(answer.token, answer).second) << "answered twice";
    }
    for (auto& [level, line] : out.log) log.push_back(std::move(line));
  }
  void Advance(Time by) {
    now += by;
    for (std::size_t i = 0; i < servers_.size(); ++i) {
      Do(ServerNodeOf(static_cast<std::int32_t>(i)),
         [&](Outputs& out) { servers_[i]->OnTime(now, out); });
    }
    for (std::size_t i = 0; i < workers_.size(); ++i) {
      Do(WorkerNodeOf(static_cast<std::int32_t>(i)),
         [&](Outputs& out) { workers_[i]->OnTime(now, out); });
    }
    Run();
  }

  WorkerMachine& worker(std::int32_t rank) { return *workers_[static_cast<std::size_t>(rank)]; }
  ServerMachine& server(std::int32_t rank = 0) { return *servers_[static_cast<std::size_t>(rank)]; }
  IntegerParts& parts(std::int32_t rank = 0) { return *parts_[static_cast<std::size_t>(rank)]; }
  RecordedControl& control(std::int32_t rank = 0) {
    return *controls_[static_cast<std::size_t>(rank)];
  }

 private:
  std::vector<std::unique_ptr<IntegerParts>> parts_;
  std::vector<std::unique_ptr<RecordedControl>> controls_;
  std::vector<std::unique_ptr<ServerMachine>> servers_;
  std::vector<std::unique_ptr<WorkerMachine>> workers_;
  std::map<std::uint64_t, Answer> answers_;
  std::uint64_t tokens_ = 0;
};

}  // namespace heddle::kvstore::dist
