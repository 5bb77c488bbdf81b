#include "kvstore/dist/server/array_parts.h"

#include <heddle/error.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "engine/access_check.h"
#include "kvstore/array_kernels.h"
#include "kvstore/optimizer/update_plan.h"
#include "kvstore/row_sparse_update.h"
#include "kvstore/update_state.h"
#include "ops/cast.h"
#include "ops/copy.h"
#include "ops/reduce.h"
#include "ops/row_ids.h"
#include "ops/row_sparse.h"
#include "ops/sum.h"
#include "storage/row_sparse_kernels.h"

namespace heddle::kvstore::dist {

namespace {

bool Is16Bit(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

std::int64_t RowElements(const Shape& shape) {
  std::int64_t elements = 1;
  for (std::size_t axis = 1; axis < shape.ndim(); ++axis) elements *= shape[axis];
  return elements;
}

// The shape of rows [0, rows) of an array of shape `whole`.
Shape WithRows(const Shape& whole, std::int64_t rows) {
  std::vector<std::int64_t> dims(whole.begin(), whole.end());
  dims.at(0) = rows;
  return Shape(std::span<const std::int64_t>(dims));
}

void CopyOut(const Payload& payload, std::size_t offset, void* out, std::size_t bytes) {
  auto* to = static_cast<std::byte*>(out);
  for (std::span<const std::byte> run : payload.runs()) {
    const std::size_t skipped = std::min(offset, run.size());
    offset -= skipped;
    const std::size_t count = std::min(run.size() - skipped, bytes);
    if (count > 0) ops::Copy(run.data() + skipped, to, count);
    to += count;
    bytes -= count;
    if (bytes == 0) return;
  }
  DCHECK(bytes == 0);
}

// The elements where they lie, if they lie together and aligned; else null.
const void* InPlace(const Payload& payload, std::size_t alignment) {
  if (payload.runs().size() != 1) return nullptr;
  const void* const data = payload.runs()[0].data();
  return reinterpret_cast<std::uintptr_t>(data) % alignment == 0 ? data : nullptr;
}

std::exception_ptr Invalid(const std::string& message) {
  return std::make_exception_ptr(InvalidArgument(message));
}

}  // namespace

// A dense value: elements that are written only while nobody reads them.
struct ArrayParts::Value {
  explicit Value(NDArray own) : array(std::move(own)), data(array.data()) {}
  explicit Value(const Payload& payload)
      : data(const_cast<std::byte*>(payload.runs()[0].data())), owner(payload.owner()) {}

  bool lent() const { return readers.load(std::memory_order_acquire) > 0; }  // pairs with Lend's

  static Payload Lend(const std::shared_ptr<Value>& self, std::size_t bytes) {
    self->readers.fetch_add(1, std::memory_order_relaxed);
    std::shared_ptr<const void> lease(self->data, [self](const void*) {
      self->readers.fetch_sub(1, std::memory_order_release);  // pairs with lent's acquire
    });
    return {std::move(lease), {static_cast<const std::byte*>(self->data), bytes}};
  }

  NDArray array;  // empty: the memory is a payload's
  void* data;
  std::shared_ptr<const void> owner;
  std::atomic<int> readers{0};
};

struct ArrayParts::Part {
  Part(const PartId& part_id, PartInfo part_info, Engine& part_engine)
      : id(part_id), info(std::move(part_info)), engine(part_engine) {}

  std::int64_t extent() const { return info.end - info.begin; }  // elements, or rows
  std::size_t bytes() const {
    return static_cast<std::size_t>(extent()) * SizeOf(info.dtype);  // of a dense part
  }
  std::size_t row_bytes() const {
    return static_cast<std::size_t>(RowElements(info.shape)) * SizeOf(info.dtype);
  }
  // Rules that work on rows need to see them.
  Shape shape() const { return info.num_parts == 1 ? info.shape : Shape{extent()}; }
  NDArray NewArray(DType dtype) const { return NDArray(shape(), dtype, Cpu(), engine); }
  NDArray ToArray(const Payload& payload) const {
    NDArray array = NewArray(info.dtype);
    CopyOut(payload, 0, array.data(), bytes());
    return array;
  }
  RowSparseNDArray ToRows(const Payload& payload) const;

  void AddDense(const Payload& payload);
  void AddCodes(const Payload& codes, const Compressor& compressor);
  void RoundSum();
  std::shared_ptr<Value> TakeSum();

  const PartId id;
  const PartInfo info;
  Engine& engine;
  Var var;  // of the ops that update it; empty before the first

  // One of the two is empty.
  std::shared_ptr<Value> value;
  RowSparseNDArray rows;

  // The sum in progress: `held`, to be added to `sum` unless that is empty.
  std::vector<Payload> held;
  NDArray sum;
  NDArray float_sum;  // of codes
  std::vector<RowSparseNDArray> held_rows;

