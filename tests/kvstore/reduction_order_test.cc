// Orders of reduction over link matrices: machines as they are built, and random ones against an
// exhaustive search for the widest ways.
#include "kvstore/reduction_order.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <set>
#include <vector>

#include <gtest/gtest.h>

namespace heddle::kvstore {
namespace {

constexpr double kGb = 1e9;
constexpr std::int64_t kLarge = std::int64_t{256} << 20;
constexpr std::int64_t kSmall = 4096;

// Two sockets with four devices each: 25 GB/s inside, 10 GB/s through the host between them.
LinkMatrix TwoSockets() {
  LinkMatrix links(8, 10 * kGb);
  for (std::size_t a = 0; a < 8; ++a) {
    for (std::size_t b = a + 1; b < 8; ++b) {
      if (a / 4 == b / 4) links.Set(a, b, 25 * kGb);
    }
  }
  return links;
}

// Every device's value is added once, after it is complete, and the last step is the root's.
void ExpectComplete(const ReductionOrder& order, std::size_t devices, std::size_t root) {
  ASSERT_FALSE(order.empty());
  EXPECT_EQ(order.back().device, root);
  std::set<std::size_t> summed;  // whose steps have run
  std::set<std::size_t> sent;    // whose sums have gone on
  for (const ReductionStep& step : order) {
    EXPECT_TRUE(std::is_sorted(step.inputs.begin(), step.inputs.end()));
    EXPECT_TRUE(std::binary_search(step.inputs.begin(), step.inputs.end(), step.device));
    EXPECT_TRUE(summed.insert(step.device).second) << "a second step of " << step.device;
    EXPECT_FALSE(sent.contains(step.device)) << step.device << " adds after it was read";
    for (std::size_t input : step.inputs) {
      if (input != step.device) {
        EXPECT_TRUE(sent.insert(input).second) << input << " is added twice";
      }
    }
  }
  EXPECT_EQ(sent.size(), devices - 1);
  EXPECT_FALSE(sent.contains(root));
}

TEST(ReductionOrder, EqualLinksAreTheOrderOfTheList) {
  LinkMatrix links(4, 12 * kGb);
  for (std::size_t a = 0; a < 4; ++a) {
    for (std::size_t b = a + 1; b < 4; ++b) links.Set(a, b, 450 * kGb);
  }
  const ReductionOrder direct = {{.device = 2, .inputs = {0, 1, 2, 3}}};
  EXPECT_EQ(DirectOrder(4, 2), direct);
  EXPECT_EQ(TreeOrder(links, 2), direct);
  EXPECT_EQ(PlanReduction(links, 2, kLarge), direct);
  EXPECT_EQ(PlanReduction(LinkMatrix(4, 12 * kGb), 2, kLarge), direct);  // no links at all
}

TEST(ReductionOrder, OneDeviceHasNothingToAdd) {
  EXPECT_TRUE(PlanReduction(LinkMatrix(1, kGb), 0, kLarge).empty());
  EXPECT_EQ(EstimateSeconds(LinkMatrix(1, kGb), {}, kLarge), 0);
}

TEST(ReductionOrder, OneSumCrossesBetweenTheSockets) {
  const ReductionOrder expected = {{.device = 0, .inputs = {0, 1, 2, 3}},
                                   {.device = 5, .inputs = {0, 4, 5, 6, 7}}};
  EXPECT_EQ(TreeOrder(TwoSockets(), 5), expected);
  EXPECT_EQ(PlanReduction(TwoSockets(), 5, kLarge), expected);
}

TEST(ReductionOrder, SmallValuesGoAtOnce) {
  EXPECT_EQ(PlanReduction(TwoSockets(), 5, kSmall), DirectOrder(8, 5));
}

// Four devices in a row with fast links between neighbours.
TEST(ReductionOrder, AChainIsFollowedToItsEnd) {
  LinkMatrix links(4, 5 * kGb);
  links.Set(0, 1, 50 * kGb);
  links.Set(1, 2, 50 * kGb);
  links.Set(2, 3, 50 * kGb);
  EXPECT_EQ(TreeOrder(links, 0), (ReductionOrder{{.device = 2, .inputs = {2, 3}},
                                                 {.device = 1, .inputs = {1, 2}},
                                                 {.device = 0, .inputs = {0, 1}}}));
}

TEST(ReductionOrder, EstimatesByTheModel) {
  // 0.25e9 bytes: 10 ms at 25 GB/s, 25 ms at 10 GB/s, of which the direct order has four in a row.
  const std::int64_t bytes = 250'000'000;
  EXPECT_NEAR(EstimateSeconds(TwoSockets(), DirectOrder(8, 5), bytes), kReductionStepSeconds + 0.1,
              1e-9);
  EXPECT_NEAR(EstimateSeconds(TwoSockets(), TreeOrder(TwoSockets(), 5), bytes),
              2 * kReductionStepSeconds + 0.01 + 0.025, 1e-9);
}

// The widest way between any two devices: the narrowest of its links is as wide as can be.
std::vector<double> WidestWays(const LinkMatrix& links) {
  const std::size_t n = links.devices();
  std::vector<double> width(n * n);
  for (std::size_t a = 0; a < n; ++a) {
    for (std::size_t b = 0; b < n; ++b) width[a * n + b] = links(a, b);
  }
  for (std::size_t via = 0; via < n; ++via) {
    for (std::size_t a = 0; a < n; ++a) {
      for (std::size_t b = 0; b < n; ++b) {
        width[a * n + b] =
            std::max(width[a * n + b], std::min(width[a * n + via], width[via * n + b]));
      }
    }
  }
  return width;
}

TEST(ReductionOrder, RandomLinksEveryValueTakesAWidestWay) {
  const char* text = std::getenv("HEDDLE_TEST_SEED");
  const std::uint64_t seed =
      text != nullptr ? std::strtoull(text, nullptr, 10) : std::random_device()();
  SCOPED_TRACE("HEDDLE_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 500; ++round) {
    const std::size_t n = 2 + random() % 15;
    const std::size_t root = random() % n;
    LinkMatrix links(n, kGb);
    for (std::size_t a = 0; a < n; ++a) {
      for (std::size_t b = a + 1; b < n; ++b) {
        if (random() % 2 == 0) links.Set(a, b, kGb * static_cast<double>(1 + random() % 4));
      }
    }
    const ReductionOrder tree = TreeOrder(links, root);
    ExpectComplete(tree, n, root);
    std::vector<double> width(n, 0);  // of the way from each device to the root
    width[root] = 100 * kGb;
    for (auto step = tree.rbegin(); step != tree.rend(); ++step) {  // from the root outwards
      for (std::size_t input : step->inputs) {
        if (input == step->device) continue;
        width[input] = std::min(width[step->device], links(input, step->device));
      }
    }
    const std::vector<double> widest = WidestWays(links);
    for (std::size_t device = 0; device < n; ++device) {
      if (device != root) {
        EXPECT_EQ(width[device], widest[device * n + root]) << device;
      }
    }
    const auto bytes = static_cast<std::int64_t>(random() % 100'000'000);
    const ReductionOrder plan = PlanReduction(links, root, bytes);
    ExpectComplete(plan, n, root);
    EXPECT_EQ(EstimateSeconds(links, plan, bytes),
              std::min(EstimateSeconds(links, tree, bytes),
                       EstimateSeconds(links, DirectOrder(n, root), bytes)));
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace heddle::kvstore
