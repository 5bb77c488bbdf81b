// What a variable remembers of GPU ops. Made when the first one that names it is issued.
#pragma once

#include <cstdint>
#include <vector>

namespace heddle::engine {

class GpuQueue;
struct FailureRecord;

// A place in what was issued on a stream: its `number`-th op and all before.
struct GpuMark {
  GpuQueue* queue = nullptr;  // null: no place
  std::uint64_t number = 0;
  bool on_device = false;  // of what an op waits for: its stream does, too
};

// Guarded by the tracker's lock.
struct GpuVar {
  int issued = 0;         // granted accesses of ops that are issued and have not finished
  int issued_writes = 0;  // writes among them
  int stacked = 0;        // granted writers besides VarState::writer; all but that are issued
  // What the variable is poisoned by once the issued writes have finished, as far as is known.
  // Only if issued_writes > 0.
  FailureRecord* frontier = nullptr;
  bool frontier_keeps = false;  // as VarState::keeps_failure
  // What a later op on another stream waits for: a read for the last write, a write also for the
  // reads since.
  GpuMark last_write;
  std::vector<GpuMark> reads;
};

}  // namespace heddle::engine
