// What a Completion points to. It outlives its op: late calls must find out that they are late.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "engine/op.h"

namespace heddle::engine {
class GpuQueue;
}

namespace heddle::internal {

// One reference is the engine's, until the op has finished; the others are Completion handles. An
// op that goes back through the CompletionRing has lost that reference before: its completing
// thread is the last to use it.
struct alignas(engine::kBlockAlign) AsyncState {
  // Bits of `flags`. The op is finished by whoever sets the second of kBodyDone and kCalled.
  enum : std::uint32_t {
    kClaimed = 1,   // some call has won and writes `thrown`
    kCalled = 2,    // `thrown` is final
    kBodyDone = 4,  // the body has returned and its captures are gone
    kHeld = 8,      // a GPU op that waits for a place on its stream
    kSkipped = 16,  // a GPU op that was poisoned when it was to be issued, and did not run
  };

  std::atomic<std::uint32_t> refs{1};
  std::atomic<std::uint32_t> flags{0};
  EngineCore* core;
  std::uint64_t core_id;  // for late calls, when `core` may be gone
  Op* op;
  std::unique_ptr<engine::Thrown> thrown;  // null: success
  AsyncState* next_completed = nullptr;    // in EngineCore::completed_
  bool of_gpu = false;                     // constant
  std::uint32_t children = 0;  // of a GPU op: ops pushed by what took its body down; see `thrown`
  engine::GpuQueue* gpu_queue = nullptr;  // of a GPU op that is ready; guarded by the engine's lock
};

}  // namespace heddle::internal
