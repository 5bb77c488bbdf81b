// Goal: whoever dies, and however, all others hear of it by name, in time; who joins a second time
// is refused and changes nothing; a job without failures ends well. Method: all machines of a job
// over the simulated network, the death of one process at a random moment.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/protocol/member.h"
#include "kvstore/dist/protocol/scheduler.h"
#include "kvstore/dist/protocol/server.h"
#include "kvstore/dist/protocol/worker.h"
#include "kvstore/dist/transport/sim/sim_network.h"
#include "tests/kvstore/dist/integer_parts.h"
#include "tests/kvstore/dist/small_job.h"
#include "tests/sanitized.h"

namespace heddle::kvstore::dist {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

constexpr std::uint64_t kTick = 0;        // timers of all nodes
constexpr std::uint64_t kLostTimer = 10;  // 10 + index of the dead: its connection breaks

class WholeJob {
 public:
  // Workers do `rounds` rounds, a wait after each, and leave.
  WholeJob(std::uint64_t seed, std::int32_t workers, std::int32_t servers, int rounds)
      : rounds_(rounds),
        network_(seed, {}),
        scheduler_(Time{0}, {.num_workers = workers, .num_servers = servers, .address = "head:1"}) {
    for (std::int32_t rank = 0; rank < servers; ++rank) AddMember(ServerNodeOf(rank));
    for (std::int32_t rank = 0; rank < workers; ++rank) AddMember(WorkerNodeOf(rank));
    network_.SetTimer(kSchedulerNode, milliseconds(50), kTick);
    num_workers_ = workers;
    num_servers_ = servers;
    for (auto& member : members_) Join(*member);
  }

  struct Process {
    NodeId id;    // its role and rank
    NodeId peer;  // as the network knows it
    Incarnation incarnation;
    std::string address;
    std::optional<Member> member;
    std::optional<WorkerMachine> worker;
    IntegerParts parts;
    RecordedControl control;
    std::optional<ServerMachine> server;
    bool begun = false;
    bool shut_down = false;
    int round = 0;
    std::size_t open = 0;
    std::string error;  // the first that its program saw
  };

  // Runs until `until`, or until nothing more happens.
  void Run(Time until) {
    SimNetwork::Event event;
    bool over = false;
    network_.SetTimer({Role::kScheduler, 99}, until, kTick);  // nobody's
    while (!over && network_.Next(&event)) {
      over = event.to.rank == 99;
      if (!over) Handle(event);
    }
  }

  // The process is gone. Its peers see their connections break after a while, or never.
  void Kill(NodeId id, bool connections_break) {
    network_.Kill(id);
    std::vector<NodeId> peers{kSchedulerNode};
    for (const auto& member : members_) peers.push_back(member->peer);
    const std::uint64_t index = id == kSchedulerNode
                                    ? members_.size()
                                    : static_cast<std::uint64_t>(&Find(id) - members_.data());
    for (const NodeId peer : peers) {
      if (peer == id || !connections_break) continue;
      network_.SetTimer(peer, network_.now() + milliseconds(network_.random().Between(1, 50)),
                        kLostTimer + index);
    }
  }

  // Another process with the rank of `id` comes, as after a restart by hand.
  Process& Restart(NodeId id) {
    AddMember(id);
    Process& process = *members_.back();
    process.peer = {id.role, -2};
    process.incarnation = 0xbad;
    MakeMember(process);
    Join(process);
    return process;
  }

  std::unique_ptr<Process>& Find(NodeId id) {
    return *std::find_if(members_.begin(), members_.end(),
                         [&](const auto& member) { return member->peer == id; });
  }
  std::vector<std::unique_ptr<Process>>& members() { return members_; }
  SchedulerMachine& scheduler() { return scheduler_; }
  SimNetwork& network() { return network_; }

