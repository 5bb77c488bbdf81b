// Orders of reduction over link matrices: machines as they are built, and random ones against
// exhaustive searches for the widest ways and the fastest relays.
#include "kvstore/reduction_order.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace heddle::kvstore {
namespace {

using Order = Additions;

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

// A list with one value on each device, in their order.
std::vector<std::size_t> OneEach(std::size_t devices) {
  std::vector<std::size_t> list(devices);
  std::iota(list.begin(), list.end(), std::size_t{0});
  return list;
}

// Every value is added once, every sum after it is made, and the last step is the root's.
void ExpectComplete(const ReductionOrder& order, std::size_t values, std::size_t root) {
  ASSERT_FALSE(order.empty());
  EXPECT_EQ(order.back().device, root);
  std::set<std::size_t> added;
  for (std::size_t k = 0; k < order.size(); ++k) {
    EXPECT_FALSE(order[k].inputs.empty());
    for (const std::size_t input : order[k].inputs) {
      EXPECT_LT(input, values + k) << "step " << k << " adds what is not there yet";
      EXPECT_TRUE(added.insert(input).second) << input << " is added twice";
    }
  }
  EXPECT_EQ(added.size(), values + order.size() - 1);
}

// What is added to what, in words: the sum of the first step is "((0+1)+2)".
std::string AdditionsOf(const ReductionOrder& order, std::size_t values) {
  std::vector<std::string> sums;
  for (std::size_t i = 0; i < values; ++i) sums.push_back(std::to_string(i));
  for (const ReductionStep& step : order) {
    std::string sum = sums[step.inputs[0]];
    for (std::size_t i = 1; i < step.inputs.size(); ++i) {
      sum = "(" + sum + "+" + sums[step.inputs[i]] + ")";
    }
    sums.push_back(sum);
  }
  return sums.back();
}

TEST(ReductionOrder, EqualLinksAreTheOrderOfTheList) {
  LinkMatrix links(4, 12 * kGb);
  for (std::size_t a = 0; a < 4; ++a) {
    for (std::size_t b = a + 1; b < 4; ++b) links.Set(a, b, 450 * kGb);
  }
  const ReductionOrder direct = {{.device = 2, .inputs = {0, 1, 2, 3}}};
  const LinkMatrix none(4, 12 * kGb);
  EXPECT_EQ(DirectOrder(OneEach(4), 2), direct);
  EXPECT_EQ(TreeOrder(links, OneEach(4), 2), direct);
  for (const Order additions : {Order::kOfTheList, Order::kInAnyOrder}) {
    EXPECT_EQ(PlanReduction(links, OneEach(4), 2, kLarge, additions), direct);
    EXPECT_EQ(PlanReduction(none, OneEach(4), 2, kLarge, additions), direct);
    // Nor do numbers of devices change the order of the list.
    EXPECT_EQ(PlanReduction(links, std::vector<std::size_t>{3, 0, 1}, 2, kLarge, additions),
              (ReductionOrder{{.device = 2, .inputs = {0, 1, 2}}}));
  }
}

TEST(ReductionOrder, OneDeviceHasOneStep) {
  const LinkMatrix links(1, kGb);
  const ReductionOrder direct = {{.device = 0, .inputs = {0, 1}}};
  EXPECT_EQ(PlanReduction(links, std::vector<std::size_t>{0, 0}, 0, kLarge, Order::kInAnyOrder),
            direct);
  EXPECT_EQ(EstimateSeconds(links, std::vector<std::size_t>{0, 0}, direct, kLarge),
            kReductionStepSeconds);
}

TEST(ReductionOrder, OneSumCrossesBetweenTheSockets) {
  const ReductionOrder expected = {{.device = 0, .inputs = {0, 1, 2, 3}},
                                   {.device = 5, .inputs = {8, 4, 5, 6, 7}}};
  EXPECT_EQ(TreeOrder(TwoSockets(), OneEach(8), 5), expected);
  // The additions are those of the list, so they may be had where these are asked for.
  for (const Order additions : {Order::kOfTheList, Order::kInAnyOrder}) {
    const ReductionOrder plan = PlanReduction(TwoSockets(), OneEach(8), 5, kLarge, additions);
    EXPECT_EQ(plan, expected);
    EXPECT_EQ(AdditionsOf(plan, 8), "(((((((0+1)+2)+3)+4)+5)+6)+7)");
  }
}

// The sum of the first socket's values has to be there before those of the second are added, and
// then goes back: two crossings in place of four. The tree adds in another order and crosses once.
TEST(ReductionOrder, TheSumGoesToTheOtherSocketAndBack) {
  EXPECT_EQ(PlanReduction(TwoSockets(), OneEach(8), 1, kLarge, Order::kOfTheList),
            (ReductionOrder{{.device = 0, .inputs = {0, 1, 2, 3}},
                            {.device = 4, .inputs = {8, 4, 5, 6, 7}},
                            {.device = 1, .inputs = {9}}}));
  const ReductionOrder tree =
      PlanReduction(TwoSockets(), OneEach(8), 1, kLarge, Order::kInAnyOrder);
  EXPECT_EQ(tree, (ReductionOrder{{.device = 4, .inputs = {4, 5, 6, 7}},
                                  {.device = 1, .inputs = {0, 1, 2, 3, 8}}}));
  EXPECT_EQ(AdditionsOf(tree, 8), "((((0+1)+2)+3)+(((4+5)+6)+7))");
}

TEST(ReductionOrder, SmallValuesGoAtOnce) {
  for (const Order additions : {Order::kOfTheList, Order::kInAnyOrder}) {
    EXPECT_EQ(PlanReduction(TwoSockets(), OneEach(8), 5, kSmall, additions),
              DirectOrder(OneEach(8), 5));
  }
}

// Four devices in a row with fast links between neighbours.
TEST(ReductionOrder, AChainIsFollowedToItsEnd) {
  LinkMatrix links(4, 5 * kGb);
  links.Set(0, 1, 50 * kGb);
  links.Set(1, 2, 50 * kGb);
  links.Set(2, 3, 50 * kGb);
  EXPECT_EQ(TreeOrder(links, OneEach(4), 0), (ReductionOrder{{.device = 2, .inputs = {2, 3}},
                                                             {.device = 1, .inputs = {1, 4}},
                                                             {.device = 0, .inputs = {0, 5}}}));
  EXPECT_EQ(RelayOrder(links, OneEach(4), 3, kLarge),
            (ReductionOrder{{.device = 1, .inputs = {0, 1}},
                            {.device = 2, .inputs = {4, 2}},
                            {.device = 3, .inputs = {5, 3}}}));
}

// Several values of a device are added there before one sum goes on, and a device without values
// adds what comes to it.
TEST(ReductionOrder, ListsMayNameADeviceSeveralTimesOrNot) {
  const std::vector<std::size_t> list = {4, 4, 0, 4, 0};
  EXPECT_EQ(TreeOrder(TwoSockets(), list, 6), (ReductionOrder{{.device = 0, .inputs = {2, 4}},
                                                              {.device = 4, .inputs = {0, 1, 3}},
                                                              {.device = 6, .inputs = {5, 6}}}));
  LinkMatrix two(2, 10 * kGb);
  EXPECT_EQ(
      RelayOrder(two, std::vector<std::size_t>{1, 1, 1, 0, 0}, 0, kLarge),
      (ReductionOrder{{.device = 1, .inputs = {0, 1, 2}}, {.device = 0, .inputs = {5, 3, 4}}}));
  // Too many changes to look for more than the plain order.
  std::vector<std::size_t> long_list;
  for (int i = 0; i < 200; ++i) long_list.insert(long_list.end(), {1, 0});
  EXPECT_EQ(RelayOrder(two, long_list, 0, kLarge), DirectOrder(long_list, 0));
}

TEST(ReductionOrder, EstimatesByTheModel) {
  // 0.25e9 bytes: 10 ms at 25 GB/s, 25 ms at 10 GB/s, of which the direct order has four in a row.
  const std::int64_t bytes = 250'000'000;
  const std::vector<std::size_t> list = OneEach(8);
  EXPECT_NEAR(EstimateSeconds(TwoSockets(), list, DirectOrder(list, 5), bytes),
              kReductionStepSeconds + 0.1, 1e-9);
  EXPECT_NEAR(EstimateSeconds(TwoSockets(), list, TreeOrder(TwoSockets(), list, 5), bytes),
              2 * kReductionStepSeconds + 0.01 + 0.025, 1e-9);
  // Two values of one device come one after another.
  const std::vector<std::size_t> twice = {0, 1, 1};
  EXPECT_NEAR(EstimateSeconds(TwoSockets(), twice, DirectOrder(twice, 0), bytes),
              kReductionStepSeconds + 0.02, 1e-9);
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

class ReductionOrderRandom : public testing::Test {
 protected:
  ReductionOrderRandom() {
    const char* text = std::getenv("HEDDLE_TEST_SEED");
    const std::uint64_t seed =
        text != nullptr ? std::strtoull(text, nullptr, 10) : std::random_device()();
    std::printf("HEDDLE_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
    random_.seed(seed);
  }

  std::size_t Below(std::size_t bound) { return random_() % bound; }
  LinkMatrix RandomLinks(std::size_t devices) {
    LinkMatrix links(devices, kGb);
    for (std::size_t a = 0; a < devices; ++a) {
      for (std::size_t b = a + 1; b < devices; ++b) {
        if (Below(2) == 0) links.Set(a, b, kGb * static_cast<double>(1 + Below(4)));
      }
    }
    return links;
  }

  std::mt19937_64 random_;
};

TEST_F(ReductionOrderRandom, EveryValueOfATreeTakesAWidestWay) {
  for (int round = 0; round < 500; ++round) {
    const std::size_t n = 2 + Below(15);
    const std::size_t root = Below(n);
    const LinkMatrix links = RandomLinks(n);
    const ReductionOrder tree = TreeOrder(links, OneEach(n), root);
    ExpectComplete(tree, n, root);
    std::vector<double> width(n + tree.size(), 0);  // of the way from each input to the root
    width.back() = 100 * kGb;
    for (std::size_t k = tree.size(); k-- > 0;) {  // from the root outwards
      const std::size_t to = tree[k].device;
      for (const std::size_t input : tree[k].inputs) {
        const std::size_t from = input < n ? input : tree[input - n].device;
        width[input] = from == to ? width[n + k] : std::min(width[n + k], links(from, to));
      }
    }
    const std::vector<double> widest = WidestWays(links);
    for (std::size_t device = 0; device < n; ++device) {
      if (device != root) {
        EXPECT_EQ(width[device], widest[device * n + root]) << device;
      }
    }
    if (HasFailure()) return;
  }
}

// The least time that an order with the list's additions takes, by trying all cuts
// between devices, and all places where a value lies.
double LeastSeconds(const LinkMatrix& links, const std::vector<std::size_t>& list, std::size_t root,
                    std::int64_t bytes, const ReductionOrder& before, std::size_t begin) {
  double least = std::numeric_limits<double>::infinity();
  const auto step_of = [&](std::size_t device, std::size_t end) {
    ReductionOrder order = before;
    order.push_back({.device = device, .inputs = {}});
    if (!before.empty()) order.back().inputs.push_back(list.size() + before.size() - 1);
    for (std::size_t i = begin; i < end; ++i) order.back().inputs.push_back(i);
    return order;
  };
  for (std::size_t end = begin + 1; end <= list.size(); ++end) {
    for (std::size_t device = 0; device < links.devices(); ++device) {
      if (std::find(&list[begin], &list[end - 1] + 1, device) == &list[end - 1] + 1) continue;
      if (end < list.size() ? list[end] == list[end - 1] : device == root) continue;
      least = std::min(least, LeastSeconds(links, list, root, bytes, step_of(device, end), end));
    }
  }
  return std::min(least, EstimateSeconds(links, list, step_of(root, list.size()), bytes));
}

TEST_F(ReductionOrderRandom, RelaysHaveTheAdditionsOfTheListAndTakeTheLeastTime) {
  for (int round = 0; round < 200; ++round) {
    const std::size_t n = 2 + Below(2);
    const std::size_t root = Below(n);
    const LinkMatrix links = RandomLinks(n);
    std::vector<std::size_t> list(1 + Below(4));
    for (std::size_t& device : list) device = Below(n);
    const auto bytes = static_cast<std::int64_t>(Below(1'000'000));
    const ReductionOrder relay = RelayOrder(links, list, root, bytes);
    ExpectComplete(relay, list.size(), root);
    EXPECT_EQ(AdditionsOf(relay, list.size()), AdditionsOf(DirectOrder(list, root), list.size()));
    EXPECT_NEAR(EstimateSeconds(links, list, relay, bytes),
                LeastSeconds(links, list, root, bytes, {}, 0), 1e-9);
    if (HasFailure()) return;
  }
}

TEST_F(ReductionOrderRandom, PlansAreCompleteAndTheFastestOfTheirKind) {
  for (int round = 0; round < 500; ++round) {
    const std::size_t n = 1 + Below(8);
    const std::size_t root = Below(n);
    const LinkMatrix links = RandomLinks(n);
    std::vector<std::size_t> list(1 + Below(12));
    for (std::size_t& device : list) device = Below(n);
    const auto bytes = static_cast<std::int64_t>(Below(100'000'000));
    const auto seconds = [&](const ReductionOrder& order) {
      ExpectComplete(order, list.size(), root);
      return EstimateSeconds(links, list, order, bytes);
    };
    const ReductionOrder in_list = PlanReduction(links, list, root, bytes, Order::kOfTheList);
    const ReductionOrder any = PlanReduction(links, list, root, bytes, Order::kInAnyOrder);
    const double least =
        std::min(seconds(DirectOrder(list, root)), seconds(RelayOrder(links, list, root, bytes)));
    EXPECT_EQ(seconds(in_list), least);
    EXPECT_EQ(seconds(any), std::min(least, seconds(TreeOrder(links, list, root))));
    EXPECT_EQ(AdditionsOf(in_list, list.size()), AdditionsOf(DirectOrder(list, root), list.size()));
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace heddle::kvstore
