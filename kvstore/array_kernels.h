// Kernels over whole arrays, for the bodies of the store's ops: cut into blocks that the engine's
// workers share. The bits do not depend on the number of workers.
#pragma once

#include <heddle/ndarray.h>

#include <cstdint>
#include <span>

#include "kvstore/update_state.h"
#include "ops/store_mode.h"

namespace heddle::kvstore {

// out = inputs[0] + inputs[1] + ..., in list order. Equal shapes and dtypes, one input at least;
// inputs may be `out` itself.
void SumArrays(std::span<const NDArray> inputs, const NDArray& out);

// Every output becomes `from`, cast to its dtype. Equal shapes; an output may be `from` itself. In
// one pass over `from`.
void CopyArray(const NDArray& from, std::span<const NDArray> out,
               ops::StoreMode mode = ops::StoreMode::kAuto);

// All passes of `update` with the sum of the inputs as the gradient; none for a value without
// elements. Where one pass over elements does, the sum never reaches memory as a whole.
void UpdateArray(ArrayUpdate update, std::span<const NDArray> inputs);

// All passes but the last one, with the gradient in memory.
void RunEarlierPasses(ArrayUpdate& update, const NDArray& gradient);
// A part of the current pass: the elements [begin, end) of the value. `gradient` and `weight` point
// at the first of them. `mode`: as for the whole.
void UpdateElements(const ArrayUpdate& update, std::int64_t begin, std::int64_t end,
                    const void* gradient, void* weight,
                    ops::StoreMode mode = ops::StoreMode::kAuto);

void FillZero(const NDArray& array);

}  // namespace heddle::kvstore