 private:
  void AddMember(NodeId id) {
    auto process = std::make_unique<Process>();
    process->id = process->peer = id;
    process->incarnation = members_.size() + 1;
    process->address =
        fmt::format("{}:{}", id.role == Role::kServer ? "rack" : "desk", members_.size());
    MakeMember(*process);
    members_.push_back(std::move(process));
  }
  void MakeMember(Process& process) {
    MemberOptions member;
    member.join.role = process.id.role;
    member.join.rank = process.id.rank;
    member.join.incarnation = process.incarnation;
    member.join.address = process.address;
    member.scheduler_address = "head:1";
    process.member.emplace(std::move(member));
    if (process.id.role == Role::kWorker) {
      process.worker.emplace(WorkerOptions{.incarnation = process.incarnation});
    } else {
      process.server.emplace(ServerOptions{}, process.parts, process.control);
    }
  }
  void Join(Process& process) {
    scheduler_.OnConnected(process.peer, process.address);
    Do(process, [&](Outputs& out) { process.member->Join(network_.now(), out); });
    network_.SetTimer(process.peer, network_.now() + milliseconds(100), kTick);
  }

  void Handle(SimNetwork::Event& event) {
    const Time now = network_.now();
    const bool timer = event.kind == SimNetwork::Event::Kind::kTimer;
    if (event.to == kSchedulerNode) {
      Outputs out;
      if (!timer) {
        scheduler_.OnMessage(now, event.from, event.message, out);
      } else if (event.timer >= kLostTimer) {
        const Process& dead = *members_[event.timer - kLostTimer];
        scheduler_.OnLost(now, dead.peer, dead.address, "connection reset", out);
      } else {
        scheduler_.OnTime(now, out);
        if (!scheduler_.done()) network_.SetTimer(event.to, now + milliseconds(50), kTick);
      }
      EXPECT_TRUE(out.renames.empty());
      Send(kSchedulerNode, out);
      return;
    }
    Process& process = *Find(event.to);
    Do(process, [&](Outputs& out) {
      if (!timer) {
        OnMessage(process, event.from, std::move(event.message), out);
      } else if (event.timer >= kLostTimer) {
        OnLost(process, event.timer - kLostTimer, out);
      } else {
        process.member->OnTime(now, out);
        network_.SetTimer(event.to, now + milliseconds(100), kTick);
      }
    });
  }

  void OnMessage(Process& process, NodeId from, Message message, Outputs& out) {
    const Time now = network_.now();
    if (from == kSchedulerNode) process.member->OnMessage(now, message, out);
    if (process.worker && process.begun) {
      process.worker->OnMessage(now, from, std::move(message), out);
    } else if (process.server && message.kind != Kind::kRoster) {
      process.server->OnMessage(now, from, std::move(message), out);
      process.server->EndTurn(out);
    }
    if (process.member->roster() && !process.begun) {
      process.begun = true;
      if (process.server) process.server->OnRoster(now, *process.member->roster(), out);
      if (process.server) process.server->EndTurn(out);
      if (process.worker) Begin(process, out);
    }
    if (process.member->shutdown_wanted() && !std::exchange(process.shut_down, true)) {
      process.member->ShutDown(out);
    }
  }

  void OnLost(Process& process, std::size_t dead, Outputs& out) {
    const Time now = network_.now();
    if (dead == members_.size()) {
      process.member->OnSchedulerLost(now, "connection reset");
      return;
    }
    const Process& gone = *members_[dead];
    if (process.worker && process.begun && gone.id.role == Role::kServer) {
      process.worker->OnLost(now, gone.id, gone.address, "connection reset", out);
    } else if (process.server && gone.id.role == Role::kWorker) {
      process.server->OnLost(now, gone.id, gone.address, "connection reset", out);
    }
  }

  template <class Call>
  void Do(Process& process, const Call& call) {
    Outputs out;
    call(out);
    if (const auto& failure = process.member->failure()) {
      Message failed{.kind = Kind::kJobFailed, .meta = Encode(*failure)};
      if (process.worker && process.begun) {
        process.worker->OnMessage(network_.now(), kSchedulerNode, std::move(failed), out);
      } else if (process.server) {
        process.server->OnMessage(network_.now(), kSchedulerNode, std::move(failed), out);
      }
    }
    Send(process.peer, out);
    for (const Answer& answer : out.answers) {
      --process.open;
      if (!answer.error || !process.error.empty()) continue;
      try {
        std::rethrow_exception(answer.error);
      } catch (const std::exception& error) {
        process.error = error.what();
      }
    }
    if (!out.answers.empty() && process.open == 0) Continue(process);
  }

