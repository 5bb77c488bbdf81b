// Updates of single parts: by the default updater or an optimizer, here or as an op.
#include <heddle/error.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <utility>

#include <fmt/format.h>

#include "engine/access_check.h"
#include "kvstore/array_kernels.h"
#include "kvstore/dist/server/array_part.h"
#include "kvstore/optimizer/update_plan.h"
#include "kvstore/row_sparse_update.h"
#include "ops/copy.h"
#include "storage/row_sparse_kernels.h"

namespace heddle::kvstore::dist {

namespace {

// Others are of optimizers that were set.
bool IsOfParameters(std::uint64_t version) { return (version & 0xFFFF'FFFF) != 0; }

}  // namespace

void ArrayParts::SetOptimizer(std::uint32_t store, std::uint64_t version,
                              const OptimizerPtr& optimizer, bool keeps_states,
                              ServerUpdater updater) {
  Store& of = stores_[store];
  std::map<std::uint64_t, Rule>& rules = of.rules;
  const auto before = rules.lower_bound(version);
  const Rule* const last = before == rules.begin() ? nullptr : &std::prev(before)->second;
  const std::uint64_t generation = last == nullptr ? 0 : last->generation;
  const bool same = keeps_states && last != nullptr;
  rules[version] = {.optimizer = optimizer,
                    .plan = optimizer->plan(),
                    .generation = keeps_states ? generation : ++generations_,
                    .needs_norms = optimizer->plan()->NeedsNorms(),
                    .pace = same ? last->pace : std::make_shared<UpdatePace>(),
                    .updater = std::move(updater)};
  if (!IsOfParameters(version) || ++of.parameters <= kParametersMax) return;
  const auto oldest =
      std::ranges::find_if(rules, [](const auto& rule) { return IsOfParameters(rule.first); });
  of.dropped = oldest->first;
  rules.erase(oldest);
  --of.parameters;
}

void ArrayParts::DropOptimizer(std::uint32_t store, std::uint64_t version) {
  stores_[store].rules.erase(version);
}

const ArrayParts::Rule* ArrayParts::RuleOf(std::uint32_t store, std::uint64_t version) const {
  if (version == 0) return nullptr;
  const auto found = stores_.find(store);
  if (found == stores_.end()) return nullptr;  // a worker may say any version of no optimizer
  const auto& rules = found->second.rules;
  const auto after = rules.upper_bound(version);
  if (after == rules.begin()) return nullptr;
  const auto known = std::prev(after);
  const bool is_gone = known->first != version && version <= found->second.dropped;
  if (is_gone && after != rules.end() && GenerationOf(after->first) == GenerationOf(version)) {
    return &after->second;
  }
  return &known->second;
}

const ArrayParts::Rule* ArrayParts::LatestRuleOf(std::uint32_t store) const {
  const auto found = stores_.find(store);
  if (found == stores_.end() || found->second.rules.empty()) return nullptr;
  return &std::prev(found->second.rules.end())->second;
}

void ArrayParts::Assign(Part& part) {
  if (!part.info.row_sparse) {
    part.value = part.TakeSum();
    return;
  }
  storage::SumRowSparse(part.held_rows, part.rows);
  part.held_rows.clear();
}

// The first update makes the part's state as well.
bool ArrayParts::IsFast(const Part& part, const Rule& rule) {
  return part.state != nullptr && part.generation == rule.generation &&
         rule.pace->Takes(static_cast<std::int64_t>(part.bytes()), kInlineTime);
}

bool ArrayParts::Update(const PartId& id, const UpdateBy& by, std::exception_ptr* error) {
  const std::shared_ptr<Part>& part = FindShared(id);
  const Rule* const rule = RuleOf(id.store, by.version);
  // Parts of row-sparse arrays have whole rows.
  const bool needs_whole =
      rule != nullptr &&
      (rule->needs_norms || (rule->plan->rule->by_rows() && !part->info.row_sparse));
  if (needs_whole && part->info.num_parts > 1) {
    *error = std::make_exception_ptr(InvalidArgument(fmt::format(
        "key {}: optimizer {} works on whole rows or norms of an array, got one that is cut into "
        "parts, which are updated one by one; a key that is initialised after the optimizer is set "
        "is not cut",
        ToString(KeyRef(part->info.key)), rule->optimizer->name())));
    DropSum(id);
    return true;
  }
  const std::int64_t bytes =
      part->info.row_sparse ? kInlineBytes + 1 : static_cast<std::int64_t>(part->bytes());
  const bool is_dense = part->held_rows.empty() && !part->info.row_sparse;
  const bool is_own = rule != nullptr && rule->updater.update;  // takes as long as it likes
  const bool is_short =
      !is_own && (bytes <= kInlineBytes || (is_dense && (rule == nullptr || IsFast(*part, *rule))));
  if (is_short) {
    try {
      if (rule == nullptr) {
        Assign(*part);
      } else {
        Apply(*part, *rule, RatesOf(*part, *rule, by));
      }
    } catch (...) {
      *error = std::current_exception();
    }
    return true;
  }
  if (!part->var) part->var = engine_.NewVar("dist.part");
  const NoWaitScope no_wait;  // the node's lock is held
  engine_.Push({.name = "dist.update", .reads = {states_}, .writes = {part->var}},
               [this, part, rule = rule != nullptr ? *rule : Rule(), by] {
                 const engine::UncheckedScope own;  // the part is this op's alone
                 std::exception_ptr failure;
                 try {
                   if (rule.plan == nullptr) {
                     Assign(*part);
                   } else {
                     Apply(*part, rule, RatesOf(*part, rule, by));
                   }
                 } catch (...) {
                   failure = std::current_exception();
                 }
                 updated_(part->id, std::move(failure));
               });
  return false;
}

UpdateRates ArrayParts::RatesOf(const Part& part, const Rule& rule, const UpdateBy& by) {
  if (by.rates) return *by.rates;
  const KeyRef key(part.info.key);
  return {rule.plan->LearningRate(key, /*num_update=*/1), rule.plan->WeightDecay(key)};
}

ArrayParts::Begun ArrayParts::Begin(Part& part, const Rule& rule, const UpdateRates& rates) const {
  const NDArray& weight = part.WritableValue();
  Begun begun{.part = &part,
              .update = {},
              .gradient = nullptr,
              .lone = {},
              .total = nullptr,
              .rows = part.held_rows};
  // A lone gradient is read where it lies.
  if (part.held.size() == 1 && part.sum == nullptr) {
    begun.lone = part.held[0];
    begun.gradient = InPlace(begun.lone, SizeOf(part.info.dtype));
  }
  if (begun.gradient != nullptr) {
    part.held.clear();
  } else {
    begun.total = part.TakeSum();
    begun.gradient = begun.total->data;
  }
  begun.update = part.state->Begin(*rule.plan->rule, part.info.key, weight, rates.learning_rate,
                                   rates.weight_decay);
  begun.update.first_element = part.info.begin;
  return begun;
}

void ArrayParts::ApplyUpdater(Part& part, const Rule& rule, const UpdateRates& rates) const {
  if (part.info.row_sparse) {
    part.held_rows.clear();
    throw InvalidArgument(
        fmt::format("key {}: expected a dense value for optimizer {}, which is the server's own, "
                    "got a row-sparse one",
                    ToString(KeyRef(part.info.key)), rule.optimizer->name()));
  }
  const std::shared_ptr<Value> sum =
      part.held_rows.empty() ? part.TakeSum() : part.ToDense(std::exchange(part.held_rows, {}));
  NDArray gradient = sum->array;
  if (gradient.empty()) {
    gradient = part.NewArray(part.info.dtype);
    ops::Copy(sum->data, gradient.data(), part.bytes());
  }
  std::vector<std::pair<std::string, double>> parameters;
  for (const auto& [name, value] : rule.optimizer->Parameters()) {
    parameters.emplace_back(name, value);
  }
  rule.updater.update({.key = part.info.key,
                       .parameters = parameters,
                       .learning_rate = rates.learning_rate,
                       .weight_decay = rates.weight_decay,
                       .gradient = std::move(gradient),
                       .weight = part.WritableValue()});
}

void ArrayParts::Apply(Part& part, const Rule& rule, const UpdateRates& rates) const {
  if (rule.updater.update) return ApplyUpdater(part, rule, rates);
  part.ReadyState(rule.plan->multi_precision, rule.generation);
  if (part.info.row_sparse) {
    const std::vector<RowSparseNDArray> gradients = std::exchange(part.held_rows, {});
    ArrayUpdate update = part.state->Begin(*rule.plan->rule, part.info.key, part.rows,
                                           rates.learning_rate, rates.weight_decay);
    update.first_element = part.info.begin * RowSizeOf(part.info.shape);
    UpdateArray(update, gradients, part.rows);
    return;
  }
  if (!part.held_rows.empty()) {
    const std::vector<RowSparseNDArray> gradients = std::exchange(part.held_rows, {});
    const NDArray& weight = part.WritableValue();
    ArrayUpdate update = part.state->Begin(*rule.plan->rule, part.info.key, weight,
                                           rates.learning_rate, rates.weight_decay);
    update.first_element = part.info.begin;
    if (weight.size() > 0) UpdateArray(update, gradients, weight, part.part_rows());
    return;
  }
  const Begun begun = Begin(part, rule, rates);
  const NDArray& weight = part.value->array;
  if (weight.size() == 0) return;
  if (begun.update.passes > 1) {
    NDArray gradient;
    if (begun.total != nullptr) gradient = begun.total->array;
    if (gradient.empty()) {
      gradient = part.NewArray(part.info.dtype);
      ops::Copy(begun.gradient, gradient.data(), part.bytes());
    }
    UpdateArray(begun.update, {&gradient, 1});
    return;
  }
  const auto start = std::chrono::steady_clock::now();
  UpdateElements(begun.update, 0, weight.size(), begun.gradient, weight.data());
  const auto bytes = static_cast<std::int64_t>(part.bytes());
  if (bytes > kInlineBytes) rule.pace->Note(bytes, std::chrono::steady_clock::now() - start);
}

}  // namespace heddle::kvstore::dist
