// TraceWriter: records what an engine does as small binary records in a file.
//
// The file is mapped shared, so the records survive the process however it ends, SIGKILL included.
// Each thread writes into a chunk of its own, claimed by one atomic addition: recording takes no
// lock, and costs one or two dozen nanoseconds. Dependencies are not recorded: the reader replays
// the pushes in ticket order. engine/trace_format.h has the layout, docs/trace.md explains it.
//
// Threads: the On... calls may come from any thread at any time between construction and
// destruction. Times: nanoseconds of std::chrono::steady_clock. Tickets and var ids: chosen by the
// engine, unique in a file; tickets in push order, var ids from 1 and below 2^62.
#pragma once

#include <heddle/device.h>
#include <heddle/engine.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_set>

#include "base/mutex.h"
#include "engine/gpu/device_trace.h"
#include "engine/tls.h"
#include "engine/trace_format.h"

namespace heddle::engine {

enum class TraceAccess : std::uint8_t { kRead = 1, kWrite = 2, kReadWrite = 3 };
enum class TraceOutcome : std::uint8_t { kOk = 0, kFailed = 1, kSkipped = 2 };
enum class TraceWait : std::uint8_t {
  kVar = 0,       // WaitForVar
  kVarReads = 1,  // WaitForReadsAndWrites
  kAll = 2,       // WaitForAll
  kRoom = 3,      // a push waited for room
};

class TraceWriter {
 public:
  // Creates or replaces the file; "%p" in `path` becomes the process id. The file grows as needed,
  // up to `bytes_max` (at least one chunk); from the first record that does not fit (cap or full
  // disk) on, all records are dropped and counted, so that what the file holds is complete up to
  // that moment. Errors: IoError naming the file: cannot be written, or another TraceWriter writes
  // it now.
  TraceWriter(const std::string& path, std::int64_t bytes_max);
  ~TraceWriter();
  TraceWriter(const TraceWriter&) = delete;
  TraceWriter& operator=(const TraceWriter&) = delete;

  // An op was queued. access(i) for i < accesses returns a TraceVar. `name` must live as long as
  // the process (OpName::c_str() does): its text is written once a file.
  struct TraceVar {
    std::uint64_t id;
    TraceAccess access;
  };
  template <class AccessAt>
  void OnPush(std::uint64_t ticket, std::uint64_t now_ns, const char* name, Device device,
              Lane lane, int priority, std::size_t accesses, AccessAt&& access) noexcept;

  // The body of an op ran on the calling thread; for a skipped op both times are the same.
  void OnRun(std::uint64_t ticket, std::uint64_t started_ns, std::uint64_t ended_ns,
             TraceOutcome outcome) noexcept;
  // An async op finished; OnRun tells of its body.
  void OnComplete(std::uint64_t ticket, std::uint64_t now_ns, TraceOutcome outcome) noexcept;
  // The calling thread waited; var_id 0 when not for one variable.
  void OnWait(TraceWait kind, std::uint64_t var_id, std::uint64_t started_ns,
              std::uint64_t ended_ns) noexcept;
  // A device did a piece of what an op had issued.
  void OnWork(const internal::DeviceWork& work) noexcept;
  // Names a variable; unnamed ones read "var<id>".
  void OnVar(std::uint64_t id, std::string_view name) noexcept;

  // A record that the engine knows nothing of: the bytes of a struct that begins with its head,
  // TraceRecordHead(kind, sizeof(Record)).
  template <class Record>
  void OnRecord(const Record& record) noexcept {
    static_assert(std::is_trivially_copyable_v<Record> && sizeof(Record) % 8 == 0);
    Cursor& cursor = ThisThread();
    std::byte* const place = Reserve(cursor, sizeof(Record));
    if (place == nullptr) return;
    std::memcpy(place, &record, sizeof(Record));
    Publish(cursor, sizeof(Record));
  }
  // And one of a text.
  void OnText(TraceKind kind, std::uint64_t key, std::string_view text) noexcept;

