#include "tests/kvstore/dist/schedule.h"

#include <heddle/dtype.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <exception>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/protocol/worker.h"
#include "kvstore/dist/transport/sim/sim_network.h"
#include "tests/kvstore/dist/integer_parts.h"

namespace heddle::kvstore::dist {

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr int kRounds = 20;
constexpr std::size_t kElements = 3;
constexpr std::uint64_t kVersion = std::uint64_t{1} << 32;
constexpr NodeId kHub{.role = Role::kScheduler, .rank = 0};
using Value = std::array<std::int64_t, kElements>;

constexpr NodeId ServerNode(std::int32_t rank) { return {.role = Role::kServer, .rank = rank}; }
constexpr NodeId WorkerNode(std::int32_t rank) { return {.role = Role::kWorker, .rank = rank}; }

// What a rank pushes: a random number, so that any loss, repetition or swap changes a sum; and, in
// twelve bits a rank, 1 and the number of the push, so that a sum tells which pushes it is made of.
constexpr int kBits = 12;
Value Pushed(std::uint64_t seed, std::int32_t rank, std::int32_t key, int push) {
  const auto id = static_cast<std::uint64_t>(rank * 1000 + key * 100 + push);
  return {static_cast<std::int64_t>(SimRandom(seed ^ (id << 32)).Next() >> 24),
          std::int64_t{1} << (kBits * rank), std::int64_t{push} << (kBits * rank)};
}

struct Plan {
  std::uint64_t seed;
  std::int32_t workers;
  std::int32_t servers;
  std::int32_t keys;
  bool async = false;
  bool optimizer = false;  // the updater adds to the value; else it replaces it
  // Keys are parts of arrays that are updated together: of array a those that begin at
  // a * ArrayKeys(), on as many servers as there are.
  bool whole = false;
  bool removes = false;                    // every worker removes every key when it has pushed all
  bool closes = false;                     // workers close the store somewhere in their programs
  std::vector<std::vector<int>> pushes{};  // [worker][key]: how many
  std::vector<std::vector<std::vector<bool>>> bad{};  // [worker][key][push]: its input failed
  SimFaults faults{};
  int cuts = 0;
  int ghosts = 0;
  bool defer_updates = false;
  std::uint64_t bytes_max = kUnfinishedBytesMax;
  std::uint32_t barrier_per_1000 = 0;
  std::uint32_t wait_per_1000 = 0;
  std::uint32_t late_per_1000 = 0;  // pushes whose values come when their places are taken

  int CountFaults() const {
    int failed = 0;
    for (const auto& of_worker : bad) {
      for (const auto& of_key : of_worker) failed += std::count(of_key.begin(), of_key.end(), true);
    }
    return cuts + ghosts + failed + (faults.drop_per_1000 > 0) + (faults.duplicate_per_1000 > 0);
  }
  bool Failed(std::int32_t rank, std::int32_t key, int push) const {
    return bad[rank][key][push - 1];
  }
  std::int32_t ArrayKeys() const { return whole ? servers + 1 : 1; }
  int Pushes(std::int32_t rank, std::int32_t key) const { return pushes[rank][key]; }
  int MostPushes(std::int32_t rank) const {
    return *std::max_element(pushes[rank].begin(), pushes[rank].end());
  }
  int RoundsOf(std::int32_t key) const {
    int rounds = 0;
    for (const auto& of_worker : pushes) rounds = std::max(rounds, of_worker[key]);
    return rounds;
  }
};

Plan MakePlan(std::uint64_t seed) {
  SimRandom random(seed);
  Plan plan{.seed = seed,
            .workers = random.Between(2, 5),
            .servers = random.Between(1, 3),
            .keys = random.Between(2, 4)};
  plan.async = random.Chance(200);
  plan.optimizer = plan.async || random.Chance(500);
  if (plan.optimizer && !plan.async && random.Chance(400)) {
    plan.whole = true;
    plan.keys = plan.ArrayKeys() * random.Between(1, 2);
  }
  plan.faults.delay_max = microseconds(random.Between(200, 5000));
  plan.defer_updates = random.Chance(300);
  plan.barrier_per_1000 = random.Chance(400) ? 100 : 0;
  plan.wait_per_1000 = static_cast<std::uint32_t>(random.Between(0, 600));
  plan.removes = random.Chance(300);
  if (random.Chance(250)) plan.bytes_max = 24u * static_cast<unsigned>(random.Between(1, 4));
  const bool leave_early = random.Chance(400);
  const bool inputs_fail = !plan.async && random.Chance(300);
  for (std::int32_t rank = 0; rank < plan.workers; ++rank) {
    const int rounds = leave_early ? random.Between(kRounds - 10, kRounds) : kRounds;
    plan.pushes.emplace_back(plan.keys, rounds);
    plan.bad.emplace_back(plan.keys, std::vector<bool>(static_cast<std::size_t>(rounds)));
    auto& bad = plan.bad.back();
    for (std::size_t key = 0; key < bad.size(); ++key) {
      for (std::size_t i = 0; inputs_fail && i < bad[key].size(); ++i) {
        bad[key][i] = random.Chance(30);
      }
      // An input fails as a whole.
      bad[key] = bad[key - key % static_cast<std::size_t>(plan.ArrayKeys())];
    }
  }
  do {
    plan.faults.drop_per_1000 =
        random.Chance(400) ? static_cast<std::uint32_t>(random.Between(1, 60)) : 0;
    plan.faults.duplicate_per_1000 =
        random.Chance(500) ? static_cast<std::uint32_t>(random.Between(1, 100)) : 0;
    plan.cuts = random.Chance(400) ? random.Between(1, 4) : 0;
    plan.ghosts = random.Chance(300) ? random.Between(1, 10) : 0;
  } while (plan.CountFaults() == 0);
  if (random.Chance(300)) plan.late_per_1000 = static_cast<std::uint32_t>(random.Between(100, 900));
  plan.closes = random.Chance(300);
  if (!plan.closes || random.Chance(400)) return plan;
  // They push differently often to different keys, and do not wait: in the end who waits for whom
  // goes both ways.
  plan.barrier_per_1000 = plan.wait_per_1000 = 0;
  for (std::vector<int>& pushes : plan.pushes) {
    const auto array_keys = static_cast<std::size_t>(plan.ArrayKeys());
    for (std::size_t key = 0; key < pushes.size(); ++key) {
      pushes[key] = key % array_keys == 0 ? pushes[key] - random.Between(0, 10) : pushes[key - 1];
    }
  }
  return plan;
}

std::string TextOf(const Plan& plan) {
  std::string text = fmt::format(
      "{}: {} workers, {} servers, {} keys, {}{}; drops {}/1000, doubles {}/1000, {} cuts, {} "
      "stale "
      "messages, delays up to {} us, updates {}, at most {} bytes unfinished, {}/1000 values late, "
      "{}pushes",
      plan.async ? "dist_async" : "dist_sync", plan.workers, plan.servers, plan.keys,
      plan.whole       ? "values grow, whole arrays together"
      : plan.optimizer ? "values grow"
                       : "values are replaced",
      plan.removes ? ", and are removed" : "", plan.faults.drop_per_1000,
      plan.faults.duplicate_per_1000, plan.cuts, plan.ghosts, plan.faults.delay_max.count() / 1000,
      plan.defer_updates ? "take time" : "at once", plan.bytes_max, plan.late_per_1000,
      plan.closes ? "closed early, " : "");
  for (const auto& of_worker : plan.pushes) text += fmt::format(" {}", fmt::join(of_worker, "+"));
  return text;
}

// The value of each key after each round of dist_sync, and whose failed input the round had.
class Model {
 public:
  explicit Model(const Plan& plan) {
    for (std::int32_t key = 0; key < plan.keys; ++key) {
      keys_.emplace_back(1).front().value = {key, 0, 0};
    }
    for (std::int32_t first = 0; first < plan.keys; first += plan.ArrayKeys()) {
      for (int round = 1; round <= plan.RoundsOf(first); ++round) AddRound(plan, first, round);
    }
  }

