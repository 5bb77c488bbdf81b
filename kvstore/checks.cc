#include "kvstore/checks.h"

#include <heddle/error.h>
#include <heddle/optimizer.h>

#include <unordered_set>

#include <fmt/format.h>

#include "base/log.h"
#include "kvstore/key_table.h"
#include "kvstore/optimizer/fixed_parameters.h"
#include "kvstore/optimizer/update_plan.h"

namespace heddle::kvstore {

namespace {

const Engine& EngineOf(const NDArray& array) { return internal::StateOf(array).engine; }
const Engine& EngineOf(const RowSparseNDArray& array) { return array.engine(); }

}  // namespace

void CheckArrayCount(std::string_view call, KeyRef key, std::size_t count) {
  // An op names a few variables beside theirs.
  constexpr std::size_t kArraysMax = 65'000;
  if (count <= kArraysMax) return;
  throw InvalidArgument(fmt::format("{}: key {}: expected at most {} arrays, got {}", call,
                                    ToString(key), kArraysMax, count));
}

void CheckArrays(std::string_view call, const KeyArrays& pair, const Engine& engine) {
  if (pair.arrays.empty() && pair.row_sparse.empty()) {
    throw InvalidArgument(
        fmt::format("{}: key {}: expected one array at least, got none", call, ToString(pair.key)));
  }
  CheckArrayCount(call, pair.key, pair.arrays.size() + pair.row_sparse.size());
  ForEachArray(pair, [&](const auto& array) {
    if (array.empty()) {
      throw InvalidArgument(fmt::format("{}: key {}: expected an array, got an empty handle", call,
                                        ToString(pair.key)));
    }
    if (&EngineOf(array) != &engine) {
      throw InvalidArgument(
          fmt::format("{}: key {}: expected an array of the store's engine, got one of another "
                      "engine",
                      call, ToString(pair.key)));
    }
  });
}

void CheckOneArray(std::string_view call, const KeyArrays& pair, const Engine& engine) {
  CheckArrays(call, pair, engine);
  const std::size_t count = pair.arrays.size() + pair.row_sparse.size();
  if (count != 1) {
    throw InvalidArgument(
        fmt::format("{}: key {}: expected one array, got {}", call, ToString(pair.key), count));
  }
}

void CheckDense(std::string_view call, const KeyArrays& pair) {
  if (pair.row_sparse.empty()) return;
  throw InvalidArgument(fmt::format("{}: key {}: expected dense arrays, got row-sparse ones", call,
                                    ToString(pair.key)));
}

void ThrowUnknownKey(std::string_view call, KeyRef key) {
  throw UnknownKey(
      fmt::format("{}: unknown key {}: expected one that was initialised", call, ToString(key)));
}

void ThrowNotNew(std::string_view call, KeyRef key) {
  throw InvalidArgument(
      fmt::format("{}: key {} is in the store already: expected a new key", call, ToString(key)));
}

void ThrowMixedKinds(std::string_view call, KeyRef key) {
  throw InvalidArgument(
      fmt::format("{}: key {}: expected arrays of one kind, got dense and row-sparse ones", call,
                  ToString(key)));
}

void ThrowShape(std::string_view call, KeyRef key, const Shape& expected, const Shape& given) {
  throw InvalidArgument(fmt::format("{}: key {}: expected shape {}, got {}", call, ToString(key),
                                    ToString(expected), ToString(given)));
}

void ThrowDType(std::string_view call, KeyRef key, DType expected, DType given) {
  throw InvalidArgument(fmt::format("{}: key {}: expected dtype {}, got {}", call, ToString(key),
                                    Name(expected), Name(given)));
}

void CheckOneKind(std::string_view call, std::span<const KeyArrays> pairs) {
  for (const KeyArrays& pair : pairs) {
    if (pair.key.is_string() != pairs[0].key.is_string()) {
      throw InvalidArgument(fmt::format("{}: keys {} and {}: expected keys of one kind", call,
                                        ToString(pairs[0].key), ToString(pair.key)));
    }
  }
}

void CheckDistinct(std::string_view call, std::span<const KeyArrays> pairs) {
  std::unordered_set<KeyRef, KeyHash, KeyEqual> keys;
  for (const KeyArrays& pair : pairs) {
    if (!keys.insert(pair.key).second) {
      throw InvalidArgument(fmt::format("{}: key {} is named twice: expected distinct keys", call,
                                        ToString(pair.key)));
    }
  }
}

void CheckKeyKind(std::string_view call, KeyRef key, std::optional<bool> string_keys) {
  if (!string_keys || *string_keys == key.is_string()) return;
  throw InvalidArgument(fmt::format(
      "{}: key {}: expected {} key as the others of this store, got {}", call, ToString(key),
      *string_keys ? "a string" : "an integer", key.is_string() ? "a string" : "an integer"));
}

void CheckInit(std::span<const KeyArrays> pairs, const Engine& engine) {
  for (const KeyArrays& pair : pairs) CheckOneArray("Init", pair, engine);
  CheckOneKind("Init", pairs);
  CheckDistinct("Init", pairs);
}

namespace {

void CheckSameShapes(std::string_view call, const KeyArrays& value, const KeyArrays& out) {
  WithFirstArray(value, [&](const auto& first) {
    ForEachArray(out, [&](const auto& array) { CheckShape(call, out.key, first, array); });
  });
}

}  // namespace

void CheckBroadcast(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                    const Engine& engine) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    CheckOneArray("Broadcast", values[i], engine);
    CheckArrays("Broadcast", out[i], engine);
    CheckSameShapes("Broadcast", values[i], out[i]);
  }
  CheckOneKind("Broadcast", values);
  CheckDistinct("Broadcast", values);
}