  std::unique_ptr<UpdateState> state;
  std::uint64_t generation = 0;  // of `state`
};

RowSparseNDArray ArrayParts::Part::ToRows(const Payload& payload) const {
  const std::size_t count = payload.bytes() / (sizeof(std::int64_t) + row_bytes());
  std::vector<std::int64_t> ids(count);
  CopyOut(payload, 0, ids.data(), count * sizeof(std::int64_t));
  for (std::int64_t& id : ids) id -= info.begin;
  RowSparseNDArray array(WithRows(info.shape, extent()), info.dtype, Cpu(), engine);
  array.SetRowIds(ids);
  if (count > 0) {
    CopyOut(payload, count * sizeof(std::int64_t), array.rows(), count * row_bytes());
  }
  return array;
}

void ArrayParts::Part::AddDense(const Payload& payload) {
  held.push_back(payload);
  if (Is16Bit(info.dtype) || (sum.empty() && held.size() == 1)) return;
  RoundSum();
}

// Adds what is held.
void ArrayParts::Part::RoundSum() {
  std::vector<NDArray> copies;
  std::vector<const void*> inputs;
  if (!sum.empty()) inputs.push_back(sum.data());
  for (const Payload& payload : held) {
    const void* data = InPlace(payload, SizeOf(info.dtype));
    if (data == nullptr) data = copies.emplace_back(ToArray(payload)).data();
    inputs.push_back(data);
  }
  if (sum.empty()) sum = NewArray(info.dtype);
  ops::Sum(info.dtype, inputs, sum.data(), static_cast<std::size_t>(extent()));
  held.clear();
}

void ArrayParts::Part::AddCodes(const Payload& codes, const Compressor& compressor) {
  const auto count = static_cast<std::size_t>(extent());
  std::vector<std::byte> copy;
  const void* code = InPlace(codes, 1);
  if (code == nullptr) {
    copy.resize(codes.bytes());
    CopyOut(codes, 0, copy.data(), copy.size());
    code = copy.data();
  }
  if (float_sum.empty()) {
    float_sum = NewArray(DType::kFloat32);
    compressor.Decompress(code, float_sum.data<float>(), count);
    return;
  }
  const NDArray decoded = NewArray(DType::kFloat32);
  compressor.Decompress(code, decoded.data<float>(), count);
  const std::array<const void*, 2> inputs = {float_sum.data(), decoded.data()};
  ops::Sum(DType::kFloat32, inputs, float_sum.data(), count);
}

// The sum as a value of its own; nothing is left of it here.
std::shared_ptr<ArrayParts::Value> ArrayParts::Part::TakeSum() {
  if (!float_sum.empty()) {
    NDArray rounded = std::exchange(float_sum, NDArray());
    if (info.dtype != DType::kFloat32) {
      const NDArray wide = std::exchange(rounded, NewArray(info.dtype));
      ops::Cast(DType::kFloat32, wide.data(), info.dtype, rounded.data(),
                static_cast<std::size_t>(extent()));
    }
    return std::make_shared<Value>(std::move(rounded));
  }
  if (sum.empty() && held.size() == 1) {
    const Payload payload = std::move(held[0]);
    held.clear();
    if (payload.owned_alone() && InPlace(payload, SizeOf(info.dtype)) != nullptr) {
      return std::make_shared<Value>(payload);
    }
    return std::make_shared<Value>(ToArray(payload));
  }
  if (!held.empty()) RoundSum();
  return std::make_shared<Value>(std::exchange(sum, NDArray()));
}

// ---- Parts

ArrayParts::Part& ArrayParts::Find(const PartId& id) {
  const auto found = parts_.find(id);
  CHECK(found != parts_.end());
  return *found->second;
}

void ArrayParts::Create(const PartId& id, const PartInfo& info, const Payload& value) {
  auto part = std::make_shared<Part>(id, info, engine_);
  if (info.row_sparse) {
    part->rows = part->ToRows(value);
  } else {
    part->value = std::make_shared<Value>(part->ToArray(value));
  }
  parts_.emplace(id, std::move(part));
}

void ArrayParts::Reset(const PartId& id, const Payload& value) {
  Part& part = Find(id);
  DropSum(id);
  if (part.info.row_sparse) {
    part.rows = part.ToRows(value);
  } else {
    part.value = std::make_shared<Value>(part.ToArray(value));
  }
  part.state = nullptr;
}

std::exception_ptr ArrayParts::Check(const PartId& id, const Message& message) {
  const Part& part = Find(id);
  const PartInfo& info = part.info;
  const auto what = [&] {
    return fmt::format("key {}, part {} of {}", ToString(KeyRef(info.key)), id.part,
                       info.num_parts);
  };
  const bool row_sparse = (message.flags & kFlagRowSparse) != 0 || message.kind == Kind::kRowPull;
  if (message.kind == Kind::kPull) return nullptr;
  if (row_sparse != info.row_sparse) {
    return Invalid(fmt::format("{}: expected a {} array, as the value is, got a {} one", what(),
                               info.row_sparse ? "row-sparse" : "dense",
                               row_sparse ? "row-sparse" : "dense"));
  }
  const std::uint64_t bytes = message.payload.bytes();
  if (message.kind == Kind::kRowPull || row_sparse) {
    const std::size_t stride =
        sizeof(std::int64_t) + (message.kind == Kind::kRowPull ? 0 : part.row_bytes());
    if (bytes % stride != 0) {
      return Invalid(
          fmt::format("{}: expected a multiple of {} bytes, got {}", what(), stride, bytes));
    }
    std::vector<std::int64_t> ids(bytes / stride);
    CopyOut(message.payload, 0, ids.data(), ids.size() * sizeof(std::int64_t));
    if (!ops::IsSortedUnique(ids)) {
      return Invalid(fmt::format("{}: expected row ids that are sorted and unique", what()));
    }
    if (!ids.empty() && (ids.front() < info.begin || ids.back() >= info.end)) {
      return Invalid(fmt::format("{}: expected row ids in [{}, {}), got {} to {}", what(),
                                 info.begin, info.end, ids.front(), ids.back()));
    }
  }
  if (message.kind == Kind::kRowPull) return nullptr;
  if (message.dtype != info.dtype) {
    return Invalid(fmt::format("{}: expected dtype {}, got {}", what(), Name(info.dtype),
                               Name(message.dtype)));
  }
  if (row_sparse) return nullptr;
  std::uint64_t expected = part.bytes();
  if ((message.flags & kFlagCompressed) != 0) {
    const auto store = stores_.find(id.store);
    if (store == stores_.end() || store->second.compressor == nullptr) {
      return Invalid(fmt::format("{}: got codes, expected none before compression is set", what()));
    }
    expected = static_cast<std::uint64_t>(store->second.compressor->CodeBytes(part.extent()));
  }
  if (bytes != expected) {
    return Invalid(fmt::format("{}: expected {} bytes, got {}", what(), expected, bytes));
  }
  return nullptr;
}

// ---- Sums

void ArrayParts::Add(const PartId& id, const Message& push, bool first) {
  Part& part = Find(id);
  if (first) DropSum(id);
  if (part.info.row_sparse) {
    part.held_rows.push_back(part.ToRows(push.payload));
  } else if ((push.flags & kFlagCompressed) != 0) {
    part.AddCodes(push.payload, *stores_[id.store].compressor);
  } else {
    part.AddDense(push.payload);
  }
}

void ArrayParts::DropSum(const PartId& id) {
  Part& part = Find(id);
  part.held.clear();
  part.sum = NDArray();
  part.float_sum = NDArray();
  part.held_rows.clear();
}

// ---- Updates

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

void ArrayParts::SetCompression(std::uint32_t store, std::shared_ptr<const Compressor> compressor) {
  stores_[store].compressor = std::move(compressor);
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

// ---- Pulls

Payload ArrayParts::Read(const PartId& id, const Message& pull) {
  const Part& part = Find(id);
  if (!part.info.row_sparse) {
    const auto count = static_cast<std::size_t>(part.extent());
    if (pull.dtype == part.info.dtype) return Value::Lend(part.value, part.bytes());
    const auto cast = std::make_shared<Value>(part.NewArray(pull.dtype));
    ops::Cast(part.info.dtype, part.value->data, pull.dtype, cast->data, count);
    return Value::Lend(cast, count * SizeOf(pull.dtype));
  }
  RowSparseNDArray found = part.rows;
  if (pull.kind == Kind::kRowPull) {
    std::vector<std::int64_t> ids(pull.payload.bytes() / sizeof(std::int64_t));
    CopyOut(pull.payload, 0, ids.data(), ids.size() * sizeof(std::int64_t));
    for (std::int64_t& row : ids) row -= part.info.begin;
    found = RowSparseNDArray(part.rows.shape(), pull.dtype, Cpu(), engine_);
    storage::GatherRowSparse(part.rows, ids, {&found, 1});
  }
  // Ids and rows in one piece of memory of the answer's own: rows move when others are inserted.
  const auto rows = static_cast<std::size_t>(found.num_rows());
  const auto row_elements = static_cast<std::size_t>(RowElements(part.info.shape));
  const std::size_t ids_bytes = rows * sizeof(std::int64_t);
  const std::size_t bytes = ids_bytes + rows * row_elements * SizeOf(pull.dtype);
  const NDArray memory({static_cast<std::int64_t>(bytes)}, DType::kUInt8, Cpu(), engine_);
  auto* const to = static_cast<std::byte*>(memory.data());
  const std::span<const std::int64_t> ids = found.row_ids();
  for (std::size_t i = 0; i < rows; ++i) {
    const std::int64_t global = ids[i] + part.info.begin;
    std::memcpy(to + i * sizeof(global), &global, sizeof(global));
  }
  if (rows > 0) {
    ops::Cast(found.dtype(), found.const_rows(), pull.dtype, to + ids_bytes, rows * row_elements);
  }
  return Value::Lend(std::make_shared<Value>(memory), bytes);
}

// ---- States

std::vector<VarRef> ArrayParts::VarsOf(std::uint32_t store) const {
  std::vector<VarRef> vars;
  for (const auto& [id, part] : parts_) {
    if (id.store == store && part->var) vars.push_back(part->var);
  }
  return vars;
}

std::pair<StatesBody, Payload> ArrayParts::SaveStates(std::uint32_t store) const {
  StatesBody body;
  std::vector<NDArray> arrays;
  for (const auto& [id, part] : parts_) {
    if (id.store != store || part->state == nullptr) continue;
    const UpdateState& state = *part->state;
    PartStates saved;
    saved.part = id;
    saved.info = part->info;
    saved.updates = state.step;
    saved.numbers.assign(state.numbers.begin(), state.numbers.end());
    const auto save = [&](std::string name, const NDArray& array, const NDArray& restored) {
      const NDArray& source = array.empty() ? restored : array;
      if (source.empty()) return;
      NDArray copy(source.shape(), source.dtype(), Cpu(), engine_);
      ops::Copy(source.const_data(), copy.data(), static_cast<std::size_t>(source.bytes()));
      saved.arrays.push_back({std::move(name), source.dtype(), source.size()});
      arrays.push_back(std::move(copy));
    };
    save("master", state.master, state.restored_master);
    for (std::size_t i = 0; i < state.arrays.size(); ++i) {
      save(std::to_string(i), state.arrays[i], state.restored[i]);
    }
    body.parts.push_back(std::move(saved));
  }
  auto owner = std::make_shared<const std::vector<NDArray>>(std::move(arrays));
  std::vector<std::span<const std::byte>> runs;
  for (const NDArray& array : *owner) {
    runs.emplace_back(static_cast<const std::byte*>(array.const_data()),
                      static_cast<std::size_t>(array.bytes()));
  }
  return {std::move(body), Payload(std::move(owner), std::move(runs))};
}

void ArrayParts::LoadStates(std::uint32_t store, const StatesBody& states, const Payload& arrays) {
  const auto rules = stores_.find(store);
  if (rules == stores_.end() || rules->second.rules.empty()) {
    throw InvalidState("loading the optimizer's states: expected an optimizer, got none");
  }
  const Rule& rule = std::prev(rules->second.rules.end())->second;
  std::vector<std::pair<Part*, std::unique_ptr<UpdateState>>> loaded;
  std::size_t offset = 0;
  for (const PartStates& saved : states.parts) {
    const auto found = parts_.find(saved.part);
    if (found == parts_.end() || !(found->second->info == saved.info)) {
      throw InvalidArgument(fmt::format(
          "loading the optimizer's states: key {}, part {}: expected a part of this server",
          ToString(KeyRef(saved.info.key)), saved.part.part));
    }
    auto state = std::make_unique<UpdateState>(rule.plan->multi_precision);
    state->step = saved.updates;
    if (saved.numbers.size() != state->numbers.size()) {
      throw InvalidArgument("loading the optimizer's states: a wrong count of numbers");
    }
    std::ranges::copy(saved.numbers, state->numbers.begin());
    for (const PartStates::Array& array : saved.arrays) {
      NDArray copy({array.elements}, array.dtype, Cpu(), engine_);
      if (arrays.bytes() - offset < static_cast<std::uint64_t>(copy.bytes())) {
        throw InvalidArgument("loading the optimizer's states: arrays are missing");
      }
      CopyOut(arrays, offset, copy.data(), static_cast<std::size_t>(copy.bytes()));
      offset += static_cast<std::size_t>(copy.bytes());
      if (array.name == "master") {
        state->restored_master = std::move(copy);
        continue;
      }
      const std::size_t place = array.name.size() == 1 ? array.name[0] - '0' : state->arrays.size();
      if (place >= state->arrays.size()) {
        throw InvalidArgument(
            fmt::format("loading the optimizer's states: unknown array '{}'", array.name));
      }
      state->restored[place] = std::move(copy);
    }
    loaded.emplace_back(found->second.get(), std::move(state));
  }
  for (auto& [part, state] : loaded) {
    part->state = std::move(state);
    part->generation = rule.generation;
  }
}

}  // namespace heddle::kvstore::dist
