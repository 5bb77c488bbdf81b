#include "kvstore/optimizer_states.h"

#include <heddle/error.h>
#include <heddle/files.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "kvstore/key_table.h"
#include "kvstore/optimizer/foreign.h"
#include "kvstore/optimizer/update_plan.h"
#include "ops/convert.h"

namespace heddle::kvstore {

namespace {

using nlohmann::json;

constexpr const char* kMetadataName = "heddle.optimizer_states";
constexpr int kVersion = 2;
constexpr std::string_view kMasterName = "master";
constexpr std::string_view kOwnName = "own";

// The arrays of a key are called "<its place in the list of keys>.<state>".
std::string ArrayName(std::size_t key, std::string_view state) {
  return fmt::format("{}.{}", key, state);
}

// ---- To JSON

json ToJson(const Key& key) {
  return std::visit([](const auto& k) { return json(k); }, key);
}

json ToJson(const WarmUp& warm_up) {
  return {{"steps", warm_up.steps},
          {"begin_rate", warm_up.begin_rate},
          {"is_constant", warm_up.is_constant}};
}

json FieldsOf(const FactorSchedule& s) {
  return {{"type", "factor"}, {"step", s.step}, {"factor", s.factor}, {"stop_rate", s.stop_rate}};
}
json FieldsOf(const MultiFactorSchedule& s) {
  return {{"type", "multi_factor"}, {"steps", s.steps}, {"factor", s.factor}};
}
json FieldsOf(const PolySchedule& s) {
  return {{"type", "poly"},
          {"max_update", s.max_update},
          {"power", s.power},
          {"final_rate", s.final_rate}};
}
json FieldsOf(const CosineSchedule& s) {
  return {{"type", "cosine"}, {"max_update", s.max_update}, {"final_rate", s.final_rate}};
}

json ToJson(const LearningRateSchedule& schedule) {
  return std::visit(
      [](const auto& s) {
        json fields = FieldsOf(s);
        fields["base_rate"] = s.base_rate;
        fields["warm_up"] = ToJson(s.warm_up);
        return fields;
      },
      schedule);
}

json ToJson(const OptimizerSettings& settings) {
  json parameters = json::object();
  for (const auto& [name, value] : settings.parameters) parameters[name] = value;
  json multipliers = json::array();
  for (const auto& m : settings.multipliers) {
    multipliers.push_back({{"key", ToJson(m.key)},
                           {"learning_rate", m.learning_rate},
                           {"weight_decay", m.weight_decay}});
  }
  return {{"parameters", parameters},
          {"schedule", settings.schedule ? ToJson(*settings.schedule) : json()},
          {"multipliers", multipliers}};
}

// The arrays that the key has, by their names in the file.
template <class Use>
void ForEachArray(const KeyStates& key, const internal::UpdateRule& rule, const Use& use) {
  if (!key.master.empty()) use(kMasterName, key.master);
  if (!key.own.empty()) use(kOwnName, key.own);
  for (std::size_t k = 0; k < key.arrays.size(); ++k) {
    if (!key.arrays[k].empty()) use(rule.states()[k].name, key.arrays[k]);
  }
}

json ToJson(const KeyStates& key, const internal::UpdateRule& rule) {
  json arrays = json::array();
  ForEachArray(key, rule, [&](const auto& name, const NDArray&) { arrays.push_back(name); });
  return {{"key", ToJson(key.key)},
          {"shape", std::vector<std::int64_t>(key.shape.begin(), key.shape.end())},
          {"dtype", Name(key.dtype)},
          {"updates", key.updates},
          {"step", key.step},
          {"numbers", key.numbers},
          {"arrays", std::move(arrays)}};
}

json ToJson(const OptimizerStates& states, const internal::UpdateRule& rule) {
  json keys = json::array();
  for (const KeyStates& key : states.keys) keys.push_back(ToJson(key, rule));
  json all = {{"version", kVersion},
              {"optimizer", states.optimizer},
              {"multi_precision", states.multi_precision},
              {"num_update", states.num_update},
              {"keys", keys}};
  if (!states.fixed.empty()) all["fixed"] = states.fixed;
  if (states.settings) all["settings"] = ToJson(*states.settings);
  return all;
}

// ---- From JSON: throws json::exception for what is missing or of the wrong type

bool IsInt64(const json& j) {
  if (j.is_number_unsigned()) {
    return j.get<std::uint64_t>() <= std::uint64_t{std::numeric_limits<std::int64_t>::max()};
  }
  return j.is_number_integer();
}

Key KeyFrom(const json& j) {
  if (j.is_string()) return j.get<std::string>();
  if (!IsInt64(j)) throw IoError("expected a key, an integer of 64 bits or a text");
  return j.get<std::int64_t>();
}

DType DTypeFrom(const json& j) {
  const std::string name = j.get<std::string>();
  for (DType dtype : kAllDTypes) {
    if (Name(dtype) == name) return dtype;
  }
  throw IoError(fmt::format("expected a dtype, found '{}'", name));
}

// The counts go on from there.
constexpr std::int64_t kCountMax = std::int64_t{1} << 62;

std::int64_t CountFrom(const json& j) {
  if (!IsInt64(j) || j.get<std::int64_t>() < 0 || j.get<std::int64_t>() > kCountMax) {
    throw IoError(fmt::format("expected a whole number from 0 to 2^62, found {}",
                              j.is_structured() ? j.type_name() : j.dump()));
  }
  return j.get<std::int64_t>();
}

LearningRateSchedule ScheduleFrom(const json& j) {
  const json& w = j.at("warm_up");
  const WarmUp warm_up = {.steps = CountFrom(w.at("steps")),
                          .begin_rate = w.at("begin_rate").get<double>(),
                          .is_constant = w.at("is_constant").get<bool>()};
  const double base_rate = j.at("base_rate").get<double>();
  const std::string type = j.at("type").get<std::string>();
  if (type == "factor") {
    return FactorSchedule{.step = CountFrom(j.at("step")),
                          .factor = j.at("factor").get<double>(),
                          .stop_rate = j.at("stop_rate").get<double>(),
                          .base_rate = base_rate,
                          .warm_up = warm_up};
  }
  if (type == "multi_factor") {
    return MultiFactorSchedule{.steps = j.at("steps").get<std::vector<std::int64_t>>(),
                               .factor = j.at("factor").get<double>(),
                               .base_rate = base_rate,
                               .warm_up = warm_up};
  }
  if (type == "poly") {
    return PolySchedule{.max_update = CountFrom(j.at("max_update")),
                        .power = j.at("power").get<double>(),
                        .final_rate = j.at("final_rate").get<double>(),
                        .base_rate = base_rate,
                        .warm_up = warm_up};
  }
  if (type == "cosine") {
    return CosineSchedule{.max_update = CountFrom(j.at("max_update")),
                          .final_rate = j.at("final_rate").get<double>(),
                          .base_rate = base_rate,
                          .warm_up = warm_up};
  }
  throw IoError(fmt::format("expected a type of schedule, found '{}'", type));
}

OptimizerSettings SettingsFrom(const json& j) {
  OptimizerSettings settings;
  for (const auto& [name, value] : j.at("parameters").items()) {
    settings.parameters.emplace_back(name, value.get<double>());
  }
  if (!j.at("schedule").is_null()) settings.schedule = ScheduleFrom(j.at("schedule"));
  for (const json& m : j.at("multipliers")) {
    settings.multipliers.push_back({.key = KeyFrom(m.at("key")),
                                    .learning_rate = m.at("learning_rate").get<double>(),
                                    .weight_decay = m.at("weight_decay").get<double>()});
  }
  return settings;
}

KeyStates KeyStatesFrom(const json& j) {
  KeyStates key;
  key.key = KeyFrom(j.at("key"));
  std::vector<std::int64_t> shape;
  for (const json& extent : j.at("shape")) shape.push_back(CountFrom(extent));
  try {
    key.shape = Shape(std::span<const std::int64_t>(shape));
  } catch (const InvalidArgument& error) {
    throw IoError(
        fmt::format("expected a shape, found one of a key that is none: {}", error.what()));
  }
  key.dtype = DTypeFrom(j.at("dtype"));
  key.updates = CountFrom(j.at("updates"));
  key.step = CountFrom(j.at("step"));
  const json& numbers = j.at("numbers");
  if (numbers.size() != key.numbers.size()) {
    throw IoError(
        fmt::format("expected {} numbers of a key, found {}", key.numbers.size(), numbers.size()));
  }
  for (std::size_t i = 0; i < key.numbers.size(); ++i) key.numbers[i] = numbers[i].get<double>();
  return key;
}

// Which arrays each key has.
std::vector<std::set<std::string>> ArrayNamesFrom(const json& j) {
  std::vector<std::set<std::string>> names;
  for (const json& key : j.at("keys")) {
    names.push_back(key.at("arrays").get<std::set<std::string>>());
  }
  return names;
}

OptimizerStates StatesFrom(const json& j, std::string_view optimizer) {
  const std::int64_t version = CountFrom(j.at("version"));
  if (version != kVersion) {
    throw IoError(fmt::format("expected version {} of optimizer states, found version {}", kVersion,
                              version));
  }
  OptimizerStates states;
  states.optimizer = j.at("optimizer").get<std::string>();
  if (states.optimizer != optimizer) {
    throw InvalidArgument(fmt::format("expected states of optimizer {}, got those of {}", optimizer,
                                      states.optimizer));
  }
  states.multi_precision = j.at("multi_precision").get<bool>();
  if (j.contains("fixed")) j.at("fixed").get_to(states.fixed);
  states.num_update = CountFrom(j.at("num_update"));
  for (const json& key : j.at("keys")) states.keys.push_back(KeyStatesFrom(key));
  if (j.contains("settings")) states.settings = SettingsFrom(j.at("settings"));
  return states;
}

// ---- Arrays

void CheckArray(const std::string& name, const NDArray& array, const Shape& shape, DType dtype) {
  if (array.shape() == shape && array.dtype() == dtype) return;
  throw IoError(fmt::format("array '{}': expected {} of shape {}, found {} of shape {}", name,
                            Name(dtype), ToString(shape), Name(array.dtype()),
                            ToString(array.shape())));
}

// Moves the arrays of the file to their keys, which have those that `names` says: states come with
// the first update that needs them.
void TakeArrays(const ArrayFile& file, const internal::UpdateRule& rule,
                const std::vector<std::set<std::string>>& names, OptimizerStates* states) {
  std::size_t taken = 0;
  std::unordered_map<std::string_view, NDArray> by_name;
  for (const NamedArray& named : file.arrays) by_name.emplace(named.name, named.array);
  const auto find = [&](const std::string& name) {
    const auto found = by_name.find(name);
    return found == by_name.end() ? NDArray() : found->second;
  };
  const auto take = [&](std::size_t i, const auto& own_name, const Shape& shape, DType dtype) {
    if (!names[i].contains(std::string(own_name))) return NDArray();
    const std::string name = ArrayName(i, own_name);
    NDArray array = find(name);
    if (array.empty()) throw IoError(fmt::format("expected an array '{}', found none", name));
    CheckArray(name, array, shape, dtype);
    array.WaitToRead();
    ++taken;
    return array;
  };
  for (std::size_t i = 0; i < states->keys.size(); ++i) {
    KeyStates& key = states->keys[i];
    if (IsForeignOptimizer(states->optimizer)) {
      const NDArray found = find(ArrayName(i, kOwnName));
      key.own = take(i, kOwnName, Shape{found.empty() ? 0 : found.size()}, DType::kUInt8);
    }
    key.master = take(i, kMasterName, key.shape, DType::kFloat32);
    const bool has_master = states->multi_precision && ops::Is16BitFloat(key.dtype) &&
                            !IsForeignOptimizer(states->optimizer);
    if (has_master ? key.step > 0 && key.master.empty() : !key.master.empty()) {
      throw IoError(fmt::format("expected {} array '{}'", has_master ? "an" : "no",
                                ArrayName(i, kMasterName)));
    }
    const DType dtype = has_master ? DType::kFloat32 : key.dtype;
    for (std::size_t k = 0; k < rule.states().size(); ++k) {
      const internal::UpdateStateType& type = rule.states()[k];
      const Shape rows{key.shape.ndim() > 0 ? key.shape[0] : 1};
      key.arrays[k] = take(i, type.name, type.per_row ? rows : key.shape, dtype);
    }
  }
  if (taken != file.arrays.size()) {
    throw IoError(fmt::format("expected {} arrays, found {}", taken, file.arrays.size()));
  }
}

}  // namespace

void WriteStates(const std::string& file, const OptimizerStates& states,
                 const internal::UpdateRule& rule) {
  std::vector<NamedArray> arrays;
  for (std::size_t i = 0; i < states.keys.size(); ++i) {
    ForEachArray(states.keys[i], rule, [&](const auto& name, const NDArray& array) {
      arrays.push_back({ArrayName(i, name), array});
    });
  }
  try {
    SaveArrays(file, arrays, {{kMetadataName, ToJson(states, rule).dump()}});
  } catch (const json::exception& error) {  // nothing else than this can be wrong with it
    throw InvalidArgument(
        fmt::format("{}: expected keys whose text is UTF-8: {}", file, error.what()));
  }
}

OptimizerStates ReadStates(const std::string& file, std::string_view optimizer,
                           const internal::UpdateRule& rule, Engine& engine) {
  const ArrayFile loaded = LoadArrays(file, Cpu(), engine);
  const auto metadata = loaded.metadata.find(kMetadataName);
  if (metadata == loaded.metadata.end()) {
    throw IoError(fmt::format("{}: expected optimizer states, found arrays without them", file));
  }
  try {
    const json all = json::parse(metadata->second);
    OptimizerStates states = StatesFrom(all, optimizer);
    TakeArrays(loaded, rule, ArrayNamesFrom(all), &states);
    return states;
  } catch (const json::exception& error) {
    throw IoError(fmt::format("{}: expected optimizer states: {}", file, error.what()));
  } catch (const IoError& error) {
    throw IoError(fmt::format("{}: {}", file, error.what()));
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(fmt::format("{}: {}", file, error.what()));
  }
}

// ---- The optimizer itself

OptimizerSettings SettingsOf(const Optimizer& optimizer) {
  OptimizerSettings settings;
  for (const auto& [name, value] : optimizer.Parameters()) {
    settings.parameters.emplace_back(name, value);
  }
  const auto plan = optimizer.plan();
  settings.schedule = plan->schedule;
  for (const auto& [key, multipliers] : plan->multipliers) {
    settings.multipliers.push_back({key, multipliers.learning_rate, multipliers.weight_decay});
  }
  return settings;
}

namespace {

OptimizerPtr Like(const Optimizer& optimizer) {
  if (!IsForeignOptimizer(optimizer.name())) {
    return MakeOptimizer(optimizer.name(), optimizer.Parameters());
  }
  std::vector<std::pair<std::string, double>> parameters;
  for (const auto& [name, value] : optimizer.Parameters()) parameters.emplace_back(name, value);
  return MakeForeignOptimizer(std::string(optimizer.name()), std::move(parameters));
}

}  // namespace

void ApplySettings(const OptimizerSettings& settings, Optimizer& optimizer) {
  // First the multipliers: new rates times old ones may be more than float32 can hold.
  const auto plan = optimizer.plan();
  for (const auto& [key, multipliers] : plan->multipliers) {
    optimizer.SetLearningRateMultiplier(key, 1);
    optimizer.SetWeightDecayMultiplier(key, 1);
  }
  optimizer.SetSchedule(std::nullopt);
  for (const auto& [name, value] : settings.parameters) optimizer.Set(name, value);
  optimizer.SetSchedule(settings.schedule);
  for (const auto& m : settings.multipliers) {
    optimizer.SetLearningRateMultiplier(m.key, m.learning_rate);
    optimizer.SetWeightDecayMultiplier(m.key, m.weight_decay);
  }
}

void CheckSettings(const std::string& file, const OptimizerSettings& settings,
                   const Optimizer& optimizer) {
  try {
    ApplySettings(settings, *Like(optimizer));
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(fmt::format("{}: {}", file, error.what()));
  }
}

}  // namespace heddle::kvstore
