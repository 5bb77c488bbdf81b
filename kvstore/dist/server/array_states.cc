// The optimizer's states of a store, saved and loaded.
#include <heddle/error.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "base/log.h"
#include "kvstore/dist/server/array_part.h"
#include "kvstore/optimizer/update_plan.h"
#include "ops/convert.h"
#include "ops/copy.h"

namespace heddle::kvstore::dist {

namespace {

// What an updater of the server's own keeps of a key is one array of bytes.
constexpr const char* kOwnName = "own";

// The states of some parts: what is said of them, and the arrays.
class Saved {
 public:
  explicit Saved(Engine& engine) : engine_(engine) {}

  bool is_full() const {
    return meta_bytes_ > kStatesMetaBytesMax / 2 || payload_bytes_ > kStatesPayloadBytesMax / 2;
  }

  void Add(PartStates states) {
    meta_bytes_ += Encode(StatesBody{.optimizer = {}, .parts = {states}}).size();
    body_.parts.push_back(std::move(states));
  }
  // A copy of an array of `to`.
  void AddArray(std::string name, const void* from, const Shape& shape, DType dtype,
                PartStates* to) {
    NDArray copy(shape, dtype, Cpu(), engine_);
    if (copy.bytes() > 0) {
      ops::Copy(from, copy.data(), static_cast<std::size_t>(copy.bytes()));
    }
    payload_bytes_ += static_cast<std::uint64_t>(copy.bytes());
    to->arrays.push_back({std::move(name), dtype, copy.size()});
    arrays_.push_back(std::move(copy));
  }

  std::pair<StatesBody, Payload> Take() {
    auto owner = std::make_shared<const std::vector<NDArray>>(std::move(arrays_));
    std::vector<std::span<const std::byte>> runs;
    for (const NDArray& array : *owner) {
      runs.emplace_back(static_cast<const std::byte*>(array.const_data()),
                        static_cast<std::size_t>(array.bytes()));
    }
    return {std::move(body_), Payload(std::move(owner), std::move(runs))};
  }

 private:
  Engine& engine_;
  StatesBody body_;
  std::vector<NDArray> arrays_;
  std::size_t meta_bytes_ = 0;
  std::uint64_t payload_bytes_ = 0;
};

void SaveState(const UpdateState& state, Saved* saved, PartStates* to) {
  to->updates = state.step;
  std::ranges::copy(state.numbers, to->numbers.begin());
  const auto save = [&](std::string name, const NDArray& array, const NDArray& restored) {
    const NDArray& source = array.empty() ? restored : array;
    if (source.empty()) return;
    saved->AddArray(std::move(name), source.const_data(), source.shape(), source.dtype(), to);
  };
  save("master", state.master, state.restored_master);
  for (std::size_t i = 0; i < state.arrays.size(); ++i) {
    save(std::to_string(i), state.arrays[i], state.restored[i]);
  }
}

[[noreturn]] void ThrowUnfit(std::string_view problem) {
  throw InvalidArgument(fmt::format("loading the optimizer's states: {}", problem));
}

// Takes the arrays of a message one after the other.
class ArrayReader {
 public:
  ArrayReader(const Payload& payload, Engine& engine) : payload_(payload), engine_(engine) {}

  NDArray Next(const PartStates::Array& array) {
    const std::uint64_t elements_left = (payload_.bytes() - offset_) / SizeOf(array.dtype);
    if (elements_left < static_cast<std::uint64_t>(array.elements)) {
      ThrowUnfit("arrays are missing");
    }
    NDArray copy({array.elements}, array.dtype, Cpu(), engine_);
    CopyOut(payload_, offset_, copy.data(), static_cast<std::size_t>(copy.bytes()));
    offset_ += static_cast<std::size_t>(copy.bytes());
    return copy;
  }

