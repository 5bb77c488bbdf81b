#include "kvstore/reduction_order.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "base/check.h"

namespace heddle::kvstore {

namespace {

// Lists that go back and forth between devices more often are not planned: it would take too long.
constexpr std::size_t kRunsMax = 64;

// Until `arriving[d]` values from each device d are on `to`.
double TransferSeconds(const LinkMatrix& links, std::span<const std::size_t> arriving,
                       std::size_t to, std::int64_t bytes) {
  double widest = 0;
  for (std::size_t from = 0; from < arriving.size(); ++from) {
    if (from != to) widest = std::max(widest, links(from, to));
  }
  double wide_seconds = 0;
  double narrow_seconds = 0;
  for (std::size_t from = 0; from < arriving.size(); ++from) {
    if (from == to || arriving[from] == 0) continue;
    const double bandwidth = links(from, to);
    const double seconds =
        static_cast<double>(bytes) * static_cast<double>(arriving[from]) / bandwidth;
    if (bandwidth == widest) {
      wide_seconds = std::max(wide_seconds, seconds);
    } else {
      narrow_seconds += seconds;
    }
  }
  return std::max(wide_seconds, narrow_seconds);
}

// Finds RelayOrder. A sum is made of whole runs, neighbours in the list that lie on one device, and
// where one of its runs lies, the last one on the root.
class RelayPlanner {
 public:
  RelayPlanner(const LinkMatrix& links, std::span<const std::size_t> devices, std::size_t root,
               std::int64_t bytes)
      : links_(links), devices_(devices), root_(root), bytes_(bytes) {
    for (std::size_t i = 0; i < devices.size(); ++i) {
      if (i == 0 || devices[i] != devices[i - 1]) runs_.push_back(i);
    }
    runs_.push_back(devices.size());
  }

  std::size_t runs() const { return runs_.size() - 1; }

  ReductionOrder Plan() {
    best_.assign(runs() + 1, std::vector<Sum>(links_.devices()));
    for (std::size_t end = 1; end <= runs(); ++end) {
      std::vector<std::size_t> arriving(links_.devices());
      for (std::size_t begin = end; begin-- > 0;) {
        arriving[devices_[runs_[begin]]] += runs_[begin + 1] - runs_[begin];
        for (std::size_t device = 0; device < arriving.size(); ++device) {
          const bool ends_here = device == root_ && end == runs();
          if (arriving[device] > 0 || ends_here) TrySums(begin, end, device, arriving);
        }
      }
    }
    // The sum of all may be made elsewhere and only go to the root.
    std::vector<std::size_t> none(links_.devices());
    const std::vector<Sum> of_all = best_[runs()];
    for (std::size_t from = 0; from < of_all.size(); ++from) {
      if (from != root_) TrySum(of_all[from], from, runs(), runs(), root_, none);
    }
    return Steps();
  }

 private:
  // The sum of the first runs on some device, as it is made soonest.
  struct Sum {
    double seconds = std::numeric_limits<double>::infinity();
    std::size_t steps = 0;
    std::size_t begin = 0;  // the first run that its last step adds
    std::size_t from = 0;   // where the sum of those before was made
  };

  // On `device`, from all sums of the runs before `begin`.
  void TrySums(std::size_t begin, std::size_t end, std::size_t device,
               std::vector<std::size_t>& arriving) {
    if (begin == 0) {
      TrySum({.seconds = 0}, device, begin, end, device, arriving);
      return;
    }
    for (std::size_t from = 0; from < links_.devices(); ++from) {
      TrySum(best_[begin][from], from, begin, end, device, arriving);
    }
  }
  void TrySum(const Sum& before, std::size_t from, std::size_t begin, std::size_t end,
              std::size_t device, std::vector<std::size_t>& arriving) {
    const std::size_t sums = begin > 0 ? 1 : 0;
    arriving[from] += sums;
    const double seconds =
        before.seconds + kReductionStepSeconds + TransferSeconds(links_, arriving, device, bytes_);
    arriving[from] -= sums;
    Sum& best = best_[end][device];
    if (std::pair(seconds, before.steps + 1) < std::pair(best.seconds, best.steps)) {
      best = {seconds, before.steps + 1, begin, from};
    }
  }

  ReductionOrder Steps() const {
    struct Part {
      std::size_t begin, end, device;
    };
    std::vector<Part> parts;  // the last one first
    std::size_t end = runs();
    std::size_t device = root_;
    do {
      const Sum& sum = best_[end][device];
      parts.push_back({sum.begin, end, device});
      end = sum.begin;
      device = sum.from;
    } while (end > 0);
    ReductionOrder order;
    for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
      ReductionStep step = {.device = part->device, .inputs = {}};
      if (!order.empty()) step.inputs.push_back(devices_.size() + order.size() - 1);
      for (std::size_t i = runs_[part->begin]; i < runs_[part->end]; ++i) step.inputs.push_back(i);
      order.push_back(std::move(step));
    }
    return order;
  }

