// Goal: a large job is no more than many small ones. Method: simulated jobs of up to 1 000 workers
// and 50 servers; what they send, and what the machines keep in memory, is counted and compared at
// two sizes.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/protocol/server.h"
#include "kvstore/dist/protocol/worker.h"
#include "kvstore/dist/transport/sim/sim_network.h"
#include "tests/kvstore/dist/counted_memory.h"
#include "tests/kvstore/dist/integer_parts.h"
#include "tests/kvstore/dist/small_job.h"

namespace heddle::kvstore::dist {
namespace {

struct Cost {
  std::uint64_t messages = 0;
  std::uint64_t bytes = 0;
  std::int64_t memory = 0;  // at the end, of all machines
};

// Every worker pushes to and pulls every key, one key a server, `rounds` times, and leaves.
class BigJob {
 public:
  BigJob(std::int32_t workers, std::int32_t servers, int rounds)
      : rounds_(rounds), network_(1, {}) {
    before_ = LiveBytes();
    RosterBody roster{.num_workers = workers, .num_servers = servers};
    for (std::int32_t rank = 0; rank < workers; ++rank) {
      roster.nodes.push_back({WorkerNodeOf(rank), 1, "worker"});
    }
    Outputs none;
    for (std::int32_t rank = 0; rank < servers; ++rank) {
      servers_.push_back(std::make_unique<Server>());
      servers_.back()->machine.OnRoster(network_.now(), roster, none);
    }
    roster.nodes.clear();  // workers need only their own rank and the numbers
    for (std::int32_t rank = 0; rank < workers; ++rank) {
      workers_.push_back(std::make_unique<Worker>());
      roster.rank = rank;
      workers_.back()->machine.OnRoster(network_.now(), roster, none);
    }
    for (std::int32_t rank = 0; rank < workers; ++rank) Begin(rank);
  }

  Cost Run() {
    SimNetwork::Event event;
    while (left_ < std::ssize(workers_) && network_.Next(&event)) {
      if (event.to.role == Role::kServer) {
        OnServer(event.to.rank, event);
      } else if (event.to.role == Role::kWorker) {
        OnWorker(event.to.rank, [&](WorkerMachine& machine, Outputs& out) {
          machine.OnMessage(network_.now(), event.from, std::move(event.message), out);
        });
      }
    }
    EXPECT_EQ(left_, std::ssize(workers_));
    const auto sum = static_cast<std::int64_t>(workers_.size() * (workers_.size() - 1) / 2);
    for (std::int32_t key = 0; key < std::ssize(servers_); ++key) {
      EXPECT_EQ(servers_[static_cast<std::size_t>(key)]->parts.At(IdOf(key)).value[0], sum);
    }
    network_ = SimNetwork(1, {});  // its memory is not the machines'
    return {messages_, bytes_, LiveBytes() - before_};
  }

 private:
  struct Server {
    IntegerParts parts;
    RecordedControl control;
    ServerMachine machine{{}, parts, control};
    bool turn_open = false;
  };
  struct Worker {
    WorkerMachine machine{{}};
    int round = 0;
    std::size_t open = 0;
  };

  static PartId IdOf(std::int32_t key) { return {.key = static_cast<std::uint64_t>(key) + 1}; }

  void Begin(std::int32_t rank) {
    Worker& worker = *workers_[static_cast<std::size_t>(rank)];
    for (std::int32_t server = 0; server < std::ssize(servers_); ++server) {
      const PartInfo info{.key = std::int64_t{server}, .shape = {1}, .end = 1};
      Request open{.kind = Kind::kOpenStore,
                   .server = server,
                   .part = ControlPart(0),
                   .meta = Encode(OpenStoreBody{"dist_sync"})};
      Request init{.kind = Kind::kInit,
                   .server = server,
                   .part = IdOf(server),
                   .flags = rank == 0 ? std::uint8_t{0} : kFlagNoValue,
                   .meta = Encode(InitBody{info}),
                   .payload = PayloadOf({0})};
      worker.open += 2;
      OnWorker(rank, [&](WorkerMachine& machine, Outputs& out) {
        machine.Submit(network_.now(), std::move(open), out);
        machine.Submit(network_.now(), std::move(init), out);
      });
    }
  }

