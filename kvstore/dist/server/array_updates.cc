// Updates: by the default updater or an optimizer, here or as an op, of one part or of all parts of
// an array together.
#include <heddle/error.h>

#include <algorithm>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "engine/access_check.h"
#include "kvstore/array_kernels.h"
#include "kvstore/dist/server/array_part.h"
#include "kvstore/optimizer/update_plan.h"
#include "kvstore/row_sparse_update.h"
#include "ops/copy.h"
#include "ops/reduce.h"
#include "storage/row_sparse_kernels.h"

namespace heddle::kvstore::dist {

namespace {

// Whether its updates take a pass that sums before the last one.
bool NeedsNorms(const Optimizer& optimizer) {
  internal::KeyUpdate update = {};
  update.learning_rate = 1;
  update.step = 1;
  update.row_length = 1;
  return optimizer.plan()->rule->Begin(update) > 1;
}

}  // namespace

void ArrayParts::SetOptimizer(std::uint32_t store, std::uint64_t version,
                              const OptimizerPtr& optimizer, bool keeps_states) {
  std::map<std::uint64_t, Rule>& rules = stores_[store].rules;
  const auto before = rules.lower_bound(version);
  const std::uint64_t last = before == rules.begin() ? 0 : std::prev(before)->second.generation;
  rules[version] = {optimizer, optimizer->plan(), keeps_states ? last : version,
                    NeedsNorms(*optimizer)};
}

const ArrayParts::Rule* ArrayParts::RuleOf(std::uint32_t store, std::uint64_t version) const {
  if (version == 0) return nullptr;
  const auto found = stores_.find(store);
  CHECK(found != stores_.end());
  const auto& rules = found->second.rules;
  const auto after = rules.upper_bound(version);
  return after == rules.begin() ? nullptr : &std::prev(after)->second;
}

void ArrayParts::Assign(Part& part) {
  if (!part.info.row_sparse) {
    part.value = part.TakeSum();
    return;
  }
  storage::SumRowSparse(part.held_rows, part.rows);
  part.held_rows.clear();
}

bool ArrayParts::Update(const PartId& id, const UpdateBy& by, std::exception_ptr* error) {
  const auto found = parts_.find(id);
  CHECK(found != parts_.end());
  const std::shared_ptr<Part>& part = found->second;
  const Rule* const rule = RuleOf(id.store, by.version);
  if (rule != nullptr && rule->needs_norms && part->info.num_parts > 1 && !part->info.row_sparse) {
    return UpdateTogether(part, *rule, by.rates, error);
  }
  const std::int64_t bytes =
      part->info.row_sparse ? kInlineBytes + 1 : static_cast<std::int64_t>(part->bytes());
  if ((rule == nullptr && !part->info.row_sparse) || bytes <= kInlineBytes) {
    try {
      if (rule == nullptr) {
        Assign(*part);
      } else {
        Apply(*part, *rule, by.rates);
      }
    } catch (...) {
      *error = std::current_exception();
    }
    return true;
  }
  if (!part->var) part->var = engine_.NewVar("dist.part");
  const NoWaitScope no_wait;  // the node's lock is held
  engine_.Push({.name = "dist.update", .writes = {part->var}},
               [this, part, rule = rule != nullptr ? *rule : Rule(), rates = by.rates] {
                 const engine::UncheckedScope own;  // the part is this op's alone
                 std::exception_ptr failure;
                 try {
                   if (rule.plan == nullptr) {
                     Assign(*part);
                   } else {
                     Apply(*part, rule, rates);
                   }
                 } catch (...) {
                   failure = std::current_exception();
                 }
                 updated_(part->id, std::move(failure));
               });
  return false;
}

// An update of a dense part, whose gradient and weight are at hand.
struct ArrayParts::Begun {
  Part* part;
  ArrayUpdate update;
  const void* gradient;
  Payload lone;                  // keeps the gradient
  std::shared_ptr<Value> total;  // or this does
};

ArrayParts::Begun ArrayParts::Begin(Part& part, const Rule& rule, const UpdateRates& rates) const {
  if (part.value->array.empty() || part.value->lent()) {
    NDArray copy = part.NewArray(part.info.dtype);
    ops::Copy(part.value->data, copy.data(), part.bytes());
    part.value = std::make_shared<Value>(std::move(copy));
  }
  Begun begun{.part = &part, .update = {}, .gradient = nullptr, .lone = {}, .total = nullptr};
  // A lone gradient is read where it lies.
  if (part.held.size() == 1 && part.sum.empty()) {
    begun.lone = part.held[0];
    begun.gradient = InPlace(begun.lone, SizeOf(part.info.dtype));
  }
  if (begun.gradient != nullptr) {
    part.held.clear();
  } else {
    begun.total = part.TakeSum();
    begun.gradient = begun.total->data;
  }
  begun.update = part.state->Begin(*rule.plan->rule, part.info.key, part.value->array,
                                   rates.learning_rate, rates.weight_decay);
  begun.update.first_element = part.info.begin;
  return begun;
}

namespace {

// Makes the state of the part that the rule works with.
template <class Part>
void ReadyState(Part& part, bool multi_precision, std::uint64_t generation) {
  if (part.state != nullptr && part.generation == generation) return;
  part.state = std::make_unique<UpdateState>(multi_precision);
  part.generation = generation;
}

}  // namespace

void ArrayParts::Apply(Part& part, const Rule& rule, const UpdateRates& rates) const {
  ReadyState(part, rule.plan->multi_precision, rule.generation);
  if (part.info.row_sparse) {
    const std::vector<RowSparseNDArray> gradients = std::exchange(part.held_rows, {});
    UpdateArray(part.state->Begin(*rule.plan->rule, part.info.key, part.rows, rates.learning_rate,
                                  rates.weight_decay),
                gradients, part.rows);
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
  UpdateElements(begun.update, 0, weight.size(), begun.gradient, weight.data());
}

// False, as Update does, unless the parts cannot be updated together.
bool ArrayParts::UpdateTogether(const std::shared_ptr<Part>& part, const Rule& rule,
                                const UpdateRates& rates, std::exception_ptr* error) {
  const PartId& id = part->id;
  const PartInfo& info = part->info;
  Together& together = together_[{id.store, id.key}];
  if (together.expected == 0) {
    const std::vector<PlacedPart> placed =
        PlaceKey(id.key, info.shape, info.dtype, info.row_sparse, placement_);
    const bool here = std::ranges::all_of(
        placed, [&](const PlacedPart& other) { return other.server == placed[0].server; });
    const bool async = stores_[id.store].async;
    if (!here || async) {
      *error = Invalid(fmt::format(
          "key {}: optimizer {} needs the norm of the whole array, which is cut {}; a larger bound "
          "of arrays to cut (HEDDLE_BIGARRAY_BOUND) keeps it together",
          ToString(KeyRef(info.key)), rule.optimizer->name(),
          here ? "into parts that dist_async updates one by one" : "over several servers"));
      DropSum(id);
      return true;
    }
    together.expected = placed.size();
  }
  together.parts.push_back(part);
  if (together.parts.size() < together.expected) return false;
  std::vector<std::shared_ptr<Part>> parts = std::exchange(together.parts, {});
  std::ranges::sort(parts, {}, [](const auto& each) { return each->id.part; });
  std::vector<VarRef> vars;
  for (const auto& each : parts) {
    if (!each->var) each->var = engine_.NewVar("dist.part");
    vars.push_back(each->var);
  }
  const NoWaitScope no_wait;  // the node's lock is held
  engine_.Push({.name = "dist.update", .writes = vars}, [this, parts, rule, rates] {
    const engine::UncheckedScope own;  // the parts are this op's alone
    std::exception_ptr failure;
    try {
      ApplyTogether(parts, rule, rates);
    } catch (...) {
      failure = std::current_exception();
    }
    for (const auto& each : parts) updated_(each->id, failure);
  });
  return false;
}

void ArrayParts::ApplyTogether(std::span<const std::shared_ptr<Part>> parts, const Rule& rule,
                               const UpdateRates& rates) const {
  std::vector<Begun> all;
  for (const auto& part : parts) {
    ReadyState(*part, rule.plan->multi_precision, rule.generation);
    all.push_back(Begin(*part, rule, rates));
  }
  const std::int64_t elements = parts.back()->info.end;
  const std::size_t blocks = ops::ReductionBlocks(static_cast<std::size_t>(elements));
  std::vector<double> block_sums(internal::kUpdateSumsMax * blocks);
  const auto run_pass = [&] {
    engine_.ParallelFor(
        static_cast<std::int64_t>(all.size()), 1, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t i = begin; i < end; ++i) {
            const Begun& each = all[static_cast<std::size_t>(i)];
            const NDArray& weight = each.part->value->array;
            UpdateElements(each.update, 0, weight.size(), each.gradient, weight.data());
          }
        });
  };
  for (int pass = 0; pass + 1 < all[0].update.passes; ++pass) {
    for (Begun& each : all) {
      each.update.key.pass = pass;
      const std::int64_t first =
          each.part->info.begin / static_cast<std::int64_t>(ops::kReductionBlock);
      for (std::size_t i = 0; i < internal::kUpdateSumsMax; ++i) {
        each.update.run.block_sums[i] = block_sums.data() + i * blocks + first;
      }
    }
    run_pass();
    for (std::size_t i = 0; i < internal::kUpdateSumsMax; ++i) {
      const double sum = ops::AddBlocks({block_sums.data() + i * blocks, blocks});
      for (Begun& each : all) each.update.key.sums[static_cast<std::size_t>(pass)][i] = sum;
    }
  }
  for (Begun& each : all) {
    each.update.key.pass = each.update.passes - 1;
    each.update.run.block_sums = {};
  }
  run_pass();
}

}  // namespace heddle::kvstore::dist