  // Marks the file as complete; later records are ignored. The destructor calls it.
  void Finish() noexcept;

  const std::string& path() const { return path_; }
  std::uint64_t dropped() const;

 private:
  enum class State : int { kOpen, kFull, kFinished };
  class Claiming;
  struct Cursor;  // where a thread writes

  struct ThreadCursors;  // those of a thread, for the traces that it records in
  static HEDDLE_TLS ThreadCursors* tls_cursors;
  static HEDDLE_TLS bool tls_cursors_closed;

  bool OpenLocked();
  static ThreadCursors& MakeThreadCursors() noexcept;
  Cursor& ThisThread() noexcept;
  // Room for a record of `bytes` (a multiple of 8) in the calling thread's chunk; null: dropped and
  // counted.
  std::byte* Reserve(Cursor& cursor, std::size_t bytes) noexcept;
  // Makes the record just written part of the file.
  static void Publish(Cursor& cursor, std::size_t bytes) noexcept;
  bool ClaimChunk(Cursor& cursor, std::size_t record_bytes) noexcept;
  void Drop() noexcept;
  void WriteNameIfNew(Cursor& cursor, const char* name) noexcept;
  void WriteText(Cursor& cursor, TraceKind kind, std::uint64_t key, std::string_view text) noexcept;
  TraceFileHeader& header() const { return *reinterpret_cast<TraceFileHeader*>(map_); }

  const std::uint64_t
      writer_id_;  // unique in the process, so that a thread's cursors never mix writers
  std::string path_;
  std::size_t bytes_max_;
  int file_ = -1;  // until Finish
  // Only what was claimed lies within the file. After Finish it is of none.
  std::byte* map_ = nullptr;
  std::size_t mapped_bytes_ = 0;  // bytes_max_; after Finish what was claimed
  std::atomic<std::size_t> claimed_{kTraceHeaderBytes};
  std::atomic<State> state_{State::kOpen};
  std::atomic<int> claiming_{0};
  std::atomic<std::uint64_t> dropped_{0};  // in all, once it has finished
  Mutex names_mutex_;
  std::unordered_set<const char*> names_ GUARDED_BY(names_mutex_);  // that some thread has written
};

// The calling thread's place in one trace.
struct TraceWriter::Cursor {
  static constexpr std::size_t kNames = 64;

  std::uint64_t writer_id = 0;
  TraceChunkHeader* chunk = nullptr;
  std::size_t used = 0;            // of the chunk, without its header
  std::size_t room = 0;            // the same, at most
  const char* names[kNames] = {};  // that are known to be in the file; direct-mapped
};

template <class AccessAt>
void TraceWriter::OnPush(std::uint64_t ticket, std::uint64_t now_ns, const char* name,
                         Device device, Lane lane, int priority, std::size_t accesses,
                         AccessAt&& access) noexcept {
  Cursor& cursor = ThisThread();
  WriteNameIfNew(cursor, name);
  const std::size_t bytes = sizeof(TracePushRecord) + accesses * sizeof(std::uint64_t);
  std::byte* const place = Reserve(cursor, bytes);
  if (place == nullptr) return;
  *reinterpret_cast<TracePushRecord*>(place) = {
      .head = TraceRecordHead(TraceKind::kPush, bytes),
      .priority = priority,
      .ticket = ticket,
      .pushed_ns = now_ns,
      .name = reinterpret_cast<std::uintptr_t>(name),
      .device_id = device.id,
      .device_type = static_cast<std::uint8_t>(device.type),
      .lane = static_cast<std::uint8_t>(lane),
      .accesses = static_cast<std::uint32_t>(accesses),
  };
  auto* words = reinterpret_cast<std::uint64_t*>(place + sizeof(TracePushRecord));
  for (std::size_t i = 0; i < accesses; ++i) {
    const TraceVar var = access(i);
    words[i] = var.id << 2 | static_cast<std::uint64_t>(var.access);
  }
  Publish(cursor, bytes);
}

}  // namespace heddle::engine
