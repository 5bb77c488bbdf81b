// Goal: whatever a few endpoints send one another, in whatever way they receive it, all arrives
// whole, once, and in order where order is promised; and when connections are cut, what arrived
// until then is right, and both ends learn of it.
// Method: every message is made from (sender, receiver, number) by a seed, so a receiver knows what
// it must be.
#include <algorithm>
#include <atomic>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kvstore/dist/cutting_proxy.h"
#include "tests/kvstore/dist/random_bodies.h"
#include "tests/kvstore/dist/tcp_node.h"
#include "tests/sanitized.h"
#include "tools/testing/test_certificates.h"

namespace heddle::kvstore::dist_test {
namespace {

using namespace dist;  // NOLINT(google-build-using-namespace)
using tools::TestCertificates;
using Random = std::mt19937_64;

struct Job {
  std::uint64_t seed;
  int nodes;
  int messages;        // from each node to each other one
  int threads;         // that send, of each node
  bool same_priority;  // then messages of a connection keep their order
  std::size_t bytes_max;
  TlsOptions tls = {};
  Cuts cuts = {};
  std::chrono::milliseconds cut_limit = std::chrono::minutes(10);
};

// Most are small, some medium, a few long.
std::size_t RandomSize(Random& random, std::size_t bytes_max) {
  switch (random() % 8) {
    case 0:
      return 0;
    case 1:
    case 2:
    case 3:
      return random() % 600;
    case 4:
    case 5:
      return random() % (6 << 10);
    case 6:
      return random() % (100 << 10);
    default:
      return random() % bytes_max;
  }
}

Random RandomOf(const Job& job, int from, int to, std::uint64_t number) {
  std::seed_seq seeds{job.seed, std::uint64_t{1} + from, std::uint64_t{1} + to, number};
  return Random(seeds);
}

// Which sending thread it is from is in `version`, its number there in `sequence`.
Message MakeMessage(const Job& job, int from, int to, std::uint64_t number) {
  Random random = RandomOf(job, from, to, number);
  Message message;
  message.kind = Kind::kPush;
  message.rank = from;
  message.sequence = number;
  message.version = number % job.threads;
  message.priority = job.same_priority ? 3 : static_cast<std::int32_t>(random() % 5);
  message.meta.assign(random() % 4 == 0 ? random() % 300 : 0, static_cast<char>(random()));
  std::string text(RandomSize(random, job.bytes_max), '\0');
  for (std::size_t i = 0; i < text.size(); i += 1 + random() % 1000) {
    text[i] = static_cast<char>(random());
  }
  auto owner = std::make_shared<const std::string>(std::move(text));
  std::vector<std::span<const std::byte>> runs;
  const std::size_t run_bytes = 1 + random() % (owner->size() + 1);
  for (std::size_t at = 0; at < owner->size(); at += run_bytes) {
    if (runs.size() == 50) {
      runs.push_back(std::as_bytes(std::span(*owner).subspan(at)));
      break;
    }
    runs.push_back(
        std::as_bytes(std::span(*owner).subspan(at, std::min(run_bytes, owner->size() - at))));
  }
  message.payload = Payload(owner, std::move(runs));
  return message;
}

// Checks as messages come, and forgets them.
class Checker : public TransportEvents {
 public:
  Checker(const Job& job, int self, TcpOptions options, const Cuts& cuts,
          std::atomic<int>& cut_count)
      : job_(job), self_(self), transport(TcpTransport::Create(std::move(options), *this)) {
    if (cuts.count > 0) transport = ThroughProxies(std::move(transport), cuts, cut_count);
  }
  ~Checker() override { transport->Close(); }

