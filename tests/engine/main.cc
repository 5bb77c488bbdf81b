// main() of the engine tests. Environment:
//   HEDDLE_TEST_PIN=1       the whole suite runs on one CPU
//   HEDDLE_TEST_WORKERS=n   threaded engines with n workers only
//   HEDDLE_TEST_SEED=n      seed of the randomised tests; drawn and printed otherwise
//   HEDDLE_TEST_ROUNDS=n    n times as many seeds and longer runs (tools/soak.sh)
#include <cstdio>
#include <cstdlib>

#include <gtest/gtest.h>

#include "tests/engine/support.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (std::getenv("HEDDLE_TEST_PIN") != nullptr) heddle::engine_test::PinToOneCpu();
  std::printf("HEDDLE_TEST_SEED=%llu\n",
              static_cast<unsigned long long>(heddle::engine_test::BaseSeed()));
  return RUN_ALL_TESTS();
}
