// Whole jobs of scheduler and members in virtual time, with messages that are delayed, overtaken,
// repeated and lost, and with nodes that die. The model below knows only what nodes have said and
// when; whatever the network does:
//   - ranks are unique, wanted ranks are kept, all rosters of a role are equal;
//   - a barrier is done for a worker only after every worker has come to it or left;
//   - without a fault the job ends well for all;
//   - with one, every survivor hears of it in time, and all of the same node: the one that died, or
//     has not come by the start's deadline.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/protocol/member.h"
#include "kvstore/dist/protocol/scheduler.h"
#include "tests/kvstore/dist/random_bodies.h"

namespace heddle::kvstore::dist_test {
namespace {

using namespace dist;  // NOLINT(google-build-using-namespace)
using std::chrono::milliseconds;
using std::chrono::seconds;

// kSilent: connections stay, nothing is said. kAbsent: never comes.
enum class Fault { kNone, kKilled, kSilent, kAbsent };

struct JobOptions {
  std::int32_t workers = 1;
  std::int32_t servers = 1;
  std::uint64_t barriers = 5;
  double lost = 0;      // of 1
  double repeated = 0;  // of 1
  Time delay_max = milliseconds(20);
  Fault fault = Fault::kNone;
};

class Job {
 public:
  Job(Random& random, const JobOptions& options) : random_(random), options_(options) {
    SchedulerOptions scheduler;
    scheduler.num_workers = options.workers;
    scheduler.num_servers = options.servers;
    // On links that lose messages three heartbeats may well be lost in a row.
    dead_after_ = options.lost > 0 ? Time(seconds(60)) : Time(seconds(3));
    scheduler.dead_after = dead_after_;
    scheduler.linger = seconds(10);
    scheduler.start_timeout = kStartTimeout;
    scheduler_ = std::make_unique<SchedulerMachine>(now_, scheduler);
    const int count = options.workers + options.servers;
    std::vector<std::int32_t> free_ranks[2];
    for (std::int32_t i = 0; i < options.workers; ++i) free_ranks[0].push_back(i);
    for (std::int32_t i = 0; i < options.servers; ++i) free_ranks[1].push_back(i);
    for (int i = 0; i < count; ++i) {
      const bool worker = i < options.workers;
      auto& ranks = free_ranks[worker ? 0 : 1];
      std::shuffle(ranks.begin(), ranks.end(), random_);
      Node& node = nodes_.emplace_back();
      node.provisional = {worker ? Role::kWorker : Role::kServer, -2 - i};
      node.name = node.provisional;
      node.starts = now_ + Random0To(seconds(5));
      MemberOptions member;
      member.join = {node.provisional.role, -1,
                     random_() | 1,         "10.0.0." + std::to_string(i),
                     options.workers,       options.servers};
      if (Below(random_, 2) == 0) {  // wants a rank
        member.join.rank = ranks.back();
        ranks.pop_back();
      }
      member.dead_after = dead_after_;
      member.start_timeout = kStartTimeout;
      node.wanted = member.join.rank;
      node.address = member.join.address;
      node.member = std::make_unique<Member>(member);
    }
    // Those that want no rank must leave room for those that do: any set of wants does.
    if (options.fault != Fault::kNone) {
      victim_ = Below(random_, count);
      strikes_ = now_ + seconds(6) + Random0To(seconds(6));
      nodes_[*victim_].dead = options.fault == Fault::kAbsent;
    }
  }

  void Run() {
    const Time end = now_ + seconds(600);
    while (now_ < end && !Over()) {
      Step();
      if (testing::Test::HasFailure()) return;
    }
    EXPECT_TRUE(Over()) << scheduler_->DescribeState(now_);
    Check();
  }

 private:
  struct Node {
    NodeId provisional, name;  // as the network knows it
    std::int32_t wanted = -1;
    std::string address;
    Time starts{0};
    std::unique_ptr<Member> member;
    bool joined = false, dead = false, roster_seen = false;
    // Of a worker, what the model knows.
    std::uint64_t come = 0;  // barriers that it has said to have come to
    std::uint64_t done = 0;  // and of which it has heard that they are done
    bool left = false;       // has said so
    Time acts{0}, resends{0};
    std::optional<Time> failed_at;
  };
  struct InFlight {
    std::size_t node;  // the one that is not the scheduler
    bool to_scheduler;
    NodeId from;
    Message message;
  };