  std::shared_ptr<Landing> OnHeader(NodeId, const Message& header, std::uint64_t bytes) override {
    const std::uint64_t dice = header.sequence * 2654435761u >> 7;
    if (dice % 3 == 0) return nullptr;
    return std::make_shared<TestLanding>(bytes, dice % 3 == 1 ? bytes : 1 + bytes / 30);
  }
  void OnMessage(NodeId from, Message&& message) override {
    const Message wanted = MakeMessage(job_, message.rank, self_, message.sequence);
    const std::lock_guard lock(mutex_);
    EXPECT_EQ(from.rank, message.rank);
    EXPECT_TRUE(seen_.emplace(from.rank, message.sequence).second) << "twice";
    EXPECT_EQ(message.version, wanted.version);
    EXPECT_EQ(message.priority, wanted.priority);
    EXPECT_EQ(message.meta, wanted.meta);
    EXPECT_TRUE(TextOf(message.payload) == TextOf(wanted.payload))
        << "message " << message.sequence << " of node " << message.rank;
    if (job_.same_priority) {
      const bool bulk =
          message.meta.size() + message.payload.bytes() > TcpTransport::kUrgentBytesMax;
      std::int64_t& last = last_.try_emplace({from.rank, message.version, bulk}, -1).first->second;
      EXPECT_LT(last, static_cast<std::int64_t>(message.sequence)) << "out of order";
      last = static_cast<std::int64_t>(message.sequence);
    }
    ++count;
  }
  void OnLost(NodeId peer, const std::string& address, const std::string& why) override {
    EXPECT_FALSE(address.empty());
    EXPECT_FALSE(why.empty());
    const std::lock_guard lock(mutex_);
    EXPECT_TRUE(lost_.insert(peer).second) << "lost twice";
    ++losses;
  }
  bool Lost(NodeId peer) {
    const std::lock_guard lock(mutex_);
    return lost_.contains(peer);
  }

  std::atomic<int> count{0};
  std::atomic<int> losses{0};

 private:
  const Job job_;
  const int self_;
  std::mutex mutex_;
  std::set<std::pair<std::int32_t, std::uint64_t>> seen_;
  std::map<std::tuple<std::int32_t, std::uint64_t, bool>, std::int64_t> last_;
  std::set<NodeId> lost_;

 public:
  std::unique_ptr<Transport> transport;  // last: it calls the above
};

NodeId NodeOf(int index) { return {Role::kServer, index}; }

// All connected to one another.
std::vector<std::unique_ptr<Checker>> MakeNodes(const Job& job, Random& random,
                                                std::atomic<int>& cut_count) {
  std::vector<std::unique_ptr<Checker>> nodes;
  for (int i = 0; i < job.nodes; ++i) {
    TcpOptions options = OptionsOf(NodeOf(i));
    // One at least has a thread, or nobody would accept.
    options.reception = i == 0 || random() % 2 == 0 ? Reception::kThread : Reception::kCallersFirst;
    options.io_threads = 1 + static_cast<int>(random() % 2);
    options.spin = std::chrono::microseconds(random() % 3 == 0 ? 20 : 0);
    options.bulk_link = random() % 4 != 0;
    options.tls = job.tls;
    if (job.tls.enabled() || job.cuts.count > 0) options.shared_memory = false;
    Cuts cuts = job.cuts;
    cuts.seed = random();
    options.cut_limit = job.cut_limit;
    nodes.push_back(std::make_unique<Checker>(job, i, options, cuts, cut_count));
  }
  for (int i = 0; i < job.nodes; ++i) {
    for (int j = 0; j < i; ++j) {
      nodes[i]->transport->Connect(NodeOf(j), nodes[j]->transport->address(), Long());
    }
  }
  return nodes;
}

void SendAll(const Job& job, std::vector<std::unique_ptr<Checker>>& nodes, int from, int thread) {
  for (int number = thread; number < job.messages; number += job.threads) {
    for (int to = 0; to < job.nodes; ++to) {
      if (to == from) continue;
      nodes[from]->transport->Send(NodeOf(to), MakeMessage(job, from, to, number));
    }
    if (number % 97 == 0) nodes[from]->transport->Flush();
  }
  nodes[from]->transport->Flush();
}

// Returns how often connections were cut.
int RunJob(const Job& job, Random& random) {
  std::atomic<int> cut_count = 0;
  auto nodes = MakeNodes(job, random, cut_count);
  std::vector<std::thread> threads;
  std::atomic<bool> done = false;
  const int wanted = (job.nodes - 1) * job.messages;
  for (int i = 0; i < job.nodes; ++i) {
    for (int t = 0; t < job.threads; ++t) {
      threads.emplace_back([&, i, t] { SendAll(job, nodes, i, t); });
    }
    if (random() % 2 == 0) continue;  // its own thread will do
    threads.emplace_back([&, i] {
      while (!done) {
        if (!nodes[i]->transport->RunOne(In(std::chrono::milliseconds(2)))) {
          std::this_thread::yield();
        }
      }
    });
  }
  const auto until = Long();
  for (const auto& node : nodes) {
    while (node->count < wanted && TestClock::now() < until) std::this_thread::yield();
    EXPECT_EQ(node->count, wanted);
  }
  done = true;
  for (auto& thread : threads) thread.join();
  for (const auto& node : nodes) EXPECT_EQ(node->losses, 0);
  nodes.clear();
  return cut_count;
}

// With TLS and without.
class TcpRandom : public testing::TestWithParam<bool> {
 protected:
  TcpRandom() {
    if (GetParam()) tls_ = TestCertificates::Shared().right();
  }