 private:
  const Payload& payload_;
  Engine& engine_;
  std::size_t offset_ = 0;
};

// Elements of a state of a part.
std::int64_t StateElements(const PartInfo& info, bool per_row) {
  const std::int64_t extent = info.end - info.begin;
  if (info.row_sparse) return per_row ? extent : extent * RowSizeOf(info.shape);
  const Shape shape = info.num_parts == 1 ? info.shape : Shape{extent};
  if (!per_row) return shape.size();
  return shape.ndim() > 0 ? shape[0] : 1;
}

// `saved.info` is the part's. What is restored must be as the update makes it, which copies it.
std::unique_ptr<UpdateState> LoadState(const PartStates& saved, const internal::UpdatePlan& plan,
                                       ArrayReader* arrays) {
  const PartInfo& info = saved.info;
  auto state = std::make_unique<UpdateState>(plan.multi_precision);
  state->step = saved.updates;
  if (saved.numbers.size() != state->numbers.size()) ThrowUnfit("a wrong count of numbers");
  std::ranges::copy(saved.numbers, state->numbers.begin());
  const bool has_master = plan.multi_precision && ops::Is16BitFloat(info.dtype);
  const DType dtype = has_master ? DType::kFloat32 : info.dtype;
  const std::span<const internal::UpdateStateType> types = plan.rule->states();
  for (const PartStates::Array& array : saved.arrays) {
    const auto what = [&] {
      return fmt::format("key {}, part {} of {}: array '{}'", ToString(KeyRef(info.key)),
                         saved.part.part, info.num_parts, array.name);
    };
    const bool is_master = has_master && array.name == "master";
    const std::size_t place = array.name.size() == 1 ? array.name[0] - '0' : types.size();
    if (!is_master && place >= types.size()) {
      ThrowUnfit(fmt::format("{}: expected {}a number below {}", what(),
                             has_master ? "'master' or " : "", types.size()));
    }
    const std::int64_t elements = StateElements(info, !is_master && types[place].per_row);
    if (array.elements != elements || array.dtype != dtype) {
      ThrowUnfit(fmt::format("{}: expected {} elements of {}, got {} of {}", what(), elements,
                             Name(dtype), array.elements, Name(array.dtype)));
    }
    (is_master ? state->restored_master : state->restored[place]) = arrays->Next(array);
  }
  return state;
}

NDArray LoadOwn(const PartStates& saved, ArrayReader* arrays) {
  if (saved.arrays.size() != 1 || saved.arrays[0].name != kOwnName ||
      saved.arrays[0].dtype != DType::kUInt8) {
    ThrowUnfit(fmt::format("key {}: expected the state of an optimizer of the servers' own",
                           ToString(KeyRef(saved.info.key))));
  }
  return arrays->Next(saved.arrays[0]);
}

}  // namespace

std::pair<StatesBody, Payload> ArrayParts::SaveStates(std::uint32_t store,
                                                      const std::optional<PartId>& after) const {
  const Rule* const rule = LatestRuleOf(store);
  const bool is_own = rule != nullptr && rule->updater.update;
  if (is_own && !rule->updater.save_state) {
    throw InvalidState(fmt::format(
        "saving the optimizer's states: expected an optimizer that gives them away, got {}, which "
        "the server keeps them for",
        rule->optimizer->name()));
  }
  std::vector<PartId> ids;
  // What an earlier optimizer has left is none of this one's states.
  const auto has_state = [&](const Part& part) {
    return is_own ||
           (rule != nullptr && part.state != nullptr && part.generation == rule->generation);
  };
  for (const auto& [id, part] : parts_) {
    if (id.store == store && has_state(*part) && (!after || *after < id)) ids.push_back(id);
  }
  std::ranges::sort(ids);
  Saved saved(engine_);
  for (const PartId& id : ids) {
    if (saved.is_full()) break;
    const Part& part = *parts_.at(id);
    PartStates states;
    states.part = id;
    states.info = part.info;
    states.numbers.resize(internal::kUpdateNumbersMax);
    if (is_own) {
      const std::optional<std::string> own = rule->updater.save_state(part.info.key);
      if (!own) continue;
      saved.AddArray(kOwnName, own->data(), Shape{static_cast<std::int64_t>(own->size())},
                     DType::kUInt8, &states);
    } else {
      SaveState(*part.state, &saved, &states);
    }
    saved.Add(std::move(states));
  }
  return saved.Take();
}

void ArrayParts::LoadStates(std::uint32_t store, const StatesBody& states, const Payload& arrays) {
  const Rule* const rule = LatestRuleOf(store);
  if (rule == nullptr) {
    throw InvalidState("loading the optimizer's states: expected an optimizer, got none");
  }
  const ServerUpdater& updater = rule->updater;
  if (updater.update && !updater.load_state) {
    throw InvalidState(
        fmt::format("loading the optimizer's states: expected an optimizer that takes them, got {}",
                    rule->optimizer->name()));
  }
  std::vector<std::pair<Part*, std::unique_ptr<UpdateState>>> loaded;
  std::vector<std::pair<KeyRef, NDArray>> own;
  std::vector<KeyRef> fresh;  // of those that the updater keeps itself
  ArrayReader reader(arrays, engine_);
  for (const PartStates& saved : states.parts) {
    const auto found = parts_.find(saved.part);
    if (found == parts_.end() || !(found->second->info == saved.info)) {
      ThrowUnfit(fmt::format("key {}, part {}: expected a part of this server",
                             ToString(KeyRef(saved.info.key)), saved.part.part));
    }
    if (updater.update && saved.arrays.empty()) {
      fresh.emplace_back(found->second->info.key);
    } else if (updater.update) {
      own.emplace_back(found->second->info.key, LoadOwn(saved, &reader));
    } else {
      loaded.emplace_back(found->second.get(), LoadState(saved, *rule->plan, &reader));
    }
  }
  for (auto& [part, state] : loaded) {
    part->state = std::move(state);
    part->generation = rule->generation;
  }
  for (const auto& [key, state] : own) {
    updater.load_state(key, {static_cast<const char*>(state.const_data()),
                             static_cast<std::size_t>(state.bytes())});
  }
  if (!updater.forget) return;
  for (const KeyRef& key : fresh) updater.forget(key);
}

bool ArrayParts::HasOtherLife(const Part& part) const {
  return lives_.at(part.id.store).find(part.info.key)->second.size() > 1;
}

void ArrayParts::Count(const Part& part) { ++lives_[part.id.store][part.info.key][part.id.key]; }

void ArrayParts::Uncount(const Part& part) {
  const auto store = lives_.find(part.id.store);
  const auto name = store->second.find(part.info.key);
  const auto life = name->second.find(part.id.key);
  if (--life->second > 0) return;
  name->second.erase(life);
  if (!name->second.empty()) return;
  store->second.erase(name);
  if (store->second.empty()) lives_.erase(store);
}

const ServerUpdater* ArrayParts::UpdaterThatForgets(const Part& part) const {
  const Rule* const rule = LatestRuleOf(part.id.store);
  return rule != nullptr && rule->updater.forget ? &rule->updater : nullptr;
}

// By an op, between the updates before and those after: it may wait for an update of another key,
// and the network's threads must not.
void ArrayParts::ForgetState(const Part& part) const {
  const ServerUpdater* const updater = UpdaterThatForgets(part);
  if (updater == nullptr) return;
  const NoWaitScope no_wait;  // the node's lock is held
  const auto tell = [key = part.info.key](const std::exception_ptr& error) {
    Log(LogLevel::kError, "key {}: its optimizer has not forgotten it: {}", ToString(KeyRef(key)),
        ToErrorBody(error).message);
  };
  const auto body = [forget = updater->forget, key = part.info.key, tell] {
    try {
      forget(key);
    } catch (...) {
      tell(std::current_exception());
    }
  };
  try {
    engine_.Push({.name = "dist.forget", .writes = {states_}}, body);
  } catch (...) {  // the server ends
    tell(std::current_exception());
  }
}

}  // namespace heddle::kvstore::dist
