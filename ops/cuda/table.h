// Many tasks in one launch: what a kernel does for several arrays travels as a table in its
// parameters, so that a list of small arrays costs a launch for each few dozen, and no copy.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ops/cuda/host_device.h"
#include "ops/cuda/run.h"

namespace heddle::ops::cuda {

// Bytes of parameters that every launch may have, on all GPUs.
inline constexpr std::size_t kParameterBytes = 4096;
// Blocks of one launch. A run of so many, of a thousand elements each at least, fits no memory.
inline constexpr std::uint64_t kBlocksMax = (std::uint64_t{1} << 31) - 1;

// The first of ends[0, size), which increase, that is greater than `block`.
HEDDLE_HOST_DEVICE std::uint32_t TaskOfBlock(const std::uint32_t* ends, std::uint32_t size,
                                             std::uint32_t block) {
  std::uint32_t low = 0;
  std::uint32_t high = size - 1;
  while (low < high) {
    const std::uint32_t middle = (low + high) / 2;
    if (ends[middle] > block) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// A Body for each of several runs.
template <class TaskBody>
struct Table {
  using Body = TaskBody;
  struct Task {
    Body body;
    Run run;
  };
  static constexpr std::uint32_t kCapacity =
      static_cast<std::uint32_t>((kParameterBytes - alignof(Task) - sizeof(std::uint32_t)) /
                                 (sizeof(Task) + sizeof(std::uint32_t)));

  std::uint32_t size = 0;
  std::uint32_t ends[kCapacity];  // the block after the last of each task
  union Tasks {
    Tasks() {}  // none
    Task task[kCapacity];
  } tasks;

  std::uint32_t blocks() const { return size == 0 ? 0 : ends[size - 1]; }
  HEDDLE_HOST_DEVICE const Run& RunOf(std::uint32_t task) const { return tasks.task[task].run; }
  HEDDLE_HOST_DEVICE const Body& BodyOf(std::uint32_t task) const { return tasks.task[task].body; }
};

// What thread `thread` of block `block` of a launch does.
template <class AnyTable>
HEDDLE_HOST_DEVICE void RunTableThread(const AnyTable& table, std::uint32_t block,
                                       unsigned thread) {
  const std::uint32_t task = TaskOfBlock(table.ends, table.size, block);
  const std::uint32_t first = task == 0 ? 0 : table.ends[task - 1];
  RunThread(table.BodyOf(task), table.RunOf(task), block - first, thread);
}

// Fills tables and hands each full one to launch(table).
template <class Body, class Launch>
class Packer {
 public:
  explicit Packer(const Launch& launch) : launch_(launch) {}

  void Add(const Body& body, const Run& run) { Add(body, run, BlocksOf<Body>(run)); }
  // An empty run is no work.
  void Add(const Body& body, const Run& run, std::uint64_t blocks) {
    if (blocks == 0) return;
    if (table_.size == table_.kCapacity || table_.blocks() + blocks > kBlocksMax) Flush();
    table_.tasks.task[table_.size] = {body, run};
    table_.ends[table_.size] = static_cast<std::uint32_t>(table_.blocks() + blocks);
    ++table_.size;
  }
  void Flush() {
    if (table_.size > 0) launch_(table_);
    table_.size = 0;
  }

 private:
  const Launch& launch_;
  Table<Body> table_;
};

}  // namespace heddle::ops::cuda