  TlsOptions tls_;
};
INSTANTIATE_TEST_SUITE_P(All, TcpRandom, testing::Bool(),
                         [](const auto& info) { return info.param ? "Tls" : "Plain"; });

TEST_P(TcpRandom, AMixOfMessagesArrivesWholeAndOnce) {
  Random random(TestSeed());
  for (int i = 0; i < (GetParam() || kSanitized ? 2 : 6); ++i) {
    RunJob({.seed = random(),
            .nodes = 3 + static_cast<int>(random() % 3),
            .messages = kSanitized ? 60 : 150,
            .threads = 1 + static_cast<int>(random() % 2),
            .same_priority = i % 2 == 0,
            .bytes_max = std::size_t{1} << 20,
            .tls = tls_},
           random);
  }
}

TEST_P(TcpRandom, LongMessagesBothWaysDoNotBlockOneAnother) {
  Random random(TestSeed());
  RunJob({.seed = random(),
          .nodes = 3,
          .messages = kSanitized ? 15 : 40,
          .threads = 2,
          .same_priority = false,
          .bytes_max = std::size_t{12} << 20,
          .tls = tls_},
         random);
}

// Connections are reset after any number of bytes, those of handshakes included.
TEST_P(TcpRandom, WhereConnectionsAreCutNothingIsLostOrDoubled) {
  Random random(TestSeed());
  int cuts = 0;
  for (int i = 0; i < 3; ++i) {
    cuts += RunJob({.seed = random(),
                    .nodes = 2 + i % 2,
                    .messages = 150,
                    .threads = 1 + i % 2,
                    .same_priority = i % 2 == 0,
                    .bytes_max = std::size_t{1} << 20,
                    .tls = tls_,
                    .cuts = {.bytes_max = std::uint64_t{1} << (14 + 3 * i), .count = 40}},
                   random);
  }
  EXPECT_GE(cuts, 30);
}

// A node ends at some moment, in the midst of it all: the others lose it, and only it.
TEST_P(TcpRandom, AnEndInTheMidstIsToldToAll) {
  Random random(TestSeed());
  for (int i = 0; i < (GetParam() || kSanitized ? 2 : 5); ++i) {
    const Job job{.seed = random(),
                  .nodes = 4,
                  .messages = kSanitized ? 50 : 100,
                  .threads = 1,
                  .same_priority = true,
                  .bytes_max = std::size_t{1} << 20,
                  .tls = tls_,
                  // What Close has not sent within its second looks like a connection that is cut.
                  .cut_limit = std::chrono::seconds(2)};
    std::atomic<int> no_cuts = 0;
    auto nodes = MakeNodes(job, random, no_cuts);
    std::vector<std::thread> threads;
    for (int n = 0; n < job.nodes; ++n) {
      threads.emplace_back([&, n] { SendAll(job, nodes, n, 0); });
    }
    const int victim = static_cast<int>(random() % job.nodes);
    const int after = static_cast<int>(random() % (3 * job.messages));
    while (nodes[victim]->count < after) std::this_thread::yield();
    nodes[victim]->transport->Close();
    const auto until = Long();
    for (int n = 0; n < job.nodes; ++n) {
      if (n == victim) continue;
      while (!nodes[n]->Lost(NodeOf(victim)) && TestClock::now() < until) {
        std::this_thread::yield();
      }
      EXPECT_TRUE(nodes[n]->Lost(NodeOf(victim)));
      while (nodes[n]->count < 2 * job.messages && TestClock::now() < until) {
        std::this_thread::yield();
      }
      EXPECT_GE(nodes[n]->count, 2 * job.messages);
      EXPECT_EQ(nodes[n]->losses, 1);
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(nodes[victim]->losses, 0);
  }
}

}  // namespace
}  // namespace heddle::kvstore::dist_test