  struct Round {
    Value value{};
    std::int32_t failed_rank = -1;
  };
  const Round& At(std::int32_t key, int round) const {
    return keys_[static_cast<std::size_t>(key)][static_cast<std::size_t>(round)];
  }

 private:
  // Of the keys of one array.
  void AddRound(const Plan& plan, std::int32_t first, int round) {
    Round next;
    std::vector<Value> sums;
    for (std::int32_t key = first; key < first + plan.ArrayKeys(); ++key) {
      Value& sum = sums.emplace_back();
      for (std::int32_t rank = 0; rank < plan.workers; ++rank) {
        if (plan.Pushes(rank, key) < round) continue;
        if (plan.Failed(rank, key, round) && next.failed_rank < 0) next.failed_rank = rank;
        const Value pushed = Pushed(plan.seed, rank, key, round);
        for (std::size_t i = 0; i < kElements; ++i) sum[i] += pushed[i];
      }
    }
    // What IntegerParts does in its two passes.
    std::array<std::uint64_t, 2> totals{};
    for (std::size_t pass = 0; plan.whole && pass < totals.size(); ++pass) {
      for (const Value& sum : sums) {
        for (const std::int64_t element : sum) {
          totals[pass] += static_cast<std::uint64_t>(element) ^ (pass == 0 ? 0 : totals[0]);
        }
      }
    }
    for (std::size_t i = 0; i < sums.size(); ++i) {
      auto& rounds = keys_[static_cast<std::size_t>(first) + i];
      next.value = rounds.back().value;
      for (std::size_t k = 0; k < kElements && next.failed_rank < 0; ++k) {
        next.value[k] = static_cast<std::int64_t>(
            static_cast<std::uint64_t>(plan.optimizer ? next.value[k] : 0) +
            static_cast<std::uint64_t>(sums[i][k]) + totals[1]);
      }
      rounds.push_back(next);
    }
  }

