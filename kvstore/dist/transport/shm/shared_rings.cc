#include "kvstore/dist/transport/shm/shared_rings.h"

#include <heddle/error.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <new>
#include <string>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "base/check.h"
#include "base/file_size_signal.h"
#include "base/prefetch.h"
#include "base/sanitizers.h"
#include "kvstore/dist/transport/shm/fail.h"
#include "ops/copy.h"

// The thread sanitizer knows memory by its address, so that two mappings in one process, as tests
// have them, are strangers to it: what orders them has to be told.
#if HEDDLE_THREAD_SANITIZER
#include <sanitizer/tsan_interface.h>
#endif

namespace heddle::kvstore::dist {
namespace {

#if HEDDLE_THREAD_SANITIZER
// One for each file.
void* TagOf(int fd) {
  static char tags[1 << 16];
  struct stat status {};
  return fstat(fd, &status) == 0 ? &tags[status.st_ino % sizeof tags] : nullptr;
}
void BeforePublishing(void* tag) { __tsan_release(tag); }
void AfterLooking(void* tag) { __tsan_acquire(tag); }
#else
void* TagOf(int /*fd*/) { return nullptr; }
void BeforePublishing(void* /*tag*/) {}
void AfterLooking(void* /*tag*/) {}
#endif

constexpr std::size_t kControlBytes = 4096;
constexpr std::size_t kLine = 64;  // positions of two writers do not share one
constexpr std::size_t kStreamedBytesMin = std::size_t{16} << 10;
constexpr std::size_t kPopulatedBytesMax = std::size_t{1} << 20;
constexpr std::size_t kShortBytes = std::size_t{8} << 10;
constexpr std::size_t kPieceBytes = std::size_t{2} << 10;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

using Position = std::atomic<std::uint64_t>;
static_assert(Position::is_always_lock_free);  // hence good between processes

// The pages of small rings come at once: one after the other, with messages that are short and few,
// a process would grow for hours. Those of large ones come soon enough, if they are used.
std::span<std::byte> Map(int fd, std::size_t bytes) {
  const int populate = bytes <= kPopulatedBytesMax ? MAP_POPULATE : 0;
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | populate, fd, 0);
  if (memory == MAP_FAILED) Fail("map shared memory", errno);
  return {static_cast<std::byte*>(memory), bytes};
}

// Whether whoever left the wish is to be woken.
bool TakeWish(Position& wish, std::uint64_t position) {
  // seq_cst: S2. A wish that has changed meanwhile is a new one, whose owner looks by itself.
  std::uint64_t at = wish.load(std::memory_order_seq_cst);
  return at != 0 && position >= at &&
         wish.compare_exchange_strong(at, 0, std::memory_order_seq_cst);
}

}  // namespace

struct SharedRings::Stream {
  alignas(kLine) Position written;
  alignas(kLine) Position wanted_written;  // the reader's wish; 0: none
  alignas(kLine) Position read;
  alignas(kLine) Position wanted_read;  // the writer's wish; 0: none
};

struct SharedRings::Control {
  Stream from_maker, to_maker;
};

