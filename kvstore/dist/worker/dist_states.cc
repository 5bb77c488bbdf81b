#include "kvstore/dist/worker/dist_states.h"

#include <heddle/error.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "kvstore/optimizer/update_rule.h"
#include "kvstore/part_rows.h"
#include "ops/copy.h"

namespace heddle::kvstore::dist {

namespace {

constexpr std::size_t kMaster = internal::kUpdateStatesMax;  // its place behind the others
constexpr const char* kOwnName = "own";  // bytes of an optimizer that only servers have

[[noreturn]] void ThrowUnreadable(const char* what) {
  throw NetworkError(fmt::format("states of the optimizer: {}", what));
}

std::size_t PlaceOf(const std::string& name) {
  if (name == "master") return kMaster;
  const std::size_t place = name.size() == 1 ? static_cast<std::size_t>(name[0] - '0') : kMaster;
  if (place >= kMaster) ThrowUnreadable("an unknown array");
  return place;
}
std::string NameOfPlace(std::size_t place) {
  return place == kMaster ? "master" : std::to_string(place);
}

// Elements of an array of states that belong to the units [begin, end) of the value: states have a
// number for each element of the value, or for each row.
struct Range {
  std::int64_t begin;
  std::int64_t end;
};
Range RangeOf(const PartInfo& info, bool per_row) {
  const std::int64_t row_size = RowSizeOf(info.shape);
  if (info.row_sparse) {
    return per_row ? Range{info.begin, info.end}
                   : Range{info.begin * row_size, info.end * row_size};
  }
  if (!per_row) return {info.begin, info.end};
  if (row_size == 0) return {0, info.shape[0]};  // one part
  return {info.begin / row_size, info.end / row_size};
}

std::byte* At(const NDArray& array, std::int64_t element) {
  return static_cast<std::byte*>(array.data()) +
         element * static_cast<std::int64_t>(SizeOf(array.dtype()));
}

NDArray& ArrayAt(KeyStates& key, std::size_t place) {
  return place == kMaster ? key.master : key.arrays[place];
}

// Reads a payload from its start to its end.
class PayloadReader {
 public:
  explicit PayloadReader(const Payload& payload) : payload_(payload) {}

  std::uint64_t bytes() const { return payload_.bytes(); }

  void Read(std::byte* to, std::size_t bytes) {
    Pass(bytes, [&](std::span<const std::byte> run) {
      if (!run.empty()) ops::Copy(run.data(), to, run.size());
      to += run.size();
    });
  }
  void Skip(std::size_t bytes) {
    Pass(bytes, [](std::span<const std::byte>) {});
  }

 private:
  template <class Visit>
  void Pass(std::size_t bytes, const Visit& visit) {
    while (bytes > 0) {
      if (run_ == payload_.runs().size()) ThrowUnreadable("arrays are missing");
      const std::span<const std::byte> rest = payload_.runs()[run_].subspan(at_);
      const std::size_t count = std::min(rest.size(), bytes);
      visit(rest.first(count));
      bytes -= count;
      at_ += count;
      if (at_ == payload_.runs()[run_].size()) {
        ++run_;
        at_ = 0;
      }
    }
  }

