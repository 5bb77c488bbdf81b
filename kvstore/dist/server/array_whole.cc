// Updates of all parts of an array together, for optimizers that need norms of the whole array.
#include <heddle/error.h>

#include <algorithm>
#include <set>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "engine/access_check.h"
#include "kvstore/array_kernels.h"
#include "kvstore/dist/server/array_part.h"
#include "kvstore/optimizer/update_plan.h"
#include "kvstore/row_sparse_update.h"
#include "ops/reduce.h"

namespace heddle::kvstore::dist {

namespace {

constexpr auto kBlock = static_cast<std::int64_t>(ops::kReductionBlock);
static_assert(kPartAlignment % kBlock == 0, "parts consist of whole blocks");

struct Blocks {
  std::size_t first;
  std::size_t count;
};

// Those of a server, whose parts follow one another; it may have none.
Blocks BlocksOf(std::span<const PlacedPart> placed, std::int32_t server) {
  const auto is_its = [&](const PlacedPart& part) { return part.server == server; };
  const auto first = std::ranges::find_if(placed, is_its);
  if (first == placed.end()) return {.first = 0, .count = 0};
  const auto end = std::find_if_not(first, placed.end(), is_its);
  const auto begin = static_cast<std::size_t>(first->begin / kBlock);
  return {begin, ops::ReductionBlocks(static_cast<std::size_t>(std::prev(end)->end)) - begin};
}

}  // namespace

// What an update keeps from pass to pass. Touched by its ops alone.
struct ArrayParts::Whole {
  std::vector<std::shared_ptr<Part>> parts;  // in order
  Rule rule;
  UpdateRates rates;
  std::vector<PlacedPart> placed;  // the parts of all servers
  std::vector<Begun> begun{};
  std::size_t blocks = 0;  // of the whole array
  std::vector<double> block_sums{};

