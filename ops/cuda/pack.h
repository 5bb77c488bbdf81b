// Several elements that a GPU thread reads or writes at once, and their conversions.
#pragma once

#include <heddle/dtype.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include "base/check.h"  // nvcc does not accept fmt
#endif

#include "ops/cuda/host_device.h"
#include "ops/dispatch.h"

namespace heddle::ops::cuda {

// The most that one access moves.
inline constexpr int kAccessBytes = 16;

template <typename T, int kLanes>
struct Pack {
  T lanes[kLanes];
};

namespace internal {

// On the CPU, an access that a GPU would fault on is a failure.
HEDDLE_HOST_DEVICE void CheckAligned([[maybe_unused]] const void* p,
                                     [[maybe_unused]] std::uintptr_t bytes) {
#ifndef __CUDACC__
  CHECK(reinterpret_cast<std::uintptr_t>(p) % bytes == 0);
#endif
}

template <int kBytes>
struct AccessOf;
template <>
struct AccessOf<1> {
  using type = std::uint8_t;
};
template <>
struct AccessOf<2> {
  using type = std::uint16_t;
};
template <>
struct AccessOf<4> {
  using type = std::uint32_t;
};
template <>
struct AccessOf<8> {
  struct alignas(8) type {
    std::uint32_t x, y;
  };
};
template <>
struct AccessOf<16> {
  struct alignas(16) type {
    std::uint32_t x, y, z, w;
  };
};

}  // namespace internal

// kLanes elements from p, in one access: p is aligned to as many bytes as that takes.
template <int kLanes, typename T>
HEDDLE_HOST_DEVICE Pack<T, kLanes> LoadPack(const T* p) {
  using Access = typename internal::AccessOf<kLanes * sizeof(T)>::type;
  Pack<T, kLanes> pack;
  internal::CheckAligned(p, sizeof(Access));
  const Access access = *reinterpret_cast<const Access*>(p);
  std::memcpy(static_cast<void*>(&pack), &access, sizeof(access));
  return pack;
}

template <typename T, int kLanes>
HEDDLE_HOST_DEVICE void StorePack(const Pack<T, kLanes>& pack, T* p) {
  using Access = typename internal::AccessOf<kLanes * sizeof(T)>::type;
  internal::CheckAligned(p, sizeof(Access));
  Access access;
  std::memcpy(&access, static_cast<const void*>(&pack), sizeof(access));
#ifdef __CUDA_ARCH__
  // The compiler would split an assignment where the elements are narrower than 4 bytes.
  if constexpr (sizeof(Access) == 16) {
    __stwb(reinterpret_cast<uint4*>(p), make_uint4(access.x, access.y, access.z, access.w));
    return;
  } else if constexpr (sizeof(Access) == 8) {
    __stwb(reinterpret_cast<uint2*>(p), make_uint2(access.x, access.y));
    return;
  }
#endif
  *reinterpret_cast<Access*>(p) = access;
}

// The same for what nobody reads soon: the cache gives it up first. Where a kernel mostly writes
// that is worth a twentieth of its time on an H200.
template <typename T, int kLanes>
HEDDLE_HOST_DEVICE void StorePackOnce(const Pack<T, kLanes>& pack, T* p) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(pack) == sizeof(uint4)) {
    uint4 access;
    std::memcpy(&access, static_cast<const void*>(&pack), sizeof(access));
    __stcs(reinterpret_cast<uint4*>(p), access);
    return;
  }
#endif
  StorePack(pack, p);
}

// ---- Elements in the type that they are computed in. GPUs convert 16-bit floats in hardware: the
// same bits as dtype.h's, except those inside of NaNs.

template <typename T>
HEDDLE_HOST_DEVICE ComputeType<T> Widen(T value) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<T, Float16>) {
    return __half2float(__ushort_as_half(value.bits));
  }
#endif
  return static_cast<ComputeType<T>>(value);
}

template <typename T>
HEDDLE_HOST_DEVICE T Narrow(ComputeType<T> value) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<T, Float16>) {
    T result;
    result.bits = __half_as_ushort(__float2half_rn(value));
    return result;
  }
  if constexpr (std::is_same_v<T, BFloat16>) {
    T result;
    result.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
    return result;
  }
#endif
  return static_cast<T>(value);
}

}  // namespace heddle::ops::cuda
