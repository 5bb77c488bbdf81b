#include "kvstore/dist/server/array_parts.h"

#include <heddle/error.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "kvstore/dist/server/array_part.h"
#include "ops/cast.h"
#include "ops/row_ids.h"
#include "storage/row_sparse_kernels.h"

namespace heddle::kvstore::dist {

namespace {

bool AreOfOneArray(const PartInfo& a, const PartInfo& b) {
  return a.key == b.key && a.shape == b.shape && a.dtype == b.dtype &&
         a.row_sparse == b.row_sparse && a.num_parts == b.num_parts;
}

}  // namespace

const std::shared_ptr<ArrayParts::Part>& ArrayParts::FindShared(const PartId& id) {
  if (found_ == nullptr || (*found_)->id != id) {
    const auto found = parts_.find(id);
    CHECK(found != parts_.end());
    found_ = &found->second;
  }
  return *found_;
}

void ArrayParts::Create(const PartId& id, const PartInfo& info, const Payload& value) {
  if (!HasCountableBytes(info)) {
    throw InvalidArgument(fmt::format(
        "key {}: expected at most 2^63 - 1 bytes of an array, and of a row and its id, got {} of "
        "shape {}",
        ToString(KeyRef(info.key)), Name(info.dtype), ToString(info.shape)));
  }
  if (self_) CheckPlace(id, info);
  auto part = std::make_shared<Part>(id, info, engine_);
  Message whole{.kind = Kind::kReset, .dtype = info.dtype, .part = id};
  if (info.row_sparse) whole.flags = kFlagRowSparse;
  whole.payload = value;
  Check(*part, whole);
  if (info.row_sparse) {
    part->rows = part->ToRows(value);
  } else {
    part->value = Value::Make(part->ToArray(value));
  }
  found_ = nullptr;  // it may move
  const auto place = parts_.emplace(id, part).first;
  try {
    Count(*part);
  } catch (...) {  // std::bad_alloc
    parts_.erase(place);
    throw;
  }
  if (HasOtherLife(*part)) ForgetState(*part);
  if (self_ && info.num_parts > 1) ++cut_arrays_.at({id.store, id.key}).parts;
}

// Workers may say anything of a part, but updates of whole arrays need parts that fit together.
void ArrayParts::CheckPlace(const PartId& id, const PartInfo& info) {
  const auto refuse = [&](std::string_view expected) {
    throw InvalidArgument(
        fmt::format("key {}: expected {}, got part {} of {} over [{}, {}) of {} {}",
                    ToString(KeyRef(info.key)), expected, id.part, info.num_parts, info.begin,
                    info.end, Name(info.dtype), ToString(info.shape)));
  };
  constexpr std::string_view kOfTheSameArray = "a part of the array that the others are of";
  CutArray array{.info = info};
  const auto known = cut_arrays_.find({id.store, id.key});
  const bool is_known = known != cut_arrays_.end() && known->second.parts > 0;
  if (is_known && !AreOfOneArray(known->second.info, info)) refuse(kOfTheSameArray);
  if (!is_known) {
    const auto first = parts_.find({.store = id.store, .part = 0, .key = id.key});
    if (first != parts_.end()) refuse(kOfTheSameArray);  // which is not cut
    PlacementOptions placement = placement_;
    placement.whole_keys = info.num_parts == 1;
    array.here = PlaceKey(id.key, info.shape, info.dtype, info.row_sparse, placement);
    if (array.here.size() != info.num_parts) refuse("an array that is cut as the job's are");
    std::erase_if(array.here, [&](const PlacedPart& part) { return part.server != self_; });
  }
  const std::vector<PlacedPart>& here = is_known ? known->second.here : array.here;
  const auto place = std::ranges::lower_bound(here, id.part, {}, &PlacedPart::part);
  if (place == here.end() || place->part != id.part || place->begin != info.begin ||
      place->end != info.end) {
    refuse(fmt::format("a part of server {}", *self_));
  }
  if (!is_known && info.num_parts > 1) cut_arrays_[{id.store, id.key}] = std::move(array);
}

void ArrayParts::Remove(const PartId& id) {
  const Part& part = Find(id);
  if (!HasOtherLife(part)) ForgetState(part);
  Uncount(part);
  if (self_ && part.info.num_parts > 1) {
    const auto array = cut_arrays_.find({id.store, id.key});
    if (--array->second.parts == 0) cut_arrays_.erase(array);
  }
  found_ = nullptr;
  parts_.erase(id);
  DropPasses(id);  // those of the array are over, of all its parts
}

void ArrayParts::Reset(const PartId& id, const Payload& value) {
  Part& part = Find(id);
  if (part.info.row_sparse) {
    part.rows = part.ToRows(value);
  } else {
    part.value = Value::Make(part.ToArray(value));
  }
  part.state = nullptr;
  ForgetState(part);
}

void ArrayParts::Check(const PartId& id, const Message& message) { Check(Find(id), message); }

void ArrayParts::Check(const Part& part, const Message& message) const {
  const PartInfo& info = part.info;
  const auto what = [&] {
    return fmt::format("key {}, part {} of {}", ToString(KeyRef(info.key)), part.id.part,
                       info.num_parts);
  };
  const bool row_sparse = (message.flags & kFlagRowSparse) != 0 || message.kind == Kind::kRowPull;
  if (message.kind == Kind::kPull) return;
  const bool pushed_rows = row_sparse && IsPush(message.kind) && info.shape.ndim() > 0;
  if (row_sparse != info.row_sparse && !pushed_rows) {
    throw InvalidArgument(fmt::format("{}: expected a {} array, as the value is, got a {} one",
                                      what(), info.row_sparse ? "row-sparse" : "dense",
                                      row_sparse ? "row-sparse" : "dense"));
  }
  const std::uint64_t bytes = message.payload.bytes();
  if (row_sparse) {
    const PartRows here = part.part_rows();
    const std::size_t row_bytes = static_cast<std::size_t>(here.width()) * SizeOf(info.dtype);
    const std::size_t stride =
        sizeof(std::int64_t) + (message.kind == Kind::kRowPull ? 0 : row_bytes);
    if (bytes % stride != 0) {
      throw InvalidArgument(
          fmt::format("{}: expected a multiple of {} bytes, got {}", what(), stride, bytes));
    }
    std::vector<std::int64_t> ids(bytes / stride);
    CopyOut(message.payload, 0, ids.data(), ids.size() * sizeof(std::int64_t));
    if (!ops::IsSortedUnique(ids)) {
      throw InvalidArgument(fmt::format("{}: expected row ids that are sorted and unique", what()));
    }
    if (!ids.empty() && (ids.front() < here.first() || ids.back() >= here.end())) {
      throw InvalidArgument(fmt::format("{}: expected row ids in [{}, {}), got {} to {}", what(),
                                        here.first(), here.end(), ids.front(), ids.back()));
    }
  }
  if (message.kind == Kind::kRowPull) return;
  if (message.dtype != info.dtype) {
    throw InvalidArgument(fmt::format("{}: expected dtype {}, got {}", what(), Name(info.dtype),
                                      Name(message.dtype)));
  }
  if (row_sparse) return;
  std::uint64_t expected = part.bytes();
  if ((message.flags & kFlagCompressed) != 0) {
    if (!IsPush(message.kind)) {
      throw InvalidArgument(fmt::format("{}: expected elements, got codes", what()));
    }
    expected = static_cast<std::uint64_t>(CompressorOf(part).CodeBytes(part.extent()));
  }
  if (bytes != expected) {
    throw InvalidArgument(fmt::format("{}: expected {} bytes, got {}", what(), expected, bytes));
  }
}

const Compressor& ArrayParts::CompressorOf(const Part& part) const {
  const auto store = stores_.find(part.id.store);
  if (store == stores_.end() || store->second.compressor == nullptr) {
    throw InvalidArgument(
        fmt::format("key {}, part {} of {}: got codes, expected none before compression is set",
                    ToString(KeyRef(part.info.key)), part.id.part, part.info.num_parts));
  }
  return *store->second.compressor;
}

// ---- Sums

void ArrayParts::Add(const PartId& id, const Message& push, bool first) {
  Part& part = Find(id);
  if (first) DropSum(id);
  const bool is_codes = (push.flags & kFlagCompressed) != 0;
  if (is_codes ? part.HasArrays() : !part.float_sum.empty()) {
    throw InvalidArgument(
        "expected that all workers set gradient compression, or none, got codes and arrays");
  }
  if (part.info.row_sparse) {
    part.held_rows.push_back(part.ToRows(push.payload));
  } else if ((push.flags & kFlagRowSparse) != 0) {
    part.AddRows(push.payload);
  } else if (is_codes) {
    part.AddCodes(push.payload, CompressorOf(part));
  } else {
    part.AddDense(push.payload);
  }
}

void ArrayParts::DropSum(const PartId& id) {
  Part& part = Find(id);
  part.held.clear();
  part.sum = nullptr;
  part.float_sum = NDArray();
  part.held_rows.clear();
}

void ArrayParts::SetCompression(std::uint32_t store, std::shared_ptr<const Compressor> compressor) {
  stores_[store].compressor = std::move(compressor);
}

// ---- Pulls

Payload ArrayParts::Read(const PartId& id, const Message& pull) {
  const Part& part = Find(id);
  if (!part.info.row_sparse) {
    const auto count = static_cast<std::size_t>(part.extent());
    if (pull.dtype == part.info.dtype) return Value::Lend(part.value, part.bytes());
    const auto cast = Value::Make(part.NewArray(pull.dtype));
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
  const auto row_elements = static_cast<std::size_t>(RowSizeOf(part.info.shape));
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
  return Value::Lend(Value::Make(memory), bytes);
}

}  // namespace heddle::kvstore::dist