  static constexpr Time kBegin = seconds(100);
  static constexpr Time kStartTimeout = seconds(60);

  Time Random0To(Time most) {
    return Time(
        static_cast<Time::rep>(Below(random_, static_cast<std::uint64_t>(most.count()) + 1)));
  }
  bool Chance(double probability) {
    return std::uniform_real_distribution<double>()(random_) < probability;
  }
  // A killed process is not heard of; of a silent one the network knows nothing.
  bool Alive(const Node& node) const { return !node.dead; }

  void Post(InFlight message) {
    const int copies = Chance(options_.lost) ? 0 : Chance(options_.repeated) ? 2 : 1;
    for (int i = 0; i < copies; ++i) {
      network_.emplace(now_ + milliseconds(1) + Random0To(options_.delay_max), message);
    }
  }

  void SendFromNode(std::size_t index, Outputs out) {
    for (Outgoing& each : out.messages) {
      Post({index, true, nodes_[index].name, std::move(each.message)});
    }
  }

  void SendFromScheduler(const Outputs& out) {
    for (const auto& rename : out.renames) {
      const NodeId to = rename.second;
      const auto node = std::find_if(nodes_.begin(), nodes_.end(),
                                     [&](const Node& each) { return each.name == rename.first; });
      ASSERT_NE(node, nodes_.end());
      for (const Node& other : nodes_) ASSERT_NE(other.name, to) << "a name given twice";
      node->name = to;
    }
    EXPECT_TRUE(out.disconnects.empty());
    for (const Outgoing& each : out.messages) {
      ASSERT_NE(each.message.kind, Kind::kRefused);
      if (each.message.kind == Kind::kBarrierDone) CheckBarrier(each.message.sequence);
      if (each.message.kind == Kind::kShutdown) CheckAllLeft();
      for (std::size_t i = 0; i < nodes_.size(); ++i) {
        if (nodes_[i].name == each.to) Post({i, false, {}, each.message});
      }
    }
  }

  void CheckBarrier(std::uint64_t number) {
    for (const Node& node : nodes_) {
      if (node.name.role != Role::kWorker) continue;
      ASSERT_TRUE(node.left || node.come > number)
          << "barrier " << number << " is done, but " << ToString(node.name) << " has only come to "
          << node.come;
    }
  }
  void CheckAllLeft() {
    for (const Node& node : nodes_) {
      ASSERT_TRUE(node.name.role != Role::kWorker || node.left) << "shut down too early";
    }
  }

  void Step() {
    // The earliest of: a message, a timer, something that a program does.
    Time next = now_ + seconds(1);
    if (!network_.empty()) next = std::min(next, network_.begin()->first);
    if (const auto at = scheduler_->next_time()) next = std::min(next, *at);
    for (const Node& node : nodes_) {
      if (!Alive(node)) continue;
      if (!node.joined) {
        next = std::min(next, node.starts);
      } else {
        if (const auto at = node.member->next_time()) next = std::min(next, *at);
        if (node.acts > now_) next = std::min(next, node.acts);
      }
    }
    if (victim_ && strikes_ > now_) next = std::min(next, strikes_);
    now_ = std::max(now_ + Time(1), next);

    if (victim_ && now_ >= strikes_) Strike();
    while (!network_.empty() && network_.begin()->first <= now_) {
      InFlight message = std::move(network_.begin()->second);
      network_.erase(network_.begin());
      Deliver(std::move(message));
    }
    Outputs out;
    if (const auto at = scheduler_->next_time(); at && *at <= now_) scheduler_->OnTime(now_, out);
    SendFromScheduler(out);
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (Alive(nodes_[i])) Act(i);
    }
  }

