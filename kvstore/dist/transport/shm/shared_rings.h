// Two streams of bytes, one each way, through memory that two processes share.
//
// The memory (docs/wire.md has it byte by byte) is anonymous: when both processes have ended, by
// whatever means, nothing is left of it. Each stream is a ring of bytes with two positions that
// only grow: what the writer has written and what the reader has read. A side that wants to sleep
// leaves a wish, the position from which it wants to be woken; who reaches the position takes the
// wish and is told to wake the other side, which is up to the caller.
//   (S1) Each side trusts but its own positions, which it keeps for itself too. What the other side
//        says is used only after it was found to be possible; bytes are copied out before anything
//        is made of them. So the other side can at worst send nonsense, as over a socket.
//   (S2) A wish is left before the other side's position is looked at for the last time, a position
//        is published before the wish is looked at, all sequentially consistent: one of the two
//        sees the other, and no wake-up is lost.
//   (S3) The memory cannot shrink under its users: it is sealed.
// Threads: one call of the writing methods at a time, one of the reading ones; both at the same
// time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include <sys/uio.h>

#include "base/unique_fd.h"
#include "ops/store_mode.h"

namespace heddle::kvstore::dist {

class SharedRings {
 public:
  static constexpr std::size_t kRingBytesMin = std::size_t{64} << 10;
  static constexpr std::size_t kRingBytesMax = std::size_t{16} << 20;

  struct Moved {
    std::size_t bytes = 0;
    bool wake_peer = false;
  };

  // New memory; `memory` is what the other side needs. `ring_bytes`: of each ring, a power of two
  // from kRingBytesMin to kRingBytesMax. NetworkError if the system has none to give.
  static std::unique_ptr<SharedRings> Make(std::size_t ring_bytes, UniqueFd* memory);
  // The other side. NetworkError if it is no memory that Make can have made.
  static std::unique_ptr<SharedRings> Take(const UniqueFd& memory);
  ~SharedRings();
  SharedRings(const SharedRings&) = delete;
  SharedRings& operator=(const SharedRings&) = delete;

  // Writing. As much as there is room for; nothing if the other side has broken the rules.
  [[nodiscard]] std::optional<Moved> Write(const iovec* runs, std::size_t count);
  // Room for `bytes`, or broken rules.
  [[nodiscard]] bool HasRoom(std::size_t bytes) const;
  // The other side shall wake this one once there is room for `bytes`. False: there is.
  [[nodiscard]] bool AwaitRoom(std::size_t bytes);

  // Reading. As much as there is; nothing if the other side has broken the rules. `mode`: of long
  // copies.
  [[nodiscard]] std::optional<Moved> Read(const iovec* runs, std::size_t count,
                                          ops::StoreMode mode = ops::StoreMode::kCached);
  // Something to read, or broken rules.
  [[nodiscard]] bool HasBytes() const;
  // The other side shall wake this one once there are `bytes`. False: there are.
  [[nodiscard]] bool AwaitBytes(std::size_t bytes);

 private:
  struct Stream;   // positions and wishes
  struct Control;  // of both streams

  SharedRings(std::span<std::byte> memory, bool made_here, void* tag);

  void FetchForNextWrite(std::size_t bytes) const;

  const std::span<std::byte> memory_;  // mapped
  const std::size_t ring_bytes_;
  void* const tag_;  // for the thread sanitizer

  Stream* out_;
  std::byte* out_ring_;
  std::uint64_t written_ = 0;
  std::uint64_t known_read_ = 0;  // what the reader had read when there was too little room last

  Stream* in_;
  const std::byte* in_ring_;
  std::uint64_t read_ = 0;
};

}  // namespace heddle::kvstore::dist
