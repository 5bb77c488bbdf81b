#include "kvstore/reduction_order.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"

namespace heddle::kvstore {

LinkMatrix::LinkMatrix(std::size_t devices, double host_bandwidth)
    : devices_(devices), bandwidth_(devices * devices, host_bandwidth) {
  CHECK(host_bandwidth > 0);
}

void LinkMatrix::Set(std::size_t a, std::size_t b, double bandwidth) {
  CHECK(a < devices_ && b < devices_ && bandwidth > 0);
  bandwidth_[a * devices_ + b] = bandwidth;
  bandwidth_[b * devices_ + a] = bandwidth;
}

double EstimateSeconds(const LinkMatrix& links, const ReductionOrder& order, std::int64_t bytes) {
  std::vector<double> done(links.devices(), 0);  // when each device's value or sum is there
  for (const ReductionStep& step : order) {
    double start = done[step.device];
    double widest = 0;
    for (std::size_t input : step.inputs) {
      start = std::max(start, done[input]);
      if (input != step.device) widest = std::max(widest, links(input, step.device));
    }
    double wide_seconds = 0;
    double narrow_seconds = 0;
    for (std::size_t input : step.inputs) {
      if (input == step.device) continue;
      const double bandwidth = links(input, step.device);
      const double seconds = static_cast<double>(bytes) / bandwidth;
      if (bandwidth == widest) {
        wide_seconds = seconds;
      } else {
        narrow_seconds += seconds;
      }
    }
    done[step.device] = start + kReductionStepSeconds + std::max(wide_seconds, narrow_seconds);
  }
  return order.empty() ? 0 : done[order.back().device];
}

ReductionOrder DirectOrder(std::size_t devices, std::size_t root) {
  CHECK(root < devices);
  if (devices == 1) return {};
  ReductionStep step = {.device = root, .inputs = std::vector<std::size_t>(devices)};
  std::iota(step.inputs.begin(), step.inputs.end(), std::size_t{0});
  return {step};
}

ReductionOrder TreeOrder(const LinkMatrix& links, std::size_t root) {
  const std::size_t devices = links.devices();
  CHECK(root < devices);
  struct Node {
    bool joined = false;
    std::size_t parent = 0;
    std::size_t depth = 0;
  };
  std::vector<Node> nodes(devices);
  std::vector<std::size_t> joined = {root};  // parents before children
  nodes[root].joined = true;
  while (joined.size() < devices) {
    std::size_t parent = root;
    std::size_t child = devices;  // none yet
    for (std::size_t to = 0; to < devices; ++to) {
      if (!nodes[to].joined) continue;
      for (std::size_t from = 0; from < devices; ++from) {
        if (nodes[from].joined) continue;
        const double width = links(from, to);
        const double best = child == devices ? 0 : links(child, parent);
        if (width > best || (width == best && nodes[to].depth < nodes[parent].depth)) {
          parent = to;
          child = from;
        }
      }
    }
    nodes[child] = {.joined = true, .parent = parent, .depth = nodes[parent].depth + 1};
    joined.push_back(child);
  }

  std::vector<std::vector<std::size_t>> inputs(devices);
  for (std::size_t i = 1; i < devices; ++i) inputs[nodes[joined[i]].parent].push_back(joined[i]);
  ReductionOrder order;
  for (auto device = joined.rbegin(); device != joined.rend(); ++device) {  // children first
    std::vector<std::size_t>& of = inputs[*device];
    if (of.empty()) continue;
    of.push_back(*device);
    std::sort(of.begin(), of.end());
    order.push_back({.device = *device, .inputs = std::move(of)});
  }
  return order;
}

ReductionOrder PlanReduction(const LinkMatrix& links, std::size_t root, std::int64_t bytes) {
  ReductionOrder direct = DirectOrder(links.devices(), root);
  ReductionOrder tree = TreeOrder(links, root);
  return EstimateSeconds(links, tree, bytes) < EstimateSeconds(links, direct, bytes) ? tree
                                                                                     : direct;
}

}  // namespace heddle::kvstore