  std::vector<std::vector<Round>> keys_;
};

// The optimizer is data of its own: IntegerParts adds when there is one.
class NoControl : public ServerControl {
 public:
  void OpenStore(std::uint32_t /*store*/, const std::string& /*type*/) override {}
  void SetOptimizer(std::uint32_t /*store*/, std::uint64_t /*version*/,
                    const OptimizerBody& /*optimizer*/) override {}
  void DropOptimizer(std::uint32_t /*store*/, std::uint64_t /*version*/) override {}
  void SetParameters(std::uint32_t /*store*/, std::uint64_t /*version*/,
                     const OptimizerBody& /*optimizer*/) override {}
  void SetCompression(std::uint32_t /*store*/, const CompressionOptions& /*options*/) override {}
  void DropCompression(std::uint32_t /*store*/) override {}
  bool Start(const ControlId& /*id*/, const Message& /*request*/,
             ControlResult* /*result*/) override {
    return true;
  }
};

struct Step {
  enum class Kind : std::uint8_t {
    kPush,
    kPull,
    kPushPull,
    kRemove,
    kWait,
    kBarrier,
    kClose,
    kOpenLast,  // the barrier of kClose: all pushes before it have been submitted
    kLeave
  };
  Kind kind;
  std::int32_t key = 0;
  int push = 0;  // the how many-th of the key, from 1; of a pull: how many came before
};
constexpr bool IsRequest(Step::Kind kind) { return kind <= Step::Kind::kRemove; }

// Behind all barriers of the worker: the others come to theirs without it only if its pushes do not
// wait for theirs. What comes behind is without waits: the program has called it, and it comes
// late.
void CloseSomewhere(SimRandom& random, std::vector<Step>* steps) {
  const auto is = [](Step::Kind kind) {
    return [kind](const Step& step) { return step.kind == kind; };
  };
  const auto end = std::find_if(steps->rbegin(), steps->rend(), is(Step::Kind::kWait));
  const auto barrier = std::find_if(end, steps->rend(), is(Step::Kind::kBarrier));
  const auto most = static_cast<int>(steps->rend() - end) - 1;
  const auto least = static_cast<int>(steps->rend() - barrier);
  const int before = random.Chance(500) ? most : random.Between(least, most);
  steps->erase(std::remove_if(steps->begin() + before, steps->end(),
                              [](const Step& step) { return !IsRequest(step.kind); }),
               steps->end());
  steps->insert(steps->begin() + before, {Step::Kind::kClose});
  for (const Step::Kind kind : {Step::Kind::kOpenLast, Step::Kind::kWait, Step::Kind::kLeave}) {
    steps->push_back({kind});
  }
}

// What a worker's program does, from the plan.
std::vector<Step> StepsOf(const Plan& plan, std::int32_t rank, SimRandom& random) {
  std::vector<Step> steps;
  std::vector<std::int32_t> keys;
  for (std::int32_t key = 0; key < plan.keys; ++key) keys.push_back(key);
  for (int round = 1; round <= plan.MostPushes(rank); ++round) {
    for (std::size_t i = keys.size(); i > 1; --i) std::swap(keys[i - 1], keys[random.Below(i)]);
    for (const std::int32_t key : keys) {
      if (round > plan.Pushes(rank, key)) continue;
      // Programs do different things: push and pull at once, one after the other, or push alone.
      const std::uint64_t what = random.Below(4);
      steps.push_back({what == 0 ? Step::Kind::kPushPull : Step::Kind::kPush, key, round});
      if (what == 1 || what == 2) steps.push_back({Step::Kind::kPull, key, round});
    }
    if (random.Chance(plan.wait_per_1000)) steps.push_back({Step::Kind::kWait});
    // All workers have the same barriers, up to the round in which they leave.
    const bool barrier =
        SimRandom(plan.seed + static_cast<std::uint64_t>(round)).Chance(plan.barrier_per_1000);
    if (barrier) steps.push_back({Step::Kind::kBarrier});
  }
  for (const std::int32_t key : keys) {
    steps.push_back({Step::Kind::kPull, key, plan.Pushes(rank, key)});
    if (plan.removes) steps.push_back({Step::Kind::kRemove, key});
  }
  steps.push_back({Step::Kind::kWait});
  // Others go on while those that have removed their keys are still there.
  if (plan.removes && plan.barrier_per_1000 == 0) steps.push_back({Step::Kind::kBarrier});
  steps.push_back({Step::Kind::kLeave});
  if (plan.closes) CloseSomewhere(random, &steps);
  return steps;
}

class Schedule {
 public:
  Schedule(std::uint64_t seed, const MakeServer& make_server,
           const std::function<void(const std::string&)>& trace)
      : plan_(MakePlan(seed)),
        model_(plan_),
        network_(seed + 1, plan_.faults),
        random_(seed + 2),
        late_random_(seed + 3) {
    network_.trace = trace;
    const bool lossy = plan_.faults.drop_per_1000 > 0;
    for (std::int32_t rank = 0; rank < plan_.servers; ++rank) {
      auto server = std::make_unique<Server>();
      ServerOptions options;
      options.unfinished_bytes_max = plan_.bytes_max;
      // Where nothing comes again, nothing needs to be kept.
      if (lossy || plan_.cuts > 0 || plan_.faults.duplicate_per_1000 > 0) {
        options.answers_kept = kRequestsAheadMax;
      }
      server->machine = make_server(options, server->parts, server->control);
      if (plan_.defer_updates) {
        server->parts.defer = [this, rank](const PartId& id) {
          return Defer(rank, id, /*pass=*/false);
        };
        server->parts.defer_pass = [this, rank](const PartId& id) {
          return Defer(rank, id, /*pass=*/true);
        };
      }
      if (plan_.whole) {
        server->parts.whole = [this, rank](const PartId&) { return WholeAt(rank); };
      }
      servers_.push_back(std::move(server));
    }
    for (std::int32_t rank = 0; rank < plan_.workers; ++rank) {
      WorkerOptions options;
      options.incarnation = IncarnationOf(rank);
      options.unfinished_bytes_max = plan_.bytes_max;
      if (lossy) options.resend_after = milliseconds(random_.Between(6, 40));
      workers_.push_back(std::make_unique<Worker>(options));
      workers_.back()->steps = StepsOf(plan_, rank, random_);
      workers_.back()->pulled.resize(static_cast<std::size_t>(plan_.keys));
    }
  }

  ScheduleResult Run() {
    Begin();
    SimNetwork::Event event;
    std::uint64_t events = 0;
    while (failure_.empty() && left_ < plan_.workers && network_.Next(&event)) {
      Handle(event);
      if (++events > kEventsMax) Fail("it does not come to an end");
    }
    if (failure_.empty() && left_ < plan_.workers) Fail("nothing more happens");
    if (failure_.empty()) CheckEnd();
    return {.failure = failure_,
            .plan = TextOf(plan_),
            .messages = network_.messages_sent(),
            .faults = plan_.CountFaults()};
  }

