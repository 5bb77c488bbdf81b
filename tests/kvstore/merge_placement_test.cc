#include "kvstore/merge_placement.h"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

namespace heddle::kvstore {
namespace {

std::vector<Device> Place(MergePlacement& placement, const std::vector<std::int64_t>& bytes,
                          const std::vector<Device>& devices) {
  std::vector<Device> placed(bytes.size(), Cpu(99));
  std::vector<MergePlacement::Item> items;
  for (std::size_t i = 0; i < bytes.size(); ++i) items.push_back({bytes[i], &placed[i]});
  placement.Place(items, devices);
  return placed;
}

TEST(MergePlacement, LargestFirstToTheLeastLoaded) {
  MergePlacement placement;
  // 9 -> 0; 8 -> 1; 5 -> 2; 4 -> 2 (5 < 8 < 9); 1 -> 1 (8 < 9 = 9).
  EXPECT_EQ(Place(placement, {1, 5, 9, 4, 8}, {Cpu(0), Cpu(1), Cpu(2)}),
            (std::vector<Device>{Cpu(1), Cpu(2), Cpu(0), Cpu(2), Cpu(1)}));
}

TEST(MergePlacement, AmongEqualsTheFirstKeyAndTheFirstDevice) {
  MergePlacement placement;
  EXPECT_EQ(Place(placement, {4, 4, 4}, {Cpu(3), Cpu(1)}),
            (std::vector<Device>{Cpu(3), Cpu(1), Cpu(3)}));
}

TEST(MergePlacement, CountsWhatWasPlacedBefore) {
  MergePlacement placement;
  Place(placement, {10}, {Cpu(0), Cpu(1)});
  EXPECT_EQ(Place(placement, {3, 4}, {Cpu(0), Cpu(1)}), (std::vector<Device>{Cpu(1), Cpu(1)}));
  EXPECT_EQ(Place(placement, {1}, {Cpu(0)}), (std::vector<Device>{Cpu(0)}));
}

}  // namespace
}  // namespace heddle::kvstore
