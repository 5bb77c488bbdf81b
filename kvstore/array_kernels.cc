#include "kvstore/array_kernels.h"

#include <heddle/dtype.h>
#include <heddle/engine.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "ops/cast.h"
#include "ops/copy.h"
#include "ops/fan_out.h"
#include "ops/fill.h"
#include "ops/reduce.h"
#include "ops/store_mode.h"
#include "ops/sum.h"
#include "storage/array_state.h"
#include "storage/parallel.h"

namespace heddle::kvstore {

using storage::ForBlocks;

namespace {

void* At(void* base, std::int64_t element, std::size_t element_bytes) {
  return static_cast<std::byte*>(base) + element * static_cast<std::int64_t>(element_bytes);
}

// Addresses in some arrays, a few without allocating.
class Addresses {
 public:
  Addresses() = default;
  // The first elements, only to be read. Takes the arrays' memory from the pools, so it comes
  // before any block.
  explicit Addresses(std::span<const NDArray> arrays) {
    for (const NDArray& array : arrays) {
      Add(const_cast<std::byte*>(internal::ReadableElements(internal::StateOf(array))));
    }
  }

  void Add(void* address) {
    if (size_ == kFew) more_.assign(few_.begin(), few_.end());
    if (size_ < kFew) {
      few_[size_] = address;
    } else {
      more_.push_back(address);
    }
    ++size_;
  }

  // Further on by `element`.
  Addresses At(std::int64_t element, std::size_t element_bytes) const {
    Addresses shifted;
    for (void* address : all()) shifted.Add(kvstore::At(address, element, element_bytes));
    return shifted;
  }

  std::size_t size() const { return size_; }
  void* operator[](std::size_t i) const { return all()[i]; }
  std::span<void* const> all() const { return {size_ > kFew ? more_.data() : few_.data(), size_}; }

 private:
  static constexpr std::size_t kFew = 8;