  void Continue(std::int32_t rank) {
    Worker& worker = *workers_[static_cast<std::size_t>(rank)];
    if (worker.round++ == rounds_) {
      worker.open = 1;
      OnWorker(rank, [&](WorkerMachine& machine, Outputs& out) {
        machine.Leave(network_.now(), 0, out);
      });
      return;
    }
    const Payload value = PayloadOf({rank});
    worker.open = servers_.size();
    OnWorker(rank, [&](WorkerMachine& machine, Outputs& out) {
      for (std::int32_t server = 0; server < std::ssize(servers_); ++server) {
        machine.Submit(
            network_.now(),
            {.kind = Kind::kPushPull, .server = server, .part = IdOf(server), .payload = value},
            out);
      }
    });
  }

  template <class Call>
  void OnWorker(std::int32_t rank, Call call) {
    Worker& worker = *workers_[static_cast<std::size_t>(rank)];
    Outputs out;
    call(worker.machine, out);
    Send(WorkerNodeOf(rank), out);
    for (const Answer& answer : out.answers) EXPECT_FALSE(answer.error);
    if (out.answers.empty()) return;
    worker.open -= out.answers.size();
    if (worker.machine.left()) ++left_;
    if (worker.open == 0 && !worker.machine.left()) Continue(rank);
  }

  void OnServer(std::int32_t rank, SimNetwork::Event& event) {
    Server& server = *servers_[static_cast<std::size_t>(rank)];
    Outputs out;
    if (event.kind == SimNetwork::Event::Kind::kTimer) {
      server.turn_open = false;
      server.machine.EndTurn(out);
    } else {
      server.machine.OnMessage(network_.now(), event.from, std::move(event.message), out);
      if (!std::exchange(server.turn_open, true)) {
        network_.SetTimer(event.to, network_.now() + std::chrono::milliseconds(1), 0);
      }
    }
    Send(ServerNodeOf(rank), out);
  }

  void Send(NodeId from, Outputs& out) {
    for (Outgoing& outgoing : out.messages) {
      ++messages_;
      bytes_ += outgoing.message.meta.size() + outgoing.message.payload.bytes();
      network_.Send(from, outgoing.to, std::move(outgoing.message));
    }
  }

  const int rounds_;
  std::int64_t before_ = 0;
  SimNetwork network_;
  std::vector<std::unique_ptr<Server>> servers_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::ptrdiff_t left_ = 0;
  std::uint64_t messages_ = 0;
  std::uint64_t bytes_ = 0;
};

Cost CostOf(std::int32_t workers, std::int32_t servers, int rounds) {
  const Cost cost = BigJob(workers, servers, rounds).Run();
  std::printf("%d workers, %d servers, %d rounds: %llu messages, %llu bytes, memory %lld\n",
              workers, servers, rounds, static_cast<unsigned long long>(cost.messages),
              static_cast<unsigned long long>(cost.bytes), static_cast<long long>(cost.memory));
  return cost;
}

// The requests of a job are workers x servers x rounds, so that is what linear means.
TEST(Scale, MessagesAndMemoryGrowLinearlyInWorkersServersAndNotInRounds) {
  const Cost base = CostOf(100, 10, 10);
  const auto within = [](auto given, auto expected) {
    return static_cast<double>(given) < 1.05 * static_cast<double>(expected);
  };
  const Cost workers = CostOf(400, 10, 10);
  EXPECT_TRUE(within(workers.messages, 4 * base.messages));
  EXPECT_TRUE(within(workers.bytes, 4 * base.bytes));
  EXPECT_TRUE(within(workers.memory, 4 * base.memory));
  const Cost servers = CostOf(100, 40, 10);
  EXPECT_TRUE(within(servers.messages, 4 * base.messages));
  EXPECT_TRUE(within(servers.memory, 4 * base.memory));
  const Cost rounds = CostOf(100, 10, 40);
  EXPECT_TRUE(within(rounds.messages, 4 * base.messages));
  EXPECT_TRUE(within(rounds.memory, base.memory));
}

TEST(Scale, AThousandWorkersAndFiftyServersDoAHundredRounds) {
  const Cost cost = CostOf(1000, 50, 100);
  // Each request and its answer; what is beyond are acknowledgements.
  EXPECT_GE(cost.messages, 2u * 1000 * 50 * 100);
  EXPECT_LE(cost.messages, 3u * 1000 * 50 * 102);
  // What a worker and a server keep of one another, with a store and a key, on both sides together.
  EXPECT_LE(cost.memory, 1000 * 50 * 2048);
}

}  // namespace
}  // namespace heddle::kvstore::dist