  const Payload& payload_;
  std::size_t run_ = 0;
  std::size_t at_ = 0;
};

void AddPart(const PartStates& part, PayloadReader& reader, const internal::UpdateRule& rule,
             KeyStates& key, bool is_first, Engine& engine) {
  if (is_first) {
    key.key = part.info.key;
    key.shape = part.info.shape;
    key.dtype = part.info.dtype;
  } else if (part.info.shape != key.shape || part.info.dtype != key.dtype) {
    ThrowUnreadable("parts of one key that are of different shapes or dtypes");
  }
  key.step = std::max(key.step, part.updates);
  if (part.numbers.size() != key.numbers.size()) ThrowUnreadable("a wrong count of numbers");
  std::ranges::copy(part.numbers, key.numbers.begin());
  for (const PartStates::Array& array : part.arrays) {
    if (array.name == kOwnName) {
      if (array.dtype != DType::kUInt8 || array.elements < 0 ||
          static_cast<std::uint64_t>(array.elements) > reader.bytes()) {
        ThrowUnreadable("a state of a wrong type or size");
      }
      key.own = NDArray({array.elements}, array.dtype, Cpu(), engine);
      reader.Read(At(key.own, 0), static_cast<std::size_t>(array.elements));
      continue;
    }
    const std::size_t place = PlaceOf(array.name);
    const bool per_row = place < rule.states().size() && rule.states()[place].per_row;
    const Range range = RangeOf(part.info, per_row);
    if (array.elements != range.end - range.begin) ThrowUnreadable("an array of a wrong size");
    NDArray& whole = ArrayAt(key, place);
    if (whole.empty()) {
      const Shape shape = per_row ? Shape{key.shape[0]} : key.shape;
      whole = NDArray::Zeros(shape, array.dtype, Cpu(), engine);
      whole.WaitToRead();
    } else if (array.dtype != whole.dtype()) {
      ThrowUnreadable("parts of one array that are of different dtypes");
    }
    if (range.begin < 0 || range.end > whole.size()) ThrowUnreadable("a part beyond its array");
    reader.Read(At(whole, range.begin),
                static_cast<std::size_t>(array.elements) * SizeOf(array.dtype));
  }
}

void Skip(const PartStates& part, PayloadReader& reader) {
  for (const PartStates::Array& array : part.arrays) {
    if (array.elements < 0) ThrowUnreadable("a state of a wrong type or size");
    reader.Skip(static_cast<std::size_t>(array.elements) * SizeOf(array.dtype));
  }
}

}  // namespace

std::vector<KeyStates> JoinStates(const std::vector<Message>& answers,
                                  const std::function<bool(const PartStates&)>& wanted,
                                  const internal::UpdateRule& rule, Engine& engine) {
  std::map<Key, KeyStates> keys;
  for (const Message& answer : answers) {
    StatesBody body;
    if (!Decode(answer.meta, &body)) ThrowUnreadable("an answer cannot be read");
    PayloadReader reader(answer.payload);
    for (const PartStates& part : body.parts) {
      if (wanted(part)) {
        const auto [key, is_first] = keys.try_emplace(part.info.key);
        AddPart(part, reader, rule, key->second, is_first, engine);
      } else {
        Skip(part, reader);
      }
    }
  }
  std::vector<KeyStates> states;
  for (auto& [name, key] : keys) states.push_back(std::move(key));
  return states;
}

namespace {

// What one server gets next.
struct Chunk {
  StatesBody body;
  std::size_t meta_bytes = 0;
  std::uint64_t payload_bytes = 0;
  std::vector<std::span<const std::byte>> runs;
  std::vector<NDArray> arrays;

  // `count` elements of `array` from `begin` on, as an array of `part`.
  void Add(std::string name, const NDArray& array, std::int64_t begin, std::int64_t count,
           PartStates* part) {
    part->arrays.push_back({std::move(name), array.dtype(), count});
    runs.emplace_back(At(array, begin), static_cast<std::size_t>(count) * SizeOf(array.dtype()));
    payload_bytes += runs.back().size();
    arrays.push_back(array);
  }

  ServerStates Take(std::int32_t server) {
    Chunk taken = std::exchange(*this, {});
    return {.server = server,
            .body = std::move(taken.body),
            .arrays = Payload(std::make_shared<const std::vector<NDArray>>(std::move(taken.arrays)),
                              std::move(taken.runs))};
  }
};

}  // namespace

std::vector<ServerStates> CutStates(const std::vector<KeyStates>& states,
                                    const std::function<DistKey&(const KeyStates&)>& key_of) {
  std::vector<ServerStates> cut;
  std::map<std::int32_t, Chunk> chunks;  // by server
  for (const KeyStates& states_of_key : states) {
    KeyStates key = states_of_key;
    const DistKey& dist_key = key_of(key);
    if (!key.own.empty() && dist_key.parts().size() > 1) {
      throw InvalidArgument(fmt::format(
          "LoadOptimizerStates: key {}: the state is one for the whole array: expected a key that "
          "is not cut (it was initialised after SetOptimizer), got one in {} parts",
          ToString(KeyRef(key.key)), dist_key.parts().size()));
    }
    for (const PlacedPart& placed : dist_key.parts()) {
      PartStates part;
      part.part = dist_key.IdOf(placed);
      part.info = dist_key.InfoOf(placed);
      part.updates = key.step;
      part.numbers.assign(key.numbers.begin(), key.numbers.end());
      Chunk& out = chunks[placed.server];
      for (std::size_t place = 0; place <= kMaster; ++place) {
        const NDArray& array = ArrayAt(key, place);
        if (array.empty()) continue;
        const Range range = RangeOf(part.info, array.shape() != key.shape);
        out.Add(NameOfPlace(place), array, range.begin, range.end - range.begin, &part);
      }
      if (!key.own.empty()) out.Add(kOwnName, key.own, 0, key.own.size(), &part);
      out.meta_bytes += Encode(StatesBody{.optimizer = {}, .parts = {part}}).size();
      out.body.parts.push_back(std::move(part));
      if (out.meta_bytes > kStatesMetaBytesMax / 2 ||
          out.payload_bytes > kStatesPayloadBytesMax / 2) {
        cut.push_back(out.Take(placed.server));
      }
    }
  }
  for (auto& [server, chunk] : chunks) {
    if (!chunk.body.parts.empty()) cut.push_back(chunk.Take(server));
  }
  return cut;
}

}  // namespace heddle::kvstore::dist
