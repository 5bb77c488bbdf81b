// Random programs on every engine against serial oracles, bit for bit. HEDDLE_TEST_ROUNDS makes it
// a soak test, see tools/soak.sh.
#include "tests/engine/random_program.h"

#include <heddle/engine.h>

#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/engine/support.h"

namespace heddle::engine_test {
namespace {

class RandomProgramTest : public EveryEngine {
 protected:
  // Bounds from none to tight, ageing from often to never, another seed each round.
  static EngineOptions OptionsOfRound(int round) {
    EngineOptions options = GetParam().options;
    constexpr std::int64_t kBounds[] = {1 << 20, 64, 1, 1 << 20, 7};
    constexpr int kAgeing[] = {1000, 3, 0};
    options.max_pending_ops = kBounds[round % 5];
    options.ageing = kAgeing[round % 3];
    options.seed += static_cast<std::uint64_t>(round);
    return options;
  }
  static std::string Trace(int round) {
    return "HEDDLE_TEST_SEED=" + std::to_string(BaseSeed()) + ", round " + std::to_string(round);
  }
};
INSTANTIATE_TEST_SUITE_P(All, RandomProgramTest, testing::ValuesIn(AllConfigs()), ConfigLabel);

TEST_P(RandomProgramTest, OnePushingThreadGivesTheResultsOfTheSerialOrder) {
  std::mt19937_64 random(BaseSeed());
  for (int round = 0; round < Rounds(10); ++round) {
    SCOPED_TRACE(Trace(round));
    ProgramOptions options;
    if (round % 3 == 1) options.num_vars = 30;  // few public ones: long chains
    options.waits = round % 2 == 0;
    const Program program = MakeDeterministicProgram(options, random);
    Engine engine(OptionsOfRound(round));
    const Observation observation = RunProgram(program, engine);
    ASSERT_EQ(CompareWithSerialOrder(program, observation), std::vector<std::string>());
    ASSERT_EQ(CheckSomeOrderExplains(program, observation), std::vector<std::string>());
  }
}

TEST_P(RandomProgramTest, SeveralPushingThreadsGiveTheResultsOfSomeOrderOfTheirPushes) {
  std::mt19937_64 random(BaseSeed() + 1);
  for (int round = 0; round < Rounds(8); ++round) {
    SCOPED_TRACE(Trace(round));
    ProgramOptions options;
    options.num_threads = 1 + round % 8;
    if (round % 3 == 1) options.num_vars = 5;
    options.waits = round % 2 == 0;
    const Program program = MakeFreeProgram(options, random);
    Engine engine(OptionsOfRound(round));
    const Observation observation = RunProgram(program, engine);
    ASSERT_EQ(CheckSomeOrderExplains(program, observation), std::vector<std::string>());
  }
}

// The same engine again and again: recycled ops and variables must not remember anything.
TEST_P(RandomProgramTest, OneEngineRunsManyPrograms) {
  std::mt19937_64 random(BaseSeed() + 2);
  Engine engine(OptionsOfRound(0));
  for (int round = 0; round < Rounds(20); ++round) {
    SCOPED_TRACE(Trace(round));
    ProgramOptions options;
    options.num_ops = 500;
    options.num_vars = 40;
    const Program program = MakeDeterministicProgram(options, random);
    ASSERT_EQ(CompareWithSerialOrder(program, RunProgram(program, engine)),
              std::vector<std::string>());
  }
}

}  // namespace
}  // namespace heddle::engine_test