std::unique_ptr<SharedRings> SharedRings::Make(std::size_t ring_bytes, UniqueFd* memory) {
  CHECK(std::has_single_bit(ring_bytes) && ring_bytes >= kRingBytesMin &&
        ring_bytes <= kRingBytesMax);
  *memory = UniqueFd(memfd_create("heddle", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (memory->get() < 0) Fail("make shared memory", errno);
  const std::size_t bytes = kControlBytes + 2 * ring_bytes;
  {
    const NoFileSizeSignal no_signal;
    if (ftruncate(memory->get(), static_cast<off_t>(bytes)) != 0) Fail("size shared memory", errno);
  }
  if (fcntl(memory->get(), F_ADD_SEALS, kSeals) != 0) Fail("seal shared memory", errno);
  return std::unique_ptr<SharedRings>(
      new SharedRings(Map(memory->get(), bytes), true, TagOf(memory->get())));
}

std::unique_ptr<SharedRings> SharedRings::Take(const UniqueFd& memory) {
  struct stat status {};
  if (fstat(memory.get(), &status) != 0) Fail("look at shared memory", errno);
  const auto bytes = static_cast<std::uint64_t>(status.st_size);
  const std::uint64_t ring_bytes = (bytes - kControlBytes) / 2;
  if (bytes < kControlBytes || bytes % 2 != 0 || !std::has_single_bit(ring_bytes) ||
      ring_bytes < kRingBytesMin || ring_bytes > kRingBytesMax) {
    throw NetworkError(fmt::format("shared memory of {} bytes", bytes));
  }
  const int seals = fcntl(memory.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    throw NetworkError("shared memory that may shrink");
  }
  return std::unique_ptr<SharedRings>(
      new SharedRings(Map(memory.get(), bytes), false, TagOf(memory.get())));
}

SharedRings::SharedRings(std::span<std::byte> memory, bool made_here, void* tag)
    : memory_(memory), ring_bytes_((memory.size() - kControlBytes) / 2), tag_(tag) {
  static_assert(sizeof(Control) <= kControlBytes);
  // New memory is zero, and zero is how everything begins.
  auto* const control = std::launder(reinterpret_cast<Control*>(memory.data()));
  std::byte* const rings = memory.data() + kControlBytes;
  out_ = made_here ? &control->from_maker : &control->to_maker;
  in_ = made_here ? &control->to_maker : &control->from_maker;
  out_ring_ = made_here ? rings : rings + ring_bytes_;
  in_ring_ = made_here ? rings + ring_bytes_ : rings;
}

SharedRings::~SharedRings() { munmap(memory_.data(), memory_.size()); }

// ---- Writing

std::optional<SharedRings::Moved> SharedRings::Write(const iovec* runs, std::size_t count) {
  std::size_t wanted = 0;
  for (std::size_t i = 0; i < count; ++i) wanted += runs[i].iov_len;
  if (written_ + wanted > known_read_ + ring_bytes_) {
    // acquire: the reader is done with what it has read
    known_read_ = out_->read.load(std::memory_order_acquire);
    if (written_ - known_read_ > ring_bytes_) return std::nullopt;
  }
  std::size_t room = ring_bytes_ - (written_ - known_read_);
  // A reader that is awake takes the first bytes of a short message while the others are written:
  // most of the time of either is that of lines on their way between the cores.
  const std::size_t short_end = wanted <= kShortBytes ? std::min(wanted, room) : 0;
  const std::size_t piece = short_end > 0 ? kPieceBytes : ring_bytes_;
  std::size_t shown = 0;
  Moved moved;
  for (std::size_t i = 0; i < count && room > 0; ++i) {
    const auto* from = static_cast<const std::byte*>(runs[i].iov_base);
    for (std::size_t rest = std::min(runs[i].iov_len, room); rest > 0;) {
      const std::size_t at = (written_ + moved.bytes) & (ring_bytes_ - 1);
      const std::size_t bytes = std::min({rest, ring_bytes_ - at, piece});
      std::memcpy(out_ring_ + at, from, bytes);
      from += bytes;
      rest -= bytes;
      room -= bytes;
      moved.bytes += bytes;
      if (moved.bytes - shown >= kPieceBytes && moved.bytes < short_end) {
        shown = moved.bytes;
        BeforePublishing(tag_);
        // release: the bytes. Wishes are for the whole.
        out_->written.store(written_ + shown, std::memory_order_release);
      }
    }
  }
  if (moved.bytes == 0) return moved;
  written_ += moved.bytes;
  BeforePublishing(tag_);
  out_->written.store(written_, std::memory_order_seq_cst);  // S2
  moved.wake_peer = TakeWish(out_->wanted_written, written_);
  if (moved.bytes <= kShortBytes) FetchForNextWrite(moved.bytes);
  return moved;
}

// What is written next goes to lines that lie in the reader's cache. Short messages are often
// followed by others of their length, so these lines come while this side waits for the answer.
void SharedRings::FetchForNextWrite(std::size_t bytes) const {
  for (std::size_t offset = 0; offset < bytes; offset += kLine) {
    PrefetchForWrite(out_ring_ + ((written_ + offset) & (ring_bytes_ - 1)));
  }
}

bool SharedRings::HasRoom(std::size_t bytes) const {
  // Without a look at the reader's position, which is in its cache.
  if (written_ + bytes <= known_read_ + ring_bytes_) return true;
  const std::uint64_t used = written_ - out_->read.load(std::memory_order_acquire);
  return used + bytes <= ring_bytes_ || used > ring_bytes_;
}

bool SharedRings::AwaitRoom(std::size_t bytes) {
  if (HasRoom(bytes)) return false;
  out_->wanted_read.store(written_ + bytes - ring_bytes_, std::memory_order_seq_cst);
  // S2; the load orders itself behind the store
  const std::uint64_t used = written_ - out_->read.load(std::memory_order_seq_cst);
  if (used + bytes > ring_bytes_ && used <= ring_bytes_) return true;
  out_->wanted_read.store(0, std::memory_order_relaxed);
  return false;
}

// ---- Reading

std::optional<SharedRings::Moved> SharedRings::Read(const iovec* runs, std::size_t count,
                                                    ops::StoreMode mode) {
  // acquire: what the writer has written is there
  std::uint64_t there = in_->written.load(std::memory_order_acquire) - read_;
  if (there > ring_bytes_) return std::nullopt;
  AfterLooking(tag_);
  Moved moved;
  for (std::size_t i = 0; i < count && there > 0; ++i) {
    auto* to = static_cast<std::byte*>(runs[i].iov_base);
    for (std::size_t rest = std::min<std::uint64_t>(runs[i].iov_len, there); rest > 0;) {
      const std::size_t at = (read_ + moved.bytes) & (ring_bytes_ - 1);
      const std::size_t bytes = std::min(rest, ring_bytes_ - at);
      if (bytes < kStreamedBytesMin) {
        std::memcpy(to, in_ring_ + at, bytes);
      } else {
        ops::Copy(in_ring_ + at, to, bytes, mode);
      }
      to += bytes;
      rest -= bytes;
      there -= bytes;
      moved.bytes += bytes;
    }
  }
  if (moved.bytes == 0) return moved;
  read_ += moved.bytes;
  in_->read.store(read_, std::memory_order_seq_cst);  // S2
  moved.wake_peer = TakeWish(in_->wanted_read, read_);
  return moved;
}

bool SharedRings::HasBytes() const { return in_->written.load(std::memory_order_acquire) != read_; }

bool SharedRings::AwaitBytes(std::size_t bytes) {
  in_->wanted_written.store(read_ + bytes, std::memory_order_seq_cst);
  const std::uint64_t there = in_->written.load(std::memory_order_seq_cst) - read_;  // S2
  if (there < bytes) return true;
  in_->wanted_written.store(0, std::memory_order_relaxed);
  return false;
}

}  // namespace heddle::kvstore::dist