  std::size_t size_ = 0;
  std::array<void*, kFew> few_;
  std::vector<void*> more_;  // all of them when there are more than kFew
};

// out = the sum of elements [begin, end) of the inputs.
void SumRun(DType dtype, const Addresses& inputs, std::int64_t begin, std::int64_t end, void* out,
            ops::StoreMode mode) {
  const std::size_t count = static_cast<std::size_t>(end - begin);
  if (inputs.size() == 1) {
    ops::Copy(At(inputs[0], begin, SizeOf(dtype)), out, count * SizeOf(dtype), mode);
  } else {
    const Addresses from = inputs.At(begin, SizeOf(dtype));
    ops::Sum(dtype, from.all(), out, count, mode);
  }
}

std::int64_t Bytes(DType dtype) { return static_cast<std::int64_t>(SizeOf(dtype)); }
std::int64_t Count(std::span<const NDArray> arrays) {
  return static_cast<std::int64_t>(arrays.size());
}

}  // namespace

void SumArrays(std::span<const NDArray> inputs, const NDArray& out) {
  const Addresses from(inputs);
  void* const to = out.data();
  const DType dtype = out.dtype();
  ForBlocks(out.engine(), out.size(), Bytes(dtype) * (Count(inputs) + 1),
            [&](std::int64_t begin, std::int64_t end, ops::StoreMode mode) {
              SumRun(dtype, from, begin, end, At(to, begin, SizeOf(dtype)), mode);
            });
}

void CopyArray(const NDArray& from, std::span<const NDArray> out, ops::StoreMode mode) {
  void* const source = const_cast<void*>(from.const_data());
  const DType dtype = from.dtype();
  Addresses same;  // outputs of the same dtype
  std::vector<std::pair<DType, void*>> others;
  std::int64_t element_bytes = Bytes(dtype);
  for (const NDArray& array : out) {
    const internal::ArrayState& state = internal::StateOf(array);
    element_bytes += Bytes(state.dtype);
    if (state.dtype == dtype) {
      same.Add(internal::WritableElements(state));
    } else {
      others.emplace_back(state.dtype, internal::WritableElements(state));
    }
  }
  ForBlocks(from.engine(), from.size(), element_bytes,
            [&](std::int64_t begin, std::int64_t end, ops::StoreMode by_bytes) {
              const ops::StoreMode stores = mode == ops::StoreMode::kAuto ? by_bytes : mode;
              const std::size_t count = static_cast<std::size_t>(end - begin);
              const void* const run = At(source, begin, SizeOf(dtype));
              const Addresses to = same.At(begin, SizeOf(dtype));
              ops::FanOut(run, to.all(), count * SizeOf(dtype), stores);
              for (const auto& [to_dtype, base] : others) {
                ops::Cast(dtype, run, to_dtype, At(base, begin, SizeOf(to_dtype)), count, stores);
              }
            });
}

void UpdateElements(const ArrayUpdate& update, std::int64_t begin, std::int64_t end,
                    const void* gradient, void* weight, ops::StoreMode mode) {
  const std::size_t element_bytes = SizeOf(update.run.dtype);
  const std::size_t state_bytes = update.run.master != nullptr ? sizeof(float) : element_bytes;
  internal::UpdateRun run = update.run;
  run.update = &update.key;
  run.weight = weight;
  run.gradient = gradient;
  if (run.master != nullptr) run.master += begin;
  const std::span<const internal::UpdateStateType> types = update.rule->states();
  for (std::size_t i = 0; i < run.states.size(); ++i) {
    if (run.states[i] == nullptr) continue;
    const bool per_row = i < types.size() && types[i].per_row;
    run.states[i] = At(run.states[i], per_row ? begin / update.key.row_length : begin, state_bytes);
  }
  for (double*& sums : run.block_sums) {
    if (sums != nullptr) sums += begin / static_cast<std::int64_t>(ops::kReductionBlock);
  }
  run.count = static_cast<std::size_t>(end - begin);
  run.first = update.first_element + begin;
  run.weight_stores = mode;
  update.rule->Update(run);
}

namespace {

// What an update of an element reads and writes besides its inputs, states aside, which differ.
std::int64_t UpdatedBytes(const ArrayUpdate& update) {
  const std::int64_t weight = 2 * Bytes(update.run.dtype);
  return update.run.master != nullptr ? weight + 2 * Bytes(DType::kFloat32) : weight;
}

// One pass with the gradient in memory.
void RunPass(const ArrayUpdate& update, const NDArray& gradient) {
  const bool sums = update.run.block_sums[0] != nullptr;
  const std::int64_t unit = sums                     ? ops::kReductionBlock
                            : update.rule->by_rows() ? update.key.row_length
                                                     : 1;
  const DType dtype = gradient.dtype();
  void* const base = const_cast<void*>(gradient.const_data());
  ForBlocks(gradient.engine(), (gradient.size() + unit - 1) / unit,
            (Bytes(dtype) + UpdatedBytes(update)) * unit,
            [&](std::int64_t begin, std::int64_t end, ops::StoreMode mode) {
              const std::int64_t first = begin * unit;
              UpdateElements(update, first, std::min(end * unit, gradient.size()),
                             At(base, first, SizeOf(dtype)),
                             At(update.run.weight, first, SizeOf(dtype)), mode);
            });
}

// One pass over elements that sums the inputs as it goes.
void RunSummingPass(const ArrayUpdate& update, const Addresses& inputs, const NDArray& like) {
  const DType dtype = like.dtype();
  const std::int64_t element_bytes = Bytes(dtype);
  ForBlocks(like.engine(), like.size(),
            element_bytes * static_cast<std::int64_t>(inputs.size()) + UpdatedBytes(update),
            [&](std::int64_t begin, std::int64_t end, ops::StoreMode mode) {
              // Small enough for the first level cache beside what the update reads.
              constexpr std::int64_t kSumBytes = 8192;
              alignas(64) std::array<std::byte, kSumBytes> sum;
              const std::int64_t step = kSumBytes / element_bytes;
              for (std::int64_t i = begin; i < end; i += step) {
                const std::int64_t stop = std::min(i + step, end);
                SumRun(dtype, inputs, i, stop, sum.data(), ops::StoreMode::kCached);
                UpdateElements(update, i, stop, sum.data(), At(update.run.weight, i, SizeOf(dtype)),
                               mode);
              }
            });
}

}  // namespace

void RunEarlierPasses(ArrayUpdate& update, const NDArray& gradient) {
  if (update.passes == 1 || gradient.size() == 0) return;
  const std::size_t blocks = ops::ReductionBlocks(static_cast<std::size_t>(gradient.size()));
  std::vector<double> block_sums(internal::kUpdateSumsMax * blocks);
  for (std::size_t i = 0; i < internal::kUpdateSumsMax; ++i) {
    update.run.block_sums[i] = block_sums.data() + i * blocks;
  }
  for (; update.key.pass + 1 < update.passes; ++update.key.pass) {
    RunPass(update, gradient);
    for (std::size_t i = 0; i < internal::kUpdateSumsMax; ++i) {
      update.key.sums[update.key.pass][i] =
          ops::AddBlocks({block_sums.data() + i * blocks, blocks});
    }
  }
  update.run.block_sums = {};
}

void UpdateArray(ArrayUpdate update, std::span<const NDArray> inputs) {
  if (inputs[0].size() == 0) return;  // what follows divides by the length of a row
  const Addresses from(inputs);
  if (from.size() > 1 && update.passes == 1 && !update.rule->by_rows()) {
    RunSummingPass(update, from, inputs[0]);
    return;
  }
  NDArray gradient = inputs[0];
  if (from.size() > 1) {
    gradient = NDArray(gradient.shape(), gradient.dtype(), gradient.device(), gradient.engine());
    SumArrays(inputs, gradient);
  }
  RunEarlierPasses(update, gradient);
  RunPass(update, gradient);
}

void FillZero(const NDArray& array) {
  void* const base = array.data();
  const DType dtype = array.dtype();
  ForBlocks(array.engine(), array.size(), Bytes(dtype),
            [&](std::int64_t begin, std::int64_t end, ops::StoreMode mode) {
              ops::Fill(dtype, 0, At(base, begin, SizeOf(dtype)),
                        static_cast<std::size_t>(end - begin), mode);
            });
}

}  // namespace heddle::kvstore
