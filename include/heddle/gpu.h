// Streams of GPUs, as the bodies of Engine::PushGpu see them, and how many an engine uses.
#pragma once

#include <array>

namespace heddle {

// Where the body of a GPU op issues its work. `handle` is a cudaStream_t; it may be used until the
// body returns.
struct GpuStream {
  int device = 0;
  void* handle = nullptr;
};

// The streams of one lane of a device. They are made when an op first needs one.
struct GpuLaneOptions {
  int streams = 1;         // an op takes the one with the fewest ops ahead of it
  int urgent_streams = 1;  // for ops above priority 0, with the device's highest priority; 0: none
  int priority = 0;        // of `streams`, as CUDA counts: lower numbers first
};

struct GpuOptions {
  // Ops issued and not yet finished, at most, a stream: what waits beyond goes by priority.
  int issued_ahead = 16;
  std::array<GpuLaneOptions, 4> lanes = {};  // by Lane
};

}  // namespace heddle