  const LinkMatrix& links_;
  const std::span<const std::size_t> devices_;
  const std::size_t root_;
  const std::int64_t bytes_;
  std::vector<std::size_t> runs_;       // where each begins; and the end of the list
  std::vector<std::vector<Sum>> best_;  // by the number of runs in it and by device
};

}  // namespace

LinkMatrix::LinkMatrix(std::size_t devices, double host_bandwidth)
    : devices_(devices), bandwidth_(devices * devices, host_bandwidth) {
  CHECK(host_bandwidth > 0);
}

void LinkMatrix::Set(std::size_t a, std::size_t b, double bandwidth) {
  CHECK(a < devices_ && b < devices_ && bandwidth > 0);
  bandwidth_[a * devices_ + b] = bandwidth;
  bandwidth_[b * devices_ + a] = bandwidth;
}

double EstimateSeconds(const LinkMatrix& links, std::span<const std::size_t> devices,
                       const ReductionOrder& order, std::int64_t bytes) {
  std::vector<double> done;  // when each step's sum is there
  for (const ReductionStep& step : order) {
    double start = 0;
    std::vector<std::size_t> arriving(links.devices());
    for (const std::size_t input : step.inputs) {
      if (input < devices.size()) {
        ++arriving[devices[input]];
        continue;
      }
      const std::size_t made_by = input - devices.size();
      start = std::max(start, done[made_by]);
      ++arriving[order[made_by].device];
    }
    done.push_back(start + kReductionStepSeconds +
                   TransferSeconds(links, arriving, step.device, bytes));
  }
  return done.back();
}

ReductionOrder DirectOrder(std::span<const std::size_t> devices, std::size_t root) {
  ReductionStep step = {.device = root, .inputs = std::vector<std::size_t>(devices.size())};
  std::iota(step.inputs.begin(), step.inputs.end(), std::size_t{0});
  return {step};
}

ReductionOrder RelayOrder(const LinkMatrix& links, std::span<const std::size_t> devices,
                          std::size_t root, std::int64_t bytes) {
  CHECK(root < links.devices() && !devices.empty());
  RelayPlanner planner(links, devices, root, bytes);
  return planner.runs() > kRunsMax ? DirectOrder(devices, root) : planner.Plan();
}

ReductionOrder TreeOrder(const LinkMatrix& links, std::span<const std::size_t> devices,
                         std::size_t root) {
  const std::size_t count = links.devices();
  CHECK(root < count);
  struct Node {
    bool joined = false;
    std::size_t parent = 0;
    std::size_t depth = 0;
  };
  std::vector<Node> nodes(count);
  std::vector<std::size_t> joined = {root};  // parents before children
  nodes[root].joined = true;
  while (joined.size() < count) {
    std::size_t parent = root;
    std::size_t child = count;  // none yet
    for (std::size_t to = 0; to < count; ++to) {
      if (!nodes[to].joined) continue;
      for (std::size_t from = 0; from < count; ++from) {
        if (nodes[from].joined) continue;
        const double width = links(from, to);
        const double best = child == count ? 0 : links(child, parent);
        if (width > best || (width == best && nodes[to].depth < nodes[parent].depth)) {
          parent = to;
          child = from;
        }
      }
    }
    nodes[child] = {.joined = true, .parent = parent, .depth = nodes[parent].depth + 1};
    joined.push_back(child);
  }

  // What goes on from each device: its values, or the sum that it has made.
  std::vector<std::vector<std::size_t>> left(count);
  for (std::size_t i = 0; i < devices.size(); ++i) left[devices[i]].push_back(i);
  ReductionOrder order;
  for (auto device = joined.rbegin(); device != joined.rend(); ++device) {  // children first
    std::vector<std::size_t> inputs;
    for (std::size_t from = 0; from < count; ++from) {
      const bool comes_here = from == *device || (from != root && nodes[from].parent == *device);
      if (comes_here) inputs.insert(inputs.end(), left[from].begin(), left[from].end());
    }
    left[*device] = inputs;
    if (inputs.size() < 2 && *device != root) continue;
    left[*device] = {devices.size() + order.size()};
    order.push_back({.device = *device, .inputs = std::move(inputs)});
  }
  return order;
}

ReductionOrder PlanReduction(const LinkMatrix& links, std::span<const std::size_t> devices,
                             std::size_t root, std::int64_t bytes, Additions additions) {
  ReductionOrder best = DirectOrder(devices, root);
  double best_seconds = EstimateSeconds(links, devices, best, bytes);
  const auto consider = [&](ReductionOrder order) {
    const double seconds = EstimateSeconds(links, devices, order, bytes);
    if (seconds >= best_seconds) return;
    best = std::move(order);
    best_seconds = seconds;
  };
  consider(RelayOrder(links, devices, root, bytes));
  if (additions == Additions::kInAnyOrder) consider(TreeOrder(links, devices, root));
  return best;
}

}  // namespace heddle::kvstore
