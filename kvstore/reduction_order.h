// In which order the values of several devices become one sum on one of them, by the links that the
// devices have. Plain arithmetic: nothing here asks a driver or moves a byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace heddle::kvstore {

// The links between some devices, which are numbered from 0.
class LinkMatrix {
 public:
  // No links: values go by way of the host, `host_bandwidth` bytes a second.
  LinkMatrix(std::size_t devices, double host_bandwidth);

  // Bytes a second from one device to another, both ways alike.
  void Set(std::size_t a, std::size_t b, double bandwidth);
  double operator()(std::size_t a, std::size_t b) const { return bandwidth_[a * devices_ + b]; }
  std::size_t devices() const { return devices_; }

 private:
  std::size_t devices_;
  std::vector<double> bandwidth_;
};

// One pass on `device` over its own value and the sums of other devices, which are complete by
// then. The result takes the place of the device's own value.
struct ReductionStep {
  std::size_t device;
  std::vector<std::size_t>
      inputs;  // in the order of addition: increasing, with `device` among them

  friend bool operator==(const ReductionStep&, const ReductionStep&) = default;
};

// The steps, each after those it needs; the last one is that of the root. None for a single device.
using ReductionOrder = std::vector<ReductionStep>;

// What a step costs besides its bytes: a launch, and the wait for what comes before.
inline constexpr double kReductionStepSeconds = 10e-6;

// The seconds that an order takes by a plain model: steps of different devices overlap; in a step,
// values over the widest of its links come at the same time, those over narrower ones, which
// devices share, one after another.
double EstimateSeconds(const LinkMatrix& links, const ReductionOrder& order, std::int64_t bytes);

// All devices' values to the root in one step: the order of a list, and its bits.
ReductionOrder DirectOrder(std::size_t devices, std::size_t root);

// Along the widest links: a maximum spanning tree, grown from the root; among equally wide links,
// one that ends nearest to the root, and then the lowest numbers. So no value takes a narrower way
// than it must, and between groups of devices that are linked well among themselves one sum goes
// instead of all values. Where all links are alike it is the direct order.
ReductionOrder TreeOrder(const LinkMatrix& links, std::size_t root);

// The one of the two that takes less time for values of `bytes` bytes; the direct one if it is
// even. The choice, and so the bits, depend on links, root and bytes alone.
ReductionOrder PlanReduction(const LinkMatrix& links, std::size_t root, std::int64_t bytes);

}  // namespace heddle::kvstore