 private:
  static constexpr std::uint64_t kEventsMax = 200'000;
  static constexpr std::uint64_t kNoMoreBarriers = ~std::uint64_t{0};
  // Timers of a server: the end of a turn, OnTime, and the ends of updates.
  static constexpr std::uint64_t kTurnTimer = 0;
  static constexpr std::uint64_t kTimeTimer = 1;
  static constexpr std::uint64_t kLinkTimer = 100;  // and of links to other servers
  static constexpr std::uint64_t kUpdatedTimer = 1000;
  // Timers of a worker: OnTime (kTimeTimer), calls that become ready, and values that come.
  static constexpr std::uint64_t kContinueTimer = 2;
  static constexpr std::uint64_t kSupplyTimer = 1000;
  // Timers of the hub: faults to come.
  static constexpr std::uint64_t kCutTimer = 0;
  static constexpr std::uint64_t kGhostTimer = 1;

  struct Server {
    IntegerParts parts;
    NoControl control;
    std::unique_ptr<ServerMachine> machine;
    bool turn_open = false;
  };
  struct Deferred {
    PartId id;
    bool pass;  // of an array, else the update of a part
  };
  struct Late {  // a value to come
    std::int32_t server;
    PartId part;
    std::uint64_t token;
    PushValue value;
  };
  struct Asked {  // a request of the program
    Step step;
    bool ended = false;
  };
  struct Worker {
    explicit Worker(const WorkerOptions& options) : machine(options) {}
    WorkerMachine machine;
    std::vector<Step> steps;
    std::size_t at = 0;           // the next step
    std::vector<Asked> asked;     // by token
    std::size_t open = 0;         // of asked
    std::size_t open_pushes = 0;  // kPush alone: what acknowledges the others is not seen here
    std::uint64_t barriers = 0;   // called
    bool calls_no_more = false;  // it has closed the store; what it has called before may come late
    bool paused = false;         // before its next step
    std::optional<std::int32_t> too_many;  // a key of which it has announced a request too many
    std::optional<Time> timer;
    // dist_async: the pulled values by key and token, thus in program order.
    std::vector<std::map<std::uint64_t, Value>> pulled;
    std::optional<Message> spied;  // a request of its own, for stale ones
  };

  static Incarnation IncarnationOf(std::int32_t rank) {
    return 0x1000u + static_cast<unsigned>(rank);
  }
  static Incarnation ServerIncarnationOf(std::int32_t rank) {
    return 0x2000u + static_cast<unsigned>(rank);
  }
  std::int32_t ServerOf(std::int32_t key) const {
    return (plan_.whole ? key % plan_.ArrayKeys() : key) % plan_.servers;
  }
  PartId IdOf(std::int32_t key) const {
    return {.store = 0,
            .part = static_cast<std::uint32_t>(key % plan_.ArrayKeys()),
            .key = static_cast<std::uint64_t>(key / plan_.ArrayKeys()) + 1};
  }
  // The last part of an array lies with the first.
  WholeArray WholeAt(std::int32_t server) const {
    WholeArray whole{.parts_here = server == 0 ? 2u : 1u};
    for (std::int32_t other = 0; other < plan_.servers; ++other) {
      if (other != server) whole.others.push_back(other);
    }
    return whole;
  }

  bool Defer(std::int32_t server, const PartId& id, bool pass) {
    if (!random_.Chance(500)) return false;
    deferred_.push_back({id, pass});
    const Time end = network_.now() + microseconds(random_.Between(1, 3000));
    network_.SetTimer(ServerNode(server), end, kUpdatedTimer + deferred_.size() - 1);
    return true;
  }

  void Fail(const std::string& why) {
    if (!failure_.empty()) return;
    failure_ = why;
    for (const auto& worker : workers_) {
      failure_ += "\n" + worker->machine.DescribeState(network_.now());
    }
    for (const auto& server : servers_) {
      failure_ += "\n" + server->machine->DescribeState(network_.now());
    }
  }

