// What the kernel tests share: every SIMD target, random arrays with guards around them,
// comparisons.
#pragma once

#include <heddle/dtype.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include "ops/dispatch.h"
#include "ops/store_mode.h"

namespace heddle::ops {

// Runs `body` once on every SIMD target of this machine and once on the portable fallback.
template <typename Body>
void OnEveryTarget(const Body& body) {
  const std::int64_t supported = hwy::SupportedTargets();
  for (std::int64_t rest = supported;; rest &= rest - 1) {
    const std::int64_t target = rest & -rest;  // 0 at last: the fallback
    SCOPED_TRACE(target == 0 ? "portable fallback" : hwy::TargetName(target));
    hwy::GetChosenTarget().Update(target);
    body();
    if (target == 0 || ::testing::Test::HasFailure()) break;
  }
  hwy::GetChosenTarget().Update(supported);
}

// A seed that is new in each run, unless HEDDLE_TEST_SEED sets it; printed when a test fails.
inline std::uint64_t TestSeed() {
  static const std::uint64_t seed = [] {
    const char* text = std::getenv("HEDDLE_TEST_SEED");
    return text != nullptr ? std::strtoull(text, nullptr, 10) : std::random_device()();
  }();
  return seed;
}

class KernelTest : public ::testing::Test {
 protected:
  KernelTest() : random_(TestSeed()) {}
  void TearDown() override {
    if (HasFailure()) ADD_FAILURE() << "HEDDLE_TEST_SEED=" << TestSeed();
  }

  std::size_t Below(std::size_t end) { return random_() % end; }

  // 0, 1, or up to a few vectors with and without a remainder.
  std::size_t RandomCount() {
    switch (Below(6)) {
      case 0:
        return Below(3);
      case 1:
        return Below(20);
      case 2:
        return 128 * Below(12);
      default:
        return Below(1500);
    }
  }

  std::mt19937_64 random_;
};

// `count` elements of type T that start `offset` elements past a 64-byte boundary, with guard bytes
// on both sides whose change is a failure.
template <typename T>
class Array {
 public:
  using Stored = StorageType<T>;

  explicit Array(std::size_t count, std::size_t offset = 0)
      : memory_(kGuard + (offset + count) * sizeof(T) + 2 * kGuard, kGuardByte), count_(count) {
    const auto start = reinterpret_cast<std::uintptr_t>(memory_.data()) + kGuard;
    first_ = (start + 63) / 64 * 64 - start + kGuard + offset * sizeof(T);
  }
  Array(const Array&) = delete;  // a copy would lie at another alignment
  Array& operator=(const Array&) = delete;
  ~Array() {
    const std::size_t end = first_ + count_ * sizeof(T);
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      if ((i < first_ || i >= end) && memory_[i] != kGuardByte) {
        ADD_FAILURE() << "wrote outside of the array, at byte "
                      << static_cast<std::ptrdiff_t>(i - first_);
        return;
      }
    }
  }

  Stored* data() { return reinterpret_cast<Stored*>(memory_.data() + first_); }
  Stored& operator[](std::size_t i) { return data()[i]; }
  std::size_t size() const { return count_; }
  void CopyFrom(Array& other) {
    std::memcpy(memory_.data() + first_, other.data(), count_ * sizeof(T));
  }

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr std::uint8_t kGuardByte = 0xA5;
  std::vector<std::uint8_t> memory_;
  std::size_t count_;
  std::size_t first_;
};

// A value of T: mostly moderate numbers, so that sums are inexact but finite; now and then any bits
// (NaN, infinities, subnormals, extremes).
template <typename T>
StorageType<T> RandomValue(std::mt19937_64& random) {
  StorageType<T> value;
  const std::uint64_t bits = random();
  std::memcpy(static_cast<void*>(&value), &bits, sizeof(T));
  const double moderate = std::uniform_real_distribution<double>(-4, 4)(random);
  if (random() % 16 == 0) return value;
  if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(moderate);
  } else if constexpr (std::is_same_v<T, bool>) {
    return random() % 2;
  } else if constexpr (std::is_integral_v<T>) {
    return value;
  } else {
    return T(static_cast<float>(moderate));
  }
}

template <typename T>
void Randomize(Array<T>& array, std::mt19937_64& random) {
  for (std::size_t i = 0; i < array.size(); ++i) array[i] = RandomValue<T>(random);
}

template <typename T>
double ToDouble(T value) {
  if constexpr (std::is_same_v<ComputeType<T>, float>) {
    return static_cast<double>(static_cast<float>(value));
  } else {
    return static_cast<double>(value);
  }
}

// The same bits, or both NaN.
template <typename T>
bool SameBits(T a, T b) {
  if (std::isnan(ToDouble(a)) && std::isnan(ToDouble(b))) return true;
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

template <typename T>
void ExpectSame(Array<T>& actual, Array<T>& expected, std::string_view what = "") {
  ASSERT_EQ(actual.size(), expected.size());
  if (actual.size() == 0) return;
  // Almost always: element by element takes a hundred times as long.
  if (std::memcmp(actual.data(), expected.data(), actual.size() * sizeof(actual[0])) == 0) return;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_TRUE(SameBits(actual[i], expected[i]))
        << what << " element " << i << " of " << actual.size() << ": got " << ToDouble(actual[i])
        << ", expected " << ToDouble(expected[i]) << " (" << Name(kDTypeOf<T>) << ")";
  }
}

// Calls body(std::type_identity<T>) for every dtype.
template <typename Body>
void ForEveryDType(const Body& body) {
  for (DType dtype : kAllDTypes) {
    SCOPED_TRACE(Name(dtype));
    DispatchDType(dtype, body);
  }
}

template <typename Body>
void ForEveryFloatingDType(const Body& body) {
  for (DType dtype : kAllDTypes) {
    SCOPED_TRACE(Name(dtype));
    if (IsFloating(dtype)) DispatchFloating(dtype, body);
  }
}

inline constexpr StoreMode kEveryStoreMode[] = {StoreMode::kAuto, StoreMode::kCached,
                                                StoreMode::kStreaming};

}  // namespace heddle::ops