  void Send(NodeId from, Outputs& out) {
    for (Outgoing& outgoing : out.messages) {
      network_.Send(from, outgoing.to, std::move(outgoing.message));
    }
  }

  void Begin(Process& process, Outputs& out) {
    process.worker->OnRoster(network_.now(), *process.member->roster(), out);
    for (std::int32_t server = 0; server < num_servers_; ++server) {
      const PartInfo info{.key = std::int64_t{server}, .shape = {1}, .end = 1};
      Submit(process,
             {.kind = Kind::kOpenStore,
              .server = server,
              .part = ControlPart(0),
              .meta = Encode(OpenStoreBody{"dist_sync"})},
             out);
      Submit(process,
             {.kind = Kind::kInit,
              .server = server,
              .part = IdOf(server),
              .flags = process.id.rank == 0 ? std::uint8_t{0} : kFlagNoValue,
              .meta = Encode(InitBody{info}),
              .payload = PayloadOf({0})},
             out);
    }
  }
  static PartId IdOf(std::int32_t server) {
    return {.key = static_cast<std::uint64_t>(server) + 1};
  }

  void Submit(Process& process, Request request, Outputs& out) {
    ++process.open;
    process.worker->Submit(network_.now(), std::move(request), out);
  }

  void Continue(Process& process) {
    if (!process.error.empty() || process.worker->left()) {
      if (process.worker->left()) process.member->OnLeft(network_.now());
      return;
    }
    ++process.round;
    Do(process, [&](Outputs& out) {
      if (process.round > rounds_) {
        ++process.open;
        process.worker->Leave(network_.now(), 0, out);
        return;
      }
      for (std::int32_t server = 0; server < num_servers_; ++server) {
        Submit(process,
               {.kind = Kind::kPushPull,
                .server = server,
                .part = IdOf(server),
                .payload = PayloadOf({process.id.rank})},
               out);
      }
      if (process.round % 5 == 0) {
        ++process.open;
        if (process.worker->Barrier(network_.now(), 0, Time{0}, out)) {
          process.worker->OpenBarrier(network_.now(), out);
        }
      }
    });
  }

