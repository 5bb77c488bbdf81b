// Goal: whatever single messages and links do, workers see what the contract says. Method: seeded
// schedules of faults over the simulated network, checked against a model (schedule.h); and the
// proof that the check sees: servers that do not deduplicate, order or know incarnations are found
// out.
//
// HEDDLE_TEST_SEED=<n> begins at that seed, HEDDLE_TEST_SCHEDULES=<n> runs so many.
#include "tests/kvstore/dist/schedule.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>

#include <gtest/gtest.h>

namespace heddle::kvstore::dist {
namespace {

constexpr int kShards = 10;
constexpr std::uint64_t kSchedules = HEDDLE_SCHEDULES;  // of all shards

std::uint64_t FromEnvironment(const char* name, std::uint64_t otherwise) {
  const char* given = std::getenv(name);
  return given != nullptr ? std::strtoull(given, nullptr, 10) : otherwise;
}

// Runs it once more, with every message.
std::string Report(std::uint64_t seed, const ScheduleResult& result) {
  std::string text = "HEDDLE_TEST_SEED=" + std::to_string(seed) + "\n" + result.plan + "\n";
  const ScheduleResult again =
      RunSchedule(seed, MakeRealServer, [&](const std::string& line) { text += line + "\n"; });
  EXPECT_EQ(again.failure, result.failure) << "the same seed, another run";
  return text + result.failure;
}

class Schedules : public testing::TestWithParam<int> {};

TEST_P(Schedules, WorkersSeeWhatTheModelSays) {
  const std::uint64_t fresh = (std::uint64_t{std::random_device()()} << 32) +
                              static_cast<std::uint64_t>(GetParam()) * kSchedules;
  const std::uint64_t first = FromEnvironment("HEDDLE_TEST_SEED", fresh);
  const std::uint64_t count = FromEnvironment("HEDDLE_TEST_SCHEDULES", kSchedules / kShards);
  std::printf("HEDDLE_TEST_SEED=%llu\n", static_cast<unsigned long long>(first));
  std::uint64_t messages = 0;
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    const ScheduleResult result = RunSchedule(seed);
    messages += result.messages;
    ASSERT_GT(result.faults, 0);
    ASSERT_EQ(result.failure, "") << Report(seed, result);
  }
  std::printf("%llu schedules, %llu messages\n", static_cast<unsigned long long>(count),
              static_cast<unsigned long long>(messages));
}
INSTANTIATE_TEST_SUITE_P(All, Schedules, testing::Range(0, kShards));

TEST(Schedule, TheSameSeedIsTheSameRun) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    std::string first;
    std::string second;
    RunSchedule(seed, MakeRealServer, [&](const std::string& line) { first += line; });
    RunSchedule(seed, MakeRealServer, [&](const std::string& line) { second += line; });
    EXPECT_EQ(first, second) << "seed " << seed;
    EXPECT_FALSE(first.empty());
  }
}

// Servers that lack one of the three checks.
enum class Lack : std::uint8_t { kDeduplication, kOrder, kIncarnations };

template <Lack lack>
class MutantServer : public ServerMachine {
 public:
  using ServerMachine::ServerMachine;

 protected:
  Admission Admit(const Message& message, Incarnation known, std::uint64_t next) const override {
    const bool stale_passes = lack == Lack::kIncarnations;
    const Admission real =
        ServerMachine::Admit(message, stale_passes ? message.incarnation : known, next);
    if (lack == Lack::kDeduplication && real == Admission::kRepeated) return Admission::kTake;
    if (lack == Lack::kOrder && real == Admission::kEarly) return Admission::kTake;
    return real;
  }
};

// Servers that take another server's sums for those of whatever pass, or round, comes first.
template <bool knows_round>
class SumsMutantServer : public ServerMachine {
 public:
  using ServerMachine::ServerMachine;

 protected:
  RoundPass PassOf(const Message& sums) const override {
    RoundPass at = ServerMachine::PassOf(sums);
    if (knows_round) {
      at.pass = 0;
    } else {
      at.round = 1;
    }
    return at;
  }
};

// The number of schedules until the mutant is found out.
template <class Mutant>
std::uint64_t SchedulesUntilSeen() {
  const MakeServer make = [](ServerOptions options, PartStore& parts, ServerControl& control) {
    return std::make_unique<Mutant>(options, parts, control);
  };
  const std::uint64_t first = std::random_device()();
  std::printf("HEDDLE_TEST_SEED=%llu\n", static_cast<unsigned long long>(first));
  std::uint64_t count = 1;
  while (count <= 1000 && RunSchedule(first + count, make).failure.empty()) ++count;
  std::printf("seen after %llu schedules\n", static_cast<unsigned long long>(count));
  return count;
}

TEST(Schedule, SeesAServerThatDoesNotDeduplicate) {
  EXPECT_LE(SchedulesUntilSeen<MutantServer<Lack::kDeduplication>>(), 1000u);
}
TEST(Schedule, SeesAServerThatDoesNotOrder) {
  EXPECT_LE(SchedulesUntilSeen<MutantServer<Lack::kOrder>>(), 1000u);
}
TEST(Schedule, SeesAServerThatDoesNotKnowIncarnations) {
  EXPECT_LE(SchedulesUntilSeen<MutantServer<Lack::kIncarnations>>(), 1000u);
}

TEST(Schedule, SeesAServerThatDoesNotTellPassesApart) {
  EXPECT_LE(SchedulesUntilSeen<SumsMutantServer<true>>(), 1000u);
}
TEST(Schedule, SeesAServerThatDoesNotTellRoundsOfSumsApart) {
  EXPECT_LE(SchedulesUntilSeen<SumsMutantServer<false>>(), 1000u);
}

}  // namespace
}  // namespace heddle::kvstore::dist