  void Begin() {
    RosterBody roster{.num_workers = plan_.workers, .num_servers = plan_.servers};
    for (std::int32_t rank = 0; rank < plan_.workers; ++rank) {
      roster.nodes.push_back(
          {WorkerNode(rank), IncarnationOf(rank), fmt::format("worker{}:1", rank)});
    }
    for (std::int32_t rank = 0; rank < plan_.servers; ++rank) {
      roster.nodes.push_back({ServerNode(rank), ServerIncarnationOf(rank), "server:1"});
    }
    for (std::int32_t rank = 0; rank < plan_.servers; ++rank) {
      roster.rank = rank;
      OnServer(rank, [&](ServerMachine& server, Outputs& out) {
        server.OnRoster(network_.now(), roster, out);
      });
      for (std::int32_t other = 0; plan_.whole && other < plan_.servers; ++other) {
        const Time stands = network_.now() + microseconds(random_.Between(1, 20'000));
        if (other != rank) {
          network_.SetTimer(ServerNode(rank), stands,
                            kLinkTimer + static_cast<std::uint64_t>(other));
        }
      }
    }
    for (std::int32_t rank = 0; rank < plan_.workers; ++rank) {
      roster.rank = rank;
      OnWorker(rank, [&](WorkerMachine& worker, Outputs& out) {
        worker.OnRoster(network_.now(), roster, out);
      });
      Open(rank);
      Continue(rank);
    }
    for (int i = 0; i < plan_.cuts; ++i) {
      network_.SetTimer(kHub, microseconds(random_.Between(1, 60'000)), kCutTimer);
    }
    for (int i = 0; i < plan_.ghosts; ++i) {
      network_.SetTimer(kHub, microseconds(random_.Between(1, 60'000)), kGhostTimer);
    }
  }

  // Stores and keys are opened by all, without waiting for anything.
  void Open(std::int32_t rank) {
    const std::string type = plan_.async ? "dist_async" : "dist_sync";
    for (std::int32_t server = 0; server < plan_.servers; ++server) {
      Submit(rank, {Step::Kind::kWait},
             {.kind = Kind::kOpenStore,
              .server = server,
              .part = ControlPart(0),
              .meta = Encode(OpenStoreBody{.type = type})});
      if (!plan_.optimizer) continue;
      Submit(rank, {Step::Kind::kWait},
             {.kind = Kind::kSetOptimizer,
              .server = server,
              .part = ControlPart(0),
              .version = kVersion,
              .meta = Encode(OptimizerBody{.name = "sum"})});
    }
    for (std::int32_t key = 0; key < plan_.keys; ++key) {
      const PartInfo info{.key = std::int64_t{key},
                          .shape = {kElements},
                          .dtype = DType::kInt64,
                          .num_parts = static_cast<std::uint32_t>(plan_.ArrayKeys()),
                          .end = kElements};
      Request init{.kind = Kind::kInit,
                   .server = ServerOf(key),
                   .part = IdOf(key),
                   .flags = rank == 0 ? std::uint8_t{0} : kFlagNoValue,
                   .meta = Encode(InitBody{info})};
      if (rank == 0) init.payload = PayloadOf({key, 0, 0});
      Submit(rank, {Step::Kind::kWait}, std::move(init));
    }
  }

  // The program of a worker runs until it waits.
  void Continue(std::int32_t rank) {
    Worker& worker = *workers_[static_cast<std::size_t>(rank)];
    while (failure_.empty() && worker.at < worker.steps.size()) {
      const Step& step = worker.steps[worker.at];
      if (step.kind == Step::Kind::kWait) {
        if (worker.open > 0) return;
      } else if (step.kind == Step::Kind::kBarrier) {
        if (!worker.asked.empty() && worker.asked.back().step.kind == Step::Kind::kBarrier) {
          if (!worker.asked.back().ended) return;  // called, and not done
          worker.asked.push_back({{Step::Kind::kWait}, true});
        } else {
          CallBarrier(rank, step);
          return;
        }
      } else if (step.kind == Step::Kind::kClose) {
        ++worker.at;
        CloseStore(rank);
        continue;
      } else if (step.kind == Step::Kind::kOpenLast) {
        ++worker.at;
        OnWorker(rank, [&](WorkerMachine& machine, Outputs& out) {
          machine.OpenBarrier(network_.now(), out);
          if (!worker.too_many) return;
          machine.WontRequest(ServerOf(*worker.too_many), IdOf(*worker.too_many));
          machine.CloseStore(network_.now(), 0, out);
        });
        continue;
      } else if (worker.calls_no_more && !worker.paused && late_random_.Chance(300)) {
        worker.paused = true;
        network_.SetTimer(WorkerNode(rank),
                          network_.now() + microseconds(late_random_.Between(1, 3000)),
                          kContinueTimer);
        return;
      } else if (step.kind == Step::Kind::kLeave) {
        worker.asked.push_back({step});
        ++worker.open;
        const std::uint64_t token = worker.asked.size() - 1;
        ++worker.at;
        OnWorker(rank, [&](WorkerMachine& machine, Outputs& out) {
          machine.Leave(network_.now(), token, out);
        });
        return;
      } else {
        Request request = RequestOf(rank, step);
        worker.paused = false;
        ++worker.at;
        Submit(rank, step, std::move(request));
        continue;
      }
      ++worker.at;
    }
  }

  // The requests behind this step are those that the node is not given yet.
  void CloseStore(std::int32_t rank) {
    Worker& worker = *workers_[static_cast<std::size_t>(rank)];
    std::map<std::int32_t, std::uint64_t> requests;  // by key
    for (std::size_t i = worker.at; i < worker.steps.size(); ++i) {
      if (IsRequest(worker.steps[i].kind)) ++requests[worker.steps[i].key];
    }
    if (late_random_.Chance(300)) worker.too_many = late_random_.Between(0, plan_.keys - 1);
    if (worker.too_many) ++requests[*worker.too_many];
    for (const auto& [key, count] : requests) {
      worker.machine.WillRequest(ServerOf(key), IdOf(key), count);
    }
    OnWorker(rank, [&](WorkerMachine& machine, Outputs& out) {
      machine.CloseStore(network_.now(), 0, out);
    });
    worker.calls_no_more = true;
    worker.machine.CloseBarriers(network_.now());
  }

  void CallBarrier(std::int32_t rank, const Step& step) {
    Worker& worker = *workers_[static_cast<std::size_t>(rank)];
    worker.asked.push_back({step});
    ++worker.open;
    ++worker.barriers;
    const std::uint64_t token = worker.asked.size() - 1;
    OnWorker(rank, [&](WorkerMachine& machine, Outputs& out) {
      if (machine.Barrier(network_.now(), token, Time{0}, out)) {
        machine.OpenBarrier(network_.now(), out);
      }
    });
  }

  Request RequestOf(std::int32_t rank, const Step& step) const {
    Request request{.server = ServerOf(step.key),
                    .part = IdOf(step.key),
                    .dtype = DType::kInt64,
                    .version = plan_.optimizer ? kVersion : 0};
    request.kind = step.kind == Step::Kind::kPull       ? Kind::kPull
                   : step.kind == Step::Kind::kPushPull ? Kind::kPushPull
                   : step.kind == Step::Kind::kRemove   ? Kind::kRemove
                                                        : Kind::kPush;
    if (!IsPush(request.kind)) return request;
    if (plan_.Failed(rank, step.key, step.push)) {
      request.flags = kFlagFailed;
      request.meta = Encode(ErrorBody{.message = "planned"});
    } else {
      const Value value = Pushed(plan_.seed, rank, step.key, step.push);
      request.payload = PayloadOf({value.begin(), value.end()});
    }
    return request;
  }

  void Submit(std::int32_t rank, const Step& step, Request request) {
    Worker& worker = *workers_[static_cast<std::size_t>(rank)];
    request.token = worker.asked.size();
    request.what = "request";
    worker.asked.push_back({step});
    ++worker.open;
    if (step.kind == Step::Kind::kPush) ++worker.open_pushes;
    if (IsPush(request.kind) && late_random_.Chance(plan_.late_per_1000)) DelayValue(rank, request);
    OnWorker(rank, [&](WorkerMachine& machine, Outputs& out) {
      machine.Submit(network_.now(), std::move(request), out);
    });
  }

  void DelayValue(std::int32_t rank, Request& request) {
    Late& late = late_.emplace_back(
        Late{.server = request.server, .part = request.part, .token = request.token, .value = {}});
    if ((request.flags & kFlagFailed) != 0) {
      late.value.failure = ErrorBody{.message = "planned"};
    } else {
      late.value.payload = std::exchange(request.payload, {});
    }
    request.flags = 0;
    request.meta.clear();
    request.awaits_value = true;
    const Time comes = network_.now() + microseconds(late_random_.Between(1, 3000));
    network_.SetTimer(WorkerNode(rank), comes, kSupplyTimer + late_.size() - 1);
  }

  // Nodes.

  template <class Call>
  void OnWorker(std::int32_t rank, Call call) {
    Worker& worker = *workers_[static_cast<std::size_t>(rank)];
    Outputs out;
    call(worker.machine, out);
    for (Outgoing& outgoing : out.messages) {
      const Kind kind = outgoing.message.kind;
      if (kind == Kind::kPush || kind == Kind::kPull) worker.spied = outgoing.message;
      network_.Send(WorkerNode(rank), outgoing.to, std::move(outgoing.message));
    }
    for (Answer& answer : out.answers) OnAnswer(rank, answer);
    const std::optional<Time> wanted = worker.machine.next_time();
    if (wanted && (!worker.timer || *wanted < *worker.timer)) {
      worker.timer = *wanted;
      network_.SetTimer(WorkerNode(rank), *wanted, kTimeTimer);
    }
    if (!out.answers.empty()) Continue(rank);
  }

  template <class Call>
  void OnServer(std::int32_t rank, Call call) {
    Server& server = *servers_[static_cast<std::size_t>(rank)];
    Outputs out;
    call(*server.machine, out);
    // Turns end at once, or after some more input.
    if (random_.Chance(600)) {
      server.machine->EndTurn(out);
    } else if (!server.turn_open) {
      server.turn_open = true;
      const Time end = network_.now() + microseconds(random_.Between(1, 500));
      network_.SetTimer(ServerNode(rank), end, kTurnTimer);
    }
    for (Outgoing& outgoing : out.messages) {
      // Links between servers lose nothing while they stand: the end of one is the end of the job.
      SimFaults faults = plan_.faults;
      if (outgoing.to.role == Role::kServer) faults.drop_per_1000 = 0;
      network_.set_faults(faults);
      network_.Send(ServerNode(rank), outgoing.to, std::move(outgoing.message));
      network_.set_faults(plan_.faults);
    }
  }

  void Handle(SimNetwork::Event& event) {
    const Time now = network_.now();
    if (event.kind == SimNetwork::Event::Kind::kTimer) {
      OnTimer(event.to, event.timer);
    } else if (event.to.role == Role::kWorker) {
      OnWorker(event.to.rank, [&](WorkerMachine& worker, Outputs& out) {
        if (event.kind == SimNetwork::Event::Kind::kMessage) {
          worker.OnMessage(now, event.from, std::move(event.message), out);
        } else if (event.from.role == Role::kServer) {
          worker.OnReconnected(now, event.from.rank, out);
        }
      });
    } else if (event.kind != SimNetwork::Event::Kind::kMessage) {
      return;  // servers do nothing on a new connection
    } else if (event.to.role == Role::kServer) {
      OnServer(event.to.rank, [&](ServerMachine& server, Outputs& out) {
        server.OnMessage(now, event.from, std::move(event.message), out);
      });
    } else {
      OnHub(event.from.rank, event.message);
    }
  }

  void OnTimer(NodeId node, std::uint64_t timer) {
    const Time now = network_.now();
    if (node == kHub) {
      if (timer == kCutTimer) Cut();
      if (timer == kGhostTimer) SendGhost();
    } else if (node.role == Role::kWorker && timer == kContinueTimer) {
      Continue(node.rank);
    } else if (node.role == Role::kWorker && timer >= kSupplyTimer) {
      Late& late = late_[timer - kSupplyTimer];
      OnWorker(node.rank, [&](WorkerMachine& worker, Outputs& out) {
        worker.Supply(now, late.server, late.part, late.token, std::move(late.value), out);
      });
    } else if (node.role == Role::kWorker) {
      workers_[static_cast<std::size_t>(node.rank)]->timer.reset();
      OnWorker(node.rank, [&](WorkerMachine& worker, Outputs& out) { worker.OnTime(now, out); });
    } else if (timer == kTurnTimer) {
      servers_[static_cast<std::size_t>(node.rank)]->turn_open = false;
      OnServer(node.rank, [&](ServerMachine& server, Outputs& out) { server.EndTurn(out); });
    } else if (timer < kUpdatedTimer) {
      OnServer(node.rank, [&](ServerMachine& server, Outputs& out) {
        server.OnLinked(static_cast<std::int32_t>(timer - kLinkTimer), out);
      });
    } else {
      EndDeferred(node.rank, deferred_[timer - kUpdatedTimer]);
    }
  }

  void EndDeferred(std::int32_t rank, Deferred deferred) {
    const Time now = network_.now();
    IntegerParts& parts = servers_[static_cast<std::size_t>(rank)]->parts;
    if (deferred.pass) {
      PassResult result = parts.EndPass(deferred.id);
      OnServer(rank, [&](ServerMachine& server, Outputs& out) {
        server.OnPassed(now, deferred.id, std::move(result), out);
      });
    } else {
      parts.EndUpdate(deferred.id);
      OnServer(rank, [&](ServerMachine& server, Outputs& out) {
        server.OnUpdated(now, deferred.id, nullptr, out);
      });
    }
  }

  // Faults.

  void Cut() {
    const NodeId worker = WorkerNode(random_.Between(0, plan_.workers - 1));
    const NodeId server = ServerNode(random_.Between(0, plan_.servers - 1));
    network_.Cut(worker, server, microseconds(random_.Between(1, 5000)));
  }

  // What an earlier process of a rank sent arrives late: with another incarnation, other numbers
  // and values of its own.
  void SendGhost() {
    const std::int32_t rank = random_.Between(0, plan_.workers - 1);
    const Worker& worker = *workers_[static_cast<std::size_t>(rank)];
    if (!worker.spied) return;
    Message ghost = *worker.spied;
    ghost.incarnation = 0xdead;
    ghost.sequence += random_.Below(3);
    ghost.kind = random_.Chance(700) ? Kind::kPush : Kind::kPull;
    ghost.payload = PayloadOf({1, 2, 3});
    const std::int32_t key = (static_cast<std::int32_t>(ghost.part.key) - 1) * plan_.ArrayKeys() +
                             static_cast<std::int32_t>(ghost.part.part);
    network_.Send(WorkerNode(rank), ServerNode(ServerOf(key)), std::move(ghost));
  }

  // The scheduler's part: barriers by identity, and who has left.

  void OnHub(std::int32_t rank, const Message& message) {
    hub_.resize(static_cast<std::size_t>(plan_.workers));
    std::uint64_t& come = hub_[static_cast<std::size_t>(rank)];
    if (message.kind == Kind::kLeaveJob || (message.flags & kFlagLast) != 0) {
      come = kNoMoreBarriers;
    } else if (message.kind == Kind::kBarrier) {
      come = std::max(come, message.sequence + 1);
    }
    const std::uint64_t done = *std::min_element(hub_.begin(), hub_.end());
    if (done > hub_done_) {
      hub_done_ = done;
      for (std::int32_t to = 0; to < plan_.workers; ++to) SendBarrierDone(to);
    } else if (message.kind == Kind::kBarrier && message.sequence < hub_done_) {
      SendBarrierDone(rank);
    }
  }
  void SendBarrierDone(std::int32_t rank) {
    if (hub_done_ == kNoMoreBarriers) return;
    network_.Send(kHub, WorkerNode(rank), {.kind = Kind::kBarrierDone, .sequence = hub_done_ - 1});
  }

  // What workers see.

  void OnAnswer(std::int32_t rank, Answer& answer) {
    Worker& worker = *workers_[static_cast<std::size_t>(rank)];
    if (answer.token >= worker.asked.size() || worker.asked[answer.token].ended) {
      Fail(fmt::format("worker {}: an answer to nothing, token {}", rank, answer.token));
      return;
    }
    Asked& asked = worker.asked[answer.token];
    asked.ended = true;
    --worker.open;
    const Step& step = asked.step;
    if (step.kind == Step::Kind::kPush) --worker.open_pushes;
    std::string error;
    if (answer.error) {
      try {
        std::rethrow_exception(answer.error);
      } catch (const std::exception& exception) {
        error = exception.what();
      }
    }
    if (step.kind == Step::Kind::kPull || step.kind == Step::Kind::kPushPull) {
      CheckValue(rank, answer.token, error, answer.message);
    } else if (!error.empty()) {
      Fail(
          fmt::format("worker {}: push {} of key {} failed: {}", rank, step.push, step.key, error));
    }
    if (step.kind == Step::Kind::kBarrier) CheckBarrier(rank);
    if (step.kind == Step::Kind::kLeave) {
      ++left_;
      OnHub(rank, {.kind = Kind::kLeaveJob});  // a node says it until the scheduler has heard it
    }
  }

  void CheckValue(std::int32_t rank, std::uint64_t token, const std::string& error,
                  const Message& message) {
    Worker& worker = *workers_[static_cast<std::size_t>(rank)];
    const Step& step = worker.asked[token].step;
    const std::string what =
        fmt::format("worker {}: pull of key {} after push {}", rank, step.key, step.push);
    const std::vector<std::int64_t> values = ValuesOf(message.payload);
    if (plan_.async) {
      if (!error.empty() || values.size() != kElements) {
        Fail(fmt::format("{}: {}", what, error));
      } else {
        const Value value{values[0], values[1], values[2]};
        CheckAsync(rank, step, what, value);
        worker.pulled[static_cast<std::size_t>(step.key)][token] = value;
      }
      return;
    }
    const Model::Round& expected = model_.At(step.key, step.push);
    if (expected.failed_rank >= 0) {
      const std::string named = fmt::format("worker {}: planned", expected.failed_rank);
      if (error.find(named) == std::string::npos) {
        Fail(fmt::format("{}: expected the error of {}, was answered '{}'", what, named, error));
      }
    } else if (!error.empty() || !std::equal(values.begin(), values.end(), expected.value.begin(),
                                             expected.value.end())) {
      Fail(fmt::format("{}: expected {}, was answered {} {}", what, fmt::join(expected.value, " "),
                       fmt::join(values, " "), error));
    }
  }

  // A value of dist_async is made of the first pushes of each rank, each once, and of this rank's
  // all that came before.
  void CheckAsync(std::int32_t rank, const Step& step, const std::string& what,
                  const Value& value) {
    Value sum{step.key, 0, 0};
    for (std::int32_t other = 0; other < plan_.workers; ++other) {
      const std::int64_t count = Field(value[1], other);
      if (count > plan_.Pushes(other, step.key) || (other == rank && count != step.push)) {
        Fail(fmt::format("{}: has {} pushes of worker {}", what, count, other));
        return;
      }
      for (int push = 1; push <= count; ++push) {
        const Value pushed = Pushed(plan_.seed, other, step.key, push);
        for (std::size_t i = 0; i < kElements; ++i) sum[i] += pushed[i];
      }
    }
    if (sum != value) {
      Fail(fmt::format("{}: {} is not the sum of each worker's first pushes, {}", what,
                       fmt::join(value, " "), fmt::join(sum, " ")));
    }
  }
  static std::int64_t Field(std::int64_t value, std::int32_t rank) {
    return value >> (kBits * rank) & ((1 << kBits) - 1);
  }

  // Everyone has called it, or has left; and nothing that was pushed before it is open.
  void CheckBarrier(std::int32_t rank) {
    const Worker& worker = *workers_[static_cast<std::size_t>(rank)];
    for (std::int32_t other = 0; other < plan_.workers; ++other) {
      const Worker& that = *workers_[static_cast<std::size_t>(other)];
      const bool here = that.barriers >= worker.barriers;
      const bool leaves = that.at == that.steps.size() || that.calls_no_more;
      // Programs wait in their barriers, so all that is open was pushed before; and in their last.
      const bool all_are_before = here ? that.barriers == worker.barriers && Waits(that) : true;
      const bool open = all_are_before && that.open_pushes > 0;
      if ((here || leaves) && !open) continue;
      Fail(
          fmt::format("worker {}: barrier {} is done, but worker {} has called {} and has {} "
                      "pushes open",
                      rank, worker.barriers, other, that.barriers, that.open_pushes));
    }
  }
  static bool Waits(const Worker& worker) {
    return worker.at < worker.steps.size() &&
           worker.steps[worker.at].kind == Step::Kind::kBarrier && !worker.asked.back().ended;
  }

  // dist_async: a later pull never has fewer pushes of anyone.
  void CheckMonotone(std::int32_t key) {
    for (const auto& worker : workers_) {
      Value last{};
      for (const auto& [token, value] : worker->pulled[static_cast<std::size_t>(key)]) {
        for (std::int32_t rank = 0; rank < plan_.workers; ++rank) {
          if (Field(value[1], rank) >= Field(last[1], rank)) continue;
          Fail(fmt::format("{}: key {} has lost pushes of worker {}", worker->machine.rank(), key,
                           rank));
        }
        last = value;
      }
    }
  }

  void CheckEnd() {
    for (std::int32_t key = 0; key < plan_.keys; ++key) {
      IntegerParts& parts = servers_[static_cast<std::size_t>(ServerOf(key))]->parts;
      if (plan_.removes) {
        if (parts.Has(IdOf(key))) Fail(fmt::format("at the end key {} is still there", key));
        if (plan_.async) CheckMonotone(key);
        continue;
      }
      const auto& part = parts.Last(IdOf(key));
      Value expected{key, 0, 0};
      if (plan_.async) {
        CheckMonotone(key);
        for (std::int32_t rank = 0; rank < plan_.workers; ++rank) {
          for (int push = 1; push <= plan_.Pushes(rank, key); ++push) {
            const Value pushed = Pushed(plan_.seed, rank, key, push);
            for (std::size_t i = 0; i < kElements; ++i) expected[i] += pushed[i];
          }
        }
      } else {
        expected = model_.At(key, plan_.RoundsOf(key)).value;
      }
      if (std::equal(part.value.begin(), part.value.end(), expected.begin(), expected.end())) {
        continue;
      }
      Fail(fmt::format("at the end key {} is {}, expected {}", key, fmt::join(part.value, " "),
                       fmt::join(expected, " ")));
    }
  }

  const Plan plan_;
  const Model model_;
  SimNetwork network_;
  SimRandom random_;
  SimRandom late_random_;
  std::vector<std::unique_ptr<Server>> servers_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<Deferred> deferred_;
  std::vector<Late> late_;
  std::vector<std::uint64_t> hub_;  // barriers that each worker has come to
  std::uint64_t hub_done_ = 0;
  std::int32_t left_ = 0;
  std::string failure_;
};

}  // namespace

std::unique_ptr<ServerMachine> MakeRealServer(ServerOptions options, PartStore& parts,
                                              ServerControl& control) {
  return std::make_unique<ServerMachine>(options, parts, control);
}

ScheduleResult RunSchedule(std::uint64_t seed, const MakeServer& make_server,
                           const std::function<void(const std::string&)>& trace) {
  return Schedule(seed, make_server, trace).Run();
}

}  // namespace heddle::kvstore::dist