  void Strike() {
    Node& node = nodes_[*victim_];
    // One that has left, or is told to end, is no loss.
    if (node.dead || node.left || node.member->shutdown_wanted() || !node.joined) return;
    node.dead = true;
    struck_at_ = now_;
    if (options_.fault == Fault::kKilled) {
      Outputs out;
      scheduler_->OnLost(now_, node.name, node.address, "connection reset", out);
      SendFromScheduler(out);
    }
  }

  void Deliver(InFlight message) {
    Node& node = nodes_[message.node];
    if (message.to_scheduler) {
      if (struck_at_ && message.node == *victim_ && options_.fault == Fault::kKilled) return;
      Outputs out;
      scheduler_->OnMessage(now_, message.from, message.message, out);
      SendFromScheduler(out);
      return;
    }
    if (!Alive(node)) return;
    if (message.message.kind == Kind::kBarrierDone) {
      node.done = std::max(node.done, message.message.sequence + 1);
    }
    Outputs out;
    node.member->OnMessage(now_, message.message, out);
    SendFromNode(message.node, std::move(out));
  }

  // What a node's program does.
  void Act(std::size_t index) {
    Node& node = nodes_[index];
    Outputs out;
    if (!node.joined) {
      if (now_ < node.starts) return;
      node.joined = true;
      node.member->Join(now_, out);
      return SendFromNode(index, std::move(out));
    }
    if (const auto at = node.member->next_time(); at && *at <= now_) {
      node.member->OnTime(now_, out);
    }
    if (node.member->failure() && !node.failed_at) node.failed_at = now_;
    if (node.member->roster() && !node.roster_seen) {
      node.roster_seen = true;
      node.acts = now_ + Random0To(seconds(2));
    }
    if (node.roster_seen && !node.member->failure()) {
      if (node.name.role == Role::kServer) {
        if (node.member->shutdown_wanted() && !shut_down_[index]) {
          shut_down_[index] = true;
          node.member->ShutDown(out);
        }
      } else {
        ActWorker(node, out);
      }
    }
    SendFromNode(index, std::move(out));
  }

  void ActWorker(Node& node, Outputs& out) {
    if (node.left) return;
    const auto say = [&](Kind kind, std::uint64_t sequence) {
      out.Send({Role::kScheduler, 0}, {.kind = kind, .sequence = sequence});
    };
    if (node.done < node.come) {  // waits; says it again now and then, as on links that lose
      if (now_ >= node.resends) {
        node.resends = now_ + seconds(1);
        say(Kind::kBarrier, node.come - 1);
      }
      node.acts = std::max(node.acts, node.resends);
      return;
    }
    if (now_ < node.acts) return;
    node.acts = now_ + Random0To(milliseconds(500));
    // Some leave before the others.
    if (node.come < options_.barriers && !Chance(0.03)) {
      say(Kind::kBarrier, node.come++);
      node.resends = now_ + seconds(1);
      return;
    }
    node.left = true;
    say(Kind::kLeaveJob, 0);
    node.member->OnLeft(now_);
  }

  bool Over() const {
    if (!scheduler_->done()) return false;
    return std::all_of(nodes_.begin(), nodes_.end(), [&](const Node& node) {
      return node.dead || node.member->failure() || node.member->left() ||
             (node.name.role == Role::kServer && node.member->next_time() == std::nullopt);
    });
  }