  std::int32_t self() const { return placed[parts[0]->id.part].server; }
  double* SumsOf(std::size_t sum) { return block_sums.data() + sum * blocks; }
};

bool ArrayParts::UpdatesWhole(const PartId& id, std::uint64_t version) {
  const Rule* const rule = RuleOf(id.store, version);
  return rule != nullptr && rule->needs_norms && !Find(id).info.row_sparse &&
         !stores_[id.store].async;
}

std::vector<PlacedPart> ArrayParts::PlaceOf(const Part& part) const {
  return PlaceKey(part.id.key, part.info.shape, part.info.dtype, part.info.row_sparse, placement_);
}

WholeArray ArrayParts::WholeOf(const PartId& id) {
  const std::vector<PlacedPart> placed = PlaceOf(Find(id));
  if (id.part >= placed.size()) {
    throw InvalidArgument(fmt::format("key {}: part {} of an array of {} parts",
                                      ToString(KeyRef(Find(id).info.key)), id.part, placed.size()));
  }
  const std::int32_t self = placed[id.part].server;
  WholeArray whole;
  std::set<std::int32_t> others;
  for (const PlacedPart& part : placed) {
    if (part.server == self) {
      ++whole.parts_here;
    } else {
      others.insert(part.server);
    }
  }
  whole.others.assign(others.begin(), others.end());
  return whole;
}

bool ArrayParts::RunPass(std::span<const PartId> ids, const UpdateBy& by, int pass, OthersSums sums,
                         PassResult* /*result*/) {
  const PartId first = ids.front();
  const Rule* const rule = RuleOf(first.store, by.version);
  if (pass == 0 && rule == nullptr) {
    throw InvalidState(fmt::format("key {}: the optimizer of its update has been taken back",
                                   ToString(KeyRef(Find(first).info.key))));
  }
  std::shared_ptr<Whole>& whole = wholes_[{first.store, first.key}];
  if (pass == 0) {
    whole = std::make_shared<Whole>();
    for (const PartId& id : ids) whole->parts.push_back(parts_.at(id));
    std::ranges::sort(whole->parts, {}, [](const auto& each) { return each->id.part; });
    whole->rule = *rule;
    whole->rates = RatesOf(*whole->parts[0], whole->rule, by);
    whole->placed = PlaceOf(*whole->parts[0]);
  }
  std::vector<VarRef> vars;
  for (const auto& each : whole->parts) {
    if (!each->var) each->var = engine_.NewVar("dist.part");
    vars.push_back(each->var);
  }
  const NoWaitScope no_wait;  // the node's lock is held
  engine_.Push({.name = "dist.update", .reads = {states_}, .writes = vars},
               [this, first, whole = whole, pass, sums = std::move(sums)] {
                 const engine::UncheckedScope own;  // the parts are this op's alone
                 PassResult result;
                 try {
                   result = PassOver(*whole, pass, sums);
                 } catch (...) {
                   result.error = std::current_exception();
                 }
                 if (result.last) whole->begun.clear();
                 passed_(first, std::move(result));
               });
  return false;
}

void ArrayParts::BeginWhole(Whole& whole) const {
  for (const auto& part : whole.parts) {
    part->ReadyState(whole.rule.plan->multi_precision, whole.rule.generation);
    whole.begun.push_back(Begin(*part, whole.rule, whole.rates));
  }
  whole.blocks = ops::ReductionBlocks(static_cast<std::size_t>(whole.placed.back().end));
  whole.block_sums.resize(internal::kUpdateSumsMax * whole.blocks);
}

// Adds up what `pass` has summed, here and elsewhere.
void ArrayParts::TakeSums(Whole& whole, int pass, const OthersSums& sums) const {
  for (const auto& [server, payload] : sums) {
    const Blocks theirs = BlocksOf(whole.placed, server);
    const std::size_t bytes = theirs.count * sizeof(double);
    if (theirs.count == 0 || payload.bytes() != internal::kUpdateSumsMax * bytes) {
      throw NetworkError(fmt::format("key {}: expected {} bytes of sums from server {}, got {}",
                                     ToString(KeyRef(whole.parts[0]->info.key)),
                                     internal::kUpdateSumsMax * bytes, server, payload.bytes()));
    }
    for (std::size_t i = 0; i < internal::kUpdateSumsMax; ++i) {
      CopyOut(payload, i * bytes, whole.SumsOf(i) + theirs.first, bytes);
    }
  }
  for (std::size_t i = 0; i < internal::kUpdateSumsMax; ++i) {
    const double sum = ops::AddBlocks({whole.SumsOf(i), whole.blocks});
    for (Begun& each : whole.begun) each.update.key.sums[static_cast<std::size_t>(pass)][i] = sum;
  }
}

PassResult ArrayParts::PassOver(Whole& whole, int pass, const OthersSums& sums) const {
  if (pass == 0) {
    BeginWhole(whole);
  } else {
    TakeSums(whole, pass - 1, sums);
  }
  PassResult result;
  result.last = pass + 1 == whole.begun[0].update.passes;
  for (Begun& each : whole.begun) {
    each.update.key.pass = pass;
    each.update.run.block_sums = {};
    const std::int64_t first = each.part->info.begin / kBlock;
    for (std::size_t i = 0; i < internal::kUpdateSumsMax && !result.last; ++i) {
      each.update.run.block_sums[i] = whole.SumsOf(i) + first;
    }
  }
  engine_.ParallelFor(
      static_cast<std::int64_t>(whole.begun.size()), 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          const Begun& each = whole.begun[static_cast<std::size_t>(i)];
          const NDArray& weight = each.part->value->array;
          if (result.last && !each.rows.empty() &&
              each.update.rule->lazy(/*row_sparse_weight=*/false)) {
            UpdateRows(each.update, each.rows, weight, each.part->part_rows());
          } else {
            UpdateElements(each.update, 0, weight.size(), each.gradient, weight.data());
          }
        }
      });
  if (result.last) return result;
  const Blocks mine = BlocksOf(whole.placed, whole.self());
  const auto copy = std::make_shared<std::vector<double>>();
  for (std::size_t i = 0; i < internal::kUpdateSumsMax; ++i) {
    const double* const from = whole.SumsOf(i) + mine.first;
    copy->insert(copy->end(), from, from + mine.count);
  }
  result.sums = Payload(copy, std::as_bytes(std::span<const double>(*copy)));
  return result;
}

}  // namespace heddle::kvstore::dist
