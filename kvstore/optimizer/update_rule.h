// How an optimizer changes a run of elements, with its parameters as they were at one moment.
#pragma once

#include <heddle/dtype.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace heddle::internal {

inline constexpr std::size_t kUpdateStatesMax = 4;

// A run of consecutive elements of one key. All elements of an update may be cut into such runs in
// any way, on any threads, without changing the bits of the result.
struct UpdateRun {
  DType dtype;           // of weight and gradient; floating
  void* weight;          // read and written
  const void* gradient;  // the pushed sum
  // A float32 copy of the weight, read and written in its place; the weight becomes its rounding.
  // Null without multi-precision. With it the states are float32, else they have `dtype`.
  float* master;
  std::array<void*, kUpdateStatesMax> states;  // null: a state that has not been needed so far
  std::size_t count;
  std::int64_t step;  // 1 for the first update of the key
};

// Immutable: an optimizer makes a new one when a parameter changes, and each push keeps the one
// that was current. Threads: any.
class UpdateRule {
 public:
  explicit UpdateRule(bool multi_precision) : multi_precision_(multi_precision) {}
  virtual ~UpdateRule() = default;
  UpdateRule(const UpdateRule&) = delete;
  UpdateRule& operator=(const UpdateRule&) = delete;

  // Updates float16 and bfloat16 values through a float32 copy.
  bool multi_precision() const { return multi_precision_; }
  // States that Update needs with these parameters, at most kUpdateStatesMax; they start as zeros.
  virtual std::size_t num_states() const = 0;
  virtual void Update(const UpdateRun& run) const = 0;

 private:
  bool multi_precision_;
};

}  // namespace heddle::internal
