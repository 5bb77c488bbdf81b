#include "kvstore/gpu_sums.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

#include "base/env.h"
#include "ops/gpu_tasks.h"

namespace heddle::kvstore {

namespace {

// CUDA tells the kind of a link and its rank, not its width. So these are round numbers for each
// kind; what counts is how they compare, and how with the cost of a step.
constexpr double kNvlinkBandwidth = 50e9;
constexpr double kPcieBandwidth = 20e9;
constexpr double kHostBandwidth = 8e9;  // a copy out and a copy in, which other GPUs make as well

// `rank`: among the links of its kind; 0 is the widest.
double BandwidthOf(const internal::GpuLink& link, int rank) {
  if (!link.access) return kHostBandwidth;
  const double widest = link.native_atomics ? kNvlinkBandwidth : kPcieBandwidth;
  return std::max(widest / (1 + rank), 1.25 * kHostBandwidth);
}

NDArray QueueSum(std::span<const NDArray> arrays, Device device, int priority) {
  const NearInputs near(arrays, device, priority);
  const NDArray sum(arrays[0].shape(), arrays[0].dtype(), device, arrays[0].engine());
  Sum(near.view(), sum, priority);
  return sum;
}

// Of more than one step; else null.
std::shared_ptr<const ReductionOrder> PlanOrder(std::span<const int> gpus, int root,
                                                const NDArray& like, Additions additions) {
  std::vector<int> numbered(gpus.begin(), gpus.end());
  numbered.push_back(root);
  std::ranges::sort(numbered);
  numbered.erase(std::unique(numbered.begin(), numbered.end()), numbered.end());
  const auto number_of = [&](int gpu) {
    return static_cast<std::size_t>(std::ranges::lower_bound(numbered, gpu) - numbered.begin());
  };
  std::vector<std::size_t> devices;
  for (const int gpu : gpus) devices.push_back(number_of(gpu));
  ReductionOrder order = PlanReduction(LinksBetween(storage::Gpus::Of(like.engine()), numbered),
                                       devices, number_of(root), like.bytes(), additions);
  if (order.size() == 1) return nullptr;
  for (ReductionStep& step : order) step.device = static_cast<std::size_t>(numbered[step.device]);
  return std::make_shared<const ReductionOrder>(std::move(order));
}

}  // namespace

GpuSums GpuSumsOf(const KVStoreOptions& options) {
  if (options.gpu_sums) return *options.gpu_sums;
  const bool tree = EnvBool("MXNET_KVSTORE_USETREE", false);
  constexpr GpuSums kNamed[] = {GpuSums::kDirect, GpuSums::kRelay, GpuSums::kTree};
  return kNamed[EnvChoice("HEDDLE_GPU_SUMS", {"direct", "relay", "tree"}, tree ? 2 : 1)];
}

LinkMatrix LinksBetween(storage::Gpus& gpus, std::span<const int> devices) {
  struct Pair {
    std::size_t a, b;
    internal::GpuLink link;
  };
  std::vector<Pair> pairs;
  constexpr int kNoneYet = std::numeric_limits<int>::max();
  int best_rank[2] = {kNoneYet, kNoneYet};  // of links without and with native atomics
  for (std::size_t a = 0; a < devices.size(); ++a) {
    for (std::size_t b = a + 1; b < devices.size(); ++b) {
      // Copies go one way or the other, by the plan.
      internal::GpuLink link = gpus.Link(devices[a], devices[b]);
      const internal::GpuLink back = gpus.Link(devices[b], devices[a]);
      link = {.access = link.access && back.access,
              .native_atomics = link.native_atomics && back.native_atomics,
              .rank = std::max(link.rank, back.rank)};
      pairs.push_back({a, b, link});
      if (!link.access) continue;
      int& best = best_rank[link.native_atomics ? 1 : 0];
      best = std::min(best, link.rank);
    }
  }
  LinkMatrix links(devices.size(), kHostBandwidth);
  for (const auto& [a, b, link] : pairs) {
    links.Set(a, b, BandwidthOf(link, link.rank - best_rank[link.native_atomics ? 1 : 0]));
  }
  return links;
}

std::shared_ptr<const ReductionOrder> GpuSumPlanner::Plan(std::span<const NDArray> arrays,
                                                          Device root) {
  if (how_ == GpuSums::kDirect || arrays.size() < 3 || !IsOnGpu(root)) return nullptr;
  // Not even if all values came by way of the host, one after another, would a step be worth it.
  const double seconds_at_most =
      static_cast<double>(arrays[0].bytes()) * static_cast<double>(arrays.size()) / kHostBandwidth;
  if (seconds_at_most <= kReductionStepSeconds) return nullptr;
  // Integers wrap, so any order gives the same bits. 16-bit sums would be rounded on their way.
  const DType dtype = arrays[0].dtype();
  const bool any_order = how_ == GpuSums::kTree || !IsFloating(dtype);
  if (!any_order && ops::CarryDType(dtype) != dtype) return nullptr;
  if (!std::ranges::all_of(arrays, [](const NDArray& array) { return IsOnGpu(array.device()); })) {
    return nullptr;
  }
  const auto gpu_of = [](const NDArray& array) { return array.device().id; };
  {
    const MutexLock lock(mutex_);
    if (std::ranges::equal(arrays, gpus_, {}, gpu_of)) return order_;
  }
  std::vector<int> gpus;
  for (const NDArray& array : arrays) gpus.push_back(gpu_of(array));
  auto order = PlanOrder(gpus, root.id, arrays[0],
                         any_order ? Additions::kInAnyOrder : Additions::kOfTheList);
  const MutexLock lock(mutex_);
  gpus_ = std::move(gpus);
  order_ = order;
  return order;
}

std::vector<NDArray> QueueSteps(const ReductionOrder& order, std::span<const NDArray> arrays,
                                int priority) {
  std::vector<NDArray> sums;
  const auto inputs_of = [&](const ReductionStep& step) {
    std::vector<NDArray> inputs;
    for (const std::size_t input : step.inputs) {
      inputs.push_back(input < arrays.size() ? arrays[input] : sums[input - arrays.size()]);
    }
    return inputs;
  };
  for (std::size_t k = 0; k + 1 < order.size(); ++k) {
    sums.push_back(QueueSum(inputs_of(order[k]), Gpu(static_cast<int>(order[k].device)), priority));
  }
  return inputs_of(order.back());
}

}  // namespace heddle::kvstore