void CheckPushPull(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                   const Engine& engine) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    CheckArrays("PushPull", values[i], engine);
    CheckArrays("PushPull", out[i], engine);
    CheckSameShapes("PushPull", values[i], out[i]);
  }
  CheckOneKind("PushPull", values);
}

void CheckRowPull(const KeyRowPull& pull, const Engine& engine) {
  CheckArrays("RowSparsePull", {pull.key, pull.out}, engine);
  CheckArrays("RowSparsePull", {pull.key, pull.row_ids}, engine);
  for (const NDArray& ids : pull.row_ids) {
    if (ids.dtype() != DType::kBool) continue;
    throw InvalidArgument(
        fmt::format("RowSparsePull: key {}: expected row ids of a numeric dtype, got bool",
                    ToString(pull.key)));
  }
}

void ThrowNotRowSparse(KeyRef key) {
  throw InvalidArgument(fmt::format(
      "RowSparsePull: key {}: expected a row-sparse value, got a dense one", ToString(key)));
}

void CheckCompression(std::string_view call, const PushedKind& pushed,
                      const Compressor& compressor) {
  if (pushed.row_sparse) {
    throw InvalidArgument(fmt::format(
        "{}: key {}: expected dense arrays, since gradient compression {} is set, got row-sparse "
        "ones",
        call, ToString(pushed.key), compressor.options().type));
  }
  if (!IsCompressible(pushed.dtype)) {
    throw InvalidArgument(fmt::format(
        "{}: key {}: expected float32, float16 or bfloat16, since gradient compression {} is "
        "set, got {}",
        call, ToString(pushed.key), compressor.options().type, Name(pushed.dtype)));
  }
}

void CheckUpdate(std::string_view call, const PushedKind& pushed, const Optimizer& optimizer,
                 const internal::UpdatePlan& plan) {
  if (!IsFloating(pushed.dtype)) {
    throw InvalidArgument(
        fmt::format("{}: key {}: expected a floating dtype for optimizer {}, got {}", call,
                    ToString(pushed.key), optimizer.name(), Name(pushed.dtype)));
  }
  const std::string refusal =
      plan.rule->Refusal({.dimensions = static_cast<int>(pushed.shape.ndim()),
                          .weight_decay = plan.WeightDecay(pushed.key),
                          .row_sparse = pushed.row_sparse});
  if (!refusal.empty()) {
    throw InvalidArgument(fmt::format("{}: key {}: optimizer {}: {}", call, ToString(pushed.key),
                                      optimizer.name(), refusal));
  }
}

void TellSparseIgnored(KeyRef key) {
  Log(LogLevel::kInfo,
      "pull of key {}: row-sparse outputs are left alone; RowSparsePull fills them, and so does "
      "Pull without ignore_sparse",
      ToString(key));
}

std::shared_ptr<const Compressor> NewCompressor(const CompressionOptions& options,
                                                const Compressor* present, bool pushed) {
  auto fresh = MakeCompressor(options);
  const auto text = [](const CompressionOptions& o) {
    return fmt::format("type {}, threshold {}", o.type, o.threshold);
  };
  if (present != nullptr) {
    const CompressionOptions& set = present->options();
    if (set.type == fresh->options().type && set.threshold == options.threshold) return nullptr;
    throw InvalidArgument(
        fmt::format("SetGradientCompression: expected what is set already, {}, got {}", text(set),
                    text(fresh->options())));
  }
  if (pushed) {
    throw InvalidState(fmt::format(
        "SetGradientCompression: expected a call before the first push, got {} after it",
        text(fresh->options())));
  }
  return fresh;
}

void CheckFixedParameters(const std::string& file, const OptimizerStates& states,
                          const Optimizer& optimizer) {
  const auto check = [&](std::string_view parameter, auto expected, auto given) {
    if (expected == given) return;
    throw InvalidArgument(
        fmt::format("LoadOptimizerStates: {}: expected states of optimizer {} with {} {}, got {}",
                    file, optimizer.name(), parameter, expected, given));
  };
  check("multi_precision", optimizer.plan()->multi_precision, states.multi_precision);
  for (const auto& [parameter, value] : FixedParameters(optimizer)) {
    const auto given = states.fixed.find(parameter);
    if (given != states.fixed.end()) check(parameter, value, given->second);  // or an older file
  }
}

}  // namespace heddle::kvstore