  const int rounds_;
  std::int32_t num_workers_ = 0;
  std::int32_t num_servers_ = 0;
  SimNetwork network_;
  SchedulerMachine scheduler_;
  std::vector<std::unique_ptr<Process>> members_;
};

constexpr int kForever = 1'000'000;

TEST(WholeJob, EndsWellWhenAllWorkersHaveLeft) {
  for (std::uint64_t seed = 0; seed < Scaled(100U); ++seed) {
    WholeJob job(seed, 3, 2, 20);
    job.Run(seconds(30));
    EXPECT_TRUE(job.scheduler().done()) << "seed " << seed;
    EXPECT_FALSE(job.scheduler().failure()) << "seed " << seed;
    for (const auto& process : job.members()) {
      EXPECT_EQ(process->error, "") << "seed " << seed;
      const bool ended = process->worker ? process->worker->left() : process->shut_down;
      EXPECT_TRUE(ended) << "seed " << seed;
    }
  }
}

TEST(WholeJob, WhoeverDiesIsNamedToAllOthersInTime) {
  const std::uint64_t first = std::random_device()();
  std::printf("first seed %llu\n", static_cast<unsigned long long>(first));
  for (std::uint64_t seed = first; seed < first + Scaled(300U); ++seed) {
    SimRandom random(seed);
    WholeJob job(seed, random.Between(2, 4), random.Between(1, 2), kForever);
    job.Run(milliseconds(random.Between(100, 3000)));
    const auto& victim = job.members()[random.Below(job.members().size())];
    const bool breaks = random.Chance(500);
    job.Kill(victim->peer, breaks);
    // Three heartbeats and a second; at once, if connections break.
    job.Run(job.network().now() + (breaks ? seconds(1) : seconds(4)));
    const std::string name = ToString(victim->id);
    ASSERT_TRUE(job.scheduler().failure()) << "seed " << seed;
    EXPECT_EQ(job.scheduler().failure()->node, victim->id) << "seed " << seed;
    for (const auto& process : job.members()) {
      if (process == victim) continue;
      if (process->server) {
        ASSERT_TRUE(process->server->failure()) << "seed " << seed;
        EXPECT_EQ(process->server->failure()->node, victim->id) << "seed " << seed;
      } else {
        EXPECT_THAT(process->error, HasSubstr(name)) << "seed " << seed;
        EXPECT_THAT(process->error, HasSubstr(victim->address)) << "seed " << seed;
        EXPECT_EQ(process->open, 0u) << "seed " << seed << ": something hangs";
      }
    }
  }
}

TEST(WholeJob, ADeadSchedulerIsNamedToAll) {
  for (std::uint64_t seed = 0; seed < Scaled(50U); ++seed) {
    SimRandom random(seed);
    WholeJob job(seed, 3, 1, kForever);
    job.Run(milliseconds(random.Between(700, 3000)));
    const bool breaks = seed % 2 == 0;
    job.Kill(kSchedulerNode, breaks);
    job.Run(job.network().now() + (breaks ? seconds(1) : seconds(4)));
    for (const auto& process : job.members()) {
      ASSERT_TRUE(process->member->failure()) << "seed " << seed;
      if (process->server) {
        ASSERT_TRUE(process->server->failure()) << "seed " << seed;
        EXPECT_EQ(process->server->failure()->node, kSchedulerNode) << "seed " << seed;
        continue;
      }
      EXPECT_THAT(process->error, HasSubstr("the scheduler (head:1)")) << "seed " << seed;
      EXPECT_EQ(process->open, 0u) << "seed " << seed << ": something hangs";
    }
  }
}

TEST(WholeJob, ASecondProcessOfARankIsRefusedAndTheFirstGoesOn) {
  for (std::uint64_t seed = 0; seed < Scaled(50U); ++seed) {
    WholeJob job(seed, 3, 1, kForever);
    job.Run(milliseconds(700));
    WholeJob::Process& second = job.Restart(WorkerNodeOf(1));
    const int before = job.Find(WorkerNodeOf(1))->round;
    job.Run(job.network().now() + seconds(5));
    EXPECT_TRUE(second.member->refused()) << "seed " << seed;
    EXPECT_THAT(second.member->failure()->why, HasSubstr("worker 1"));
    EXPECT_FALSE(job.scheduler().failure()) << "seed " << seed;
    EXPECT_GT(job.Find(WorkerNodeOf(1))->round, before);
  }
}

TEST(WholeJob, AWorkerThatIsKilledAndStartedAgainFailsTheJobByName) {
  for (std::uint64_t seed = 0; seed < Scaled(100U); ++seed) {
    WholeJob job(seed, 3, 2, kForever);
    job.Run(milliseconds(300 + seed * 7));
    job.Kill(WorkerNodeOf(2), /*connections_break=*/seed % 2 == 0);
    WholeJob::Process& second = job.Restart(WorkerNodeOf(2));
    job.Run(job.network().now() + seconds(4));
    EXPECT_TRUE(second.member->failure()) << "seed " << seed;
    ASSERT_TRUE(job.scheduler().failure()) << "seed " << seed;
    EXPECT_EQ(job.scheduler().failure()->node, WorkerNodeOf(2)) << "seed " << seed;
    for (const int rank : {0, 1}) {
      EXPECT_THAT(job.Find(WorkerNodeOf(rank))->error, HasSubstr("worker 2")) << "seed " << seed;
    }
  }
}

}  // namespace
}  // namespace heddle::kvstore::dist
