// Whether a kernel's output goes through the caches or past them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace heddle::ops {

enum class StoreMode : std::uint8_t {
  kAuto,       // by the bytes that this call touches
  kCached,     // ordinary stores
  kStreaming,  // non-temporal stores: saves reading the output before it is overwritten
};

// Bytes touched (read and written) from which streaming stores win. Below, the output is still in a
// cache when the next kernel reads it. Measured on a server CPU with 2 MiB of L2 a core: sums break
// even between 30 MiB (a busy machine) and 80 MiB; streaming less than 20 MiB costs up to 30%.
inline constexpr std::size_t kStreamingBytesMin = std::size_t{48} << 20;

// The mode for an operation that touches `bytes` in all. Who splits an operation over threads asks
// this once for the whole and passes the answer to every part; the bits do not depend on it.
constexpr StoreMode StoreModeFor(std::size_t bytes) {
  return bytes >= kStreamingBytesMin ? StoreMode::kStreaming : StoreMode::kCached;
}

constexpr bool UseStreaming(StoreMode mode, std::size_t bytes) {
  return mode == StoreMode::kAuto ? StoreModeFor(bytes) == StoreMode::kStreaming
                                  : mode == StoreMode::kStreaming;
}

}  // namespace heddle::ops