  void Check() {
    std::map<Role, std::vector<NodeEntry>> rosters;
    std::set<NodeId> names;
    for (const Node& node : nodes_) {
      if (!node.member->roster()) continue;
      EXPECT_TRUE(names.insert(node.member->self()).second);
      EXPECT_EQ(node.member->self(), node.name);
      EXPECT_TRUE(node.wanted < 0 || node.member->self().rank == node.wanted);
      const std::vector<NodeEntry>& mine = node.member->roster()->nodes;
      EXPECT_EQ(mine, rosters.try_emplace(node.name.role, mine).first->second);
    }
    if (rosters.contains(Role::kServer)) {
      EXPECT_EQ(rosters[Role::kServer].size(), nodes_.size());
    }
    for (const NodeEntry& entry : rosters[Role::kWorker]) {
      EXPECT_EQ(entry.node.role, Role::kServer);
    }
    if (options_.fault == Fault::kAbsent) return CheckStartFailed();
    if (!struck_at_) {
      EXPECT_FALSE(scheduler_->failure()) << scheduler_->DescribeState(now_);
      for (const Node& node : nodes_) EXPECT_FALSE(node.member->failure());
      return;
    }
    const Node& victim = nodes_[*victim_];
    if (!scheduler_->failure()) {
      // The others had done all that they needed it for.
      EXPECT_EQ(victim.name.role, Role::kServer);
      return;
    }
    EXPECT_EQ(scheduler_->failure()->address, victim.address);
    for (const Node& node : nodes_) {
      if (node.dead || node.left) continue;
      ASSERT_TRUE(node.member->failure()) << ToString(node.name);
      EXPECT_EQ(node.member->failure()->address, victim.address);
      if (options_.lost == 0) {
        EXPECT_LE(*node.failed_at - *struck_at_, seconds(4)) << ToString(node.name);
      }
    }
  }

  // All that have come hear who has not, at the scheduler's deadline and a second later at most.
  void CheckStartFailed() {
    const bool worker = nodes_[*victim_].name.role == Role::kWorker;
    const std::string missing =
        "missing: 1 of " + (worker ? std::to_string(options_.workers) + " workers"
                                   : std::to_string(options_.servers) + " servers");
    ASSERT_TRUE(scheduler_->failure());
    EXPECT_THAT(scheduler_->failure()->why, testing::HasSubstr(missing));
    for (const Node& node : nodes_) {
      if (node.dead) continue;
      ASSERT_TRUE(node.member->failure()) << ToString(node.name);
      EXPECT_THAT(node.member->failure()->why, testing::HasSubstr(missing));
      EXPECT_GE(*node.failed_at, kBegin + kStartTimeout) << ToString(node.name);
      EXPECT_LE(*node.failed_at, kBegin + kStartTimeout + seconds(1)) << ToString(node.name);
    }
  }

  Random& random_;
  const JobOptions options_;
  Time now_ = kBegin;
  Time dead_after_{0};
  std::unique_ptr<SchedulerMachine> scheduler_;
  std::deque<Node> nodes_;
  std::multimap<Time, InFlight> network_;
  std::map<std::size_t, bool> shut_down_;
  std::optional<std::size_t> victim_;
  Time strikes_{0};
  std::optional<Time> struck_at_;
};

void RunJobs(int count, JobOptions options) {
  const std::uint64_t seed = TestSeed();
  for (int i = 0; i < count; ++i) {
    SCOPED_TRACE(testing::Message() << "HEDDLE_TEST_SEED=" << seed << ", job " << i);
    Random random(seed + static_cast<std::uint64_t>(i));
    options.workers = static_cast<std::int32_t>(1 + Below(random, 5));
    options.servers = static_cast<std::int32_t>(1 + Below(random, 3));
    Job(random, options).Run();
    if (testing::Test::HasFailure()) return;
  }
}

TEST(RandomJobs, EndWellOnAQuietNetwork) { RunJobs(300, {}); }

TEST(RandomJobs, EndWellWhenMessagesAreLateRepeatedAndOvertaken) {
  RunJobs(300, {.repeated = 0.3, .delay_max = milliseconds(700)});
}

TEST(RandomJobs, EndWellWhenMessagesAreLost) {
  RunJobs(300, {.lost = 0.2, .repeated = 0.2, .delay_max = milliseconds(300)});
}

TEST(RandomJobs, NameANodeThatIsKilled) {
  RunJobs(300, {.barriers = 1000, .repeated = 0.1, .fault = Fault::kKilled});
}

TEST(RandomJobs, NameANodeThatHasNotComeByTheDeadlineWithinASecond) {
  RunJobs(300, {.repeated = 0.1, .fault = Fault::kAbsent});
}

TEST(RandomJobs, NameANodeThatFallsSilent) {
  RunJobs(300, {.barriers = 1000, .repeated = 0.1, .fault = Fault::kSilent});
}

}  // namespace
}  // namespace heddle::kvstore::dist_test
