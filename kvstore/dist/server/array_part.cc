#include "kvstore/dist/server/array_part.h"

#include <heddle/error.h>

#include <algorithm>
#include <array>
#include <span>

#include <fmt/format.h>

#include "base/check.h"
#include "kvstore/row_sparse_update.h"
#include "ops/cast.h"
#include "ops/convert.h"
#include "ops/copy.h"
#include "ops/sum.h"

namespace heddle::kvstore::dist {

namespace {

// Elements that may be written where they lie.
bool IsOwnInPlace(const Payload& payload, DType dtype) {
  return payload.owned_alone() && InPlace(payload, SizeOf(dtype)) != nullptr;
}

// The shape of rows [0, rows) of an array of shape `whole`.
Shape WithRows(const Shape& whole, std::int64_t rows) {
  std::vector<std::int64_t> dims(whole.begin(), whole.end());
  dims.at(0) = rows;
  return Shape(std::span<const std::int64_t>(dims));
}

}  // namespace

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

const void* InPlace(const Payload& payload, std::size_t alignment) {
  if (payload.runs().size() != 1) return nullptr;
  const void* const data = payload.runs()[0].data();
  return reinterpret_cast<std::uintptr_t>(data) % alignment == 0 ? data : nullptr;
}

RowSparseNDArray ArrayParts::Part::ToRows(const Payload& payload) const {
  const PartRows here = part_rows();
  const std::size_t row_bytes = static_cast<std::size_t>(here.width()) * SizeOf(info.dtype);
  const std::size_t count = payload.bytes() / (sizeof(std::int64_t) + row_bytes);
  std::vector<std::int64_t> ids(count);
  CopyOut(payload, 0, ids.data(), count * sizeof(std::int64_t));
  for (std::int64_t& id : ids) id -= here.first();
  const bool whole = info.row_sparse || info.num_parts == 1;
  RowSparseNDArray array(
      whole ? WithRows(info.shape, here.count()) : Shape{here.count(), here.width()}, info.dtype,
      Cpu(), engine);
  array.SetRowIds(ids);
  if (count > 0) CopyOut(payload, count * sizeof(std::int64_t), array.rows(), count * row_bytes);
  return array;
}

// Sums of both kinds are those of dense arrays.
void ArrayParts::Part::AddRows(const Payload& payload) {
  held_rows.push_back(ToRows(payload));
  if (held.empty() && sum == nullptr) return;
  const RowSparseNDArray added = std::move(held_rows.back());
  held_rows.clear();
  AddDense(Value::Lend(ToDense({&added, 1}), bytes()));
}

void ArrayParts::Part::AddDense(const Payload& payload) {
  for (const RowSparseNDArray& before : std::exchange(held_rows, {})) {
    AddDense(Value::Lend(ToDense({&before, 1}), bytes()));
  }
  held.push_back(payload);
  if (ops::Is16BitFloat(info.dtype) || (sum == nullptr && held.size() == 1)) return;
  RoundSum();
}

// Adds what is held, if it can be in the memory of the first: one array less goes through the
// cache.
void ArrayParts::Part::RoundSum() {
  std::vector<NDArray> copies;
  std::vector<const void*> inputs;
  if (sum != nullptr) inputs.push_back(sum->data);
  for (const Payload& payload : held) {
    const void* data = InPlace(payload, SizeOf(info.dtype));
    if (data == nullptr) data = copies.emplace_back(ToArray(payload)).data();
    inputs.push_back(data);
  }
  if (sum == nullptr) {
    sum = IsOwnInPlace(held[0], info.dtype) ? Value::Make(held[0])
                                            : Value::Make(NewArray(info.dtype));
  }
  ops::Sum(info.dtype, inputs, sum->data, static_cast<std::size_t>(extent()));
  held.clear();
}

void ArrayParts::Part::AddCodes(const Payload& codes, const Compressor& compressor) {
  const auto count = static_cast<std::size_t>(extent());
  const auto expected = static_cast<std::uint64_t>(compressor.CodeBytes(extent()));
  if (codes.bytes() != expected) {
    throw InvalidArgument(fmt::format("key {}, part {} of {}: expected {} bytes of codes, got {}",
                                      ToString(KeyRef(info.key)), id.part, info.num_parts, expected,
                                      codes.bytes()));
  }
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

std::shared_ptr<ArrayParts::Value> ArrayParts::Part::ToDense(
    std::span<const RowSparseNDArray> inputs) const {
  return Value::Make(DenseSum(inputs, shape(), part_rows()));
}

const NDArray& ArrayParts::Part::WritableValue() {
  if (value->array.empty() || value->lent()) {
    NDArray copy = NewArray(info.dtype);
    ops::Copy(value->data, copy.data(), bytes());
    value = Value::Make(std::move(copy));
  }
  return value->array;
}

// The sum as a value of its own; nothing is left of it here.
std::shared_ptr<ArrayParts::Value> ArrayParts::Part::TakeSum() {
  if (!held_rows.empty()) return ToDense(std::exchange(held_rows, {}));
  if (!float_sum.empty()) {
    NDArray rounded = std::exchange(float_sum, NDArray());
    if (info.dtype != DType::kFloat32) {
      const NDArray wide = std::exchange(rounded, NewArray(info.dtype));
      ops::Cast(DType::kFloat32, wide.data(), info.dtype, rounded.data(),
                static_cast<std::size_t>(extent()));
    }
    return Value::Make(std::move(rounded));
  }
  if (sum == nullptr && held.size() == 1) {
    const Payload payload = std::move(held[0]);
    held.clear();
    if (IsOwnInPlace(payload, info.dtype)) return Value::Make(payload);
    return Value::Make(ToArray(payload));
  }
  if (!held.empty()) RoundSum();
  return std::exchange(sum, nullptr);
}

void ArrayParts::Part::ReadyState(bool multi_precision, std::uint64_t rule_generation) {
  if (state != nullptr && generation == rule_generation) return;
  state = std::make_unique<UpdateState>(multi_precision);
  generation = rule_generation;
}

}  // namespace heddle::kvstore::dist
