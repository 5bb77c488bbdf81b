// In which order, and where, a list of values that lie on several devices becomes one sum on the
// device `root`, by the links that the devices have. Plain arithmetic: nothing here asks a driver
// or moves a byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
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

// One pass on `device` over values and sums, which are copied there if they lie elsewhere. Of a
// list of n values number i < n is its value i, and number n + k the sum that step k made.
struct ReductionStep {
  std::size_t device;
  std::vector<std::size_t> inputs;  // in the order of addition

  friend bool operator==(const ReductionStep&, const ReductionStep&) = default;
};

// The steps, each after those it needs; the last one is that of the root, and its sum has every
// value once.
using ReductionOrder = std::vector<ReductionStep>;

// What a step costs besides its bytes: a launch, and the wait for what comes before.
inline constexpr double kReductionStepSeconds = 10e-6;

// Below, `devices` is where the values of the list lie, in its order; there is one at least.
// `bytes`: of each value, and so of each sum.

// The seconds that an order takes by a plain model: steps of different devices overlap; what comes
// to a device over the widest links that it has comes at the same time, but for what comes from one
// device; what comes over narrower ones, which devices share, comes one after another.
double EstimateSeconds(const LinkMatrix& links, std::span<const std::size_t> devices,
                       const ReductionOrder& order, std::int64_t bytes);

// All values to the root in one step.
ReductionOrder DirectOrder(std::span<const std::size_t> devices, std::size_t root);

// The sum of the first values goes on to where the next ones lie, is added to there, and so on: as
// long as sums are not rounded on their way, the bits of the direct order. Of all such orders whose
// sums are made where one of their values lies, or on the root, and which part no neighbours that
// lie on one device, the one that takes the least by EstimateSeconds, with as few steps as
// possible.
ReductionOrder RelayOrder(const LinkMatrix& links, std::span<const std::size_t> devices,
                          std::size_t root, std::int64_t bytes);

// Along the widest links: a maximum spanning tree, grown from the root; among equally wide links,
// one that ends nearest to the root, and then the lowest numbers. So no value takes a narrower way
// than it must, and between groups of devices that are linked well among themselves one sum goes
// instead of all values. What comes together on a device is added in the order of the devices'
// numbers, the values of one device in that of the list.
ReductionOrder TreeOrder(const LinkMatrix& links, std::span<const std::size_t> devices,
                         std::size_t root);

// Which orders may be taken.
enum class Additions {
  kOfTheList,   // those with the additions of the direct order
  kInAnyOrder,  // all
};

// The one that takes the least time, the direct one if that is even. The choice, and so the bits,
// depend on the arguments alone.
ReductionOrder PlanReduction(const LinkMatrix& links, std::span<const std::size_t> devices,
                             std::size_t root, std::int64_t bytes, Additions additions);

}  // namespace heddle::kvstore
