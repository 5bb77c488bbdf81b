#include "engine/trace.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/check.h"
#include "base/file_size_signal.h"

namespace heddle::engine {
namespace {

std::atomic<std::uint64_t> next_writer_id{1};

[[noreturn]] void ThrowIo(const std::string& path, const char* what, int error) {
  throw IoError(
      fmt::format("trace file {}: {}: {}", path, what, std::generic_category().message(error)));
}

std::string WithProcessId(std::string path) {
  const std::string pid = std::to_string(getpid());
  for (std::size_t at = path.find("%p"); at != std::string::npos; at = path.find("%p", at)) {
    path.replace(at, 2, pid);
  }
  return path;
}

template <class Clock>
std::uint64_t NowNs() {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
          .count());
}

// Random at each start of the machine; empty if it does not say.
std::string BootId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return id;
}

template <std::size_t kSize>
void CopyName(char (&to)[kSize], std::string_view from) {
  std::memset(to, 0, kSize);
  std::memcpy(to, from.data(), std::min(from.size(), kSize - 1));
}

// Whether the file is a trace that has ended in order.
bool IsClosedTrace(int file) {
  TraceFileHeader head = {};
  return pread(file, &head, sizeof(head), 0) == static_cast<ssize_t>(sizeof(head)) &&
         std::memcmp(head.magic, kTraceMagic, sizeof(kTraceMagic)) == 0 && head.closed == 1;
}

}  // namespace

TraceWriter::TraceWriter(const std::string& path, std::int64_t bytes_max)
    : writer_id_(next_writer_id.fetch_add(1, std::memory_order_relaxed)),
      path_(WithProcessId(path)),
      bytes_max_(std::max<std::size_t>(bytes_max > 0 ? static_cast<std::size_t>(bytes_max) : 0,
                                       kTraceHeaderBytes + kTraceChunkBytes)) {
  if (path_.find('\0') != std::string::npos) ThrowIo(path_, "has a zero byte in its name", EINVAL);
  const NoFileSizeSignal no_signal;
  // Only the owner of the lock may empty the file: two engines given one path must not mix.
  int error = 0;
  const char* what = nullptr;
  bool locked = OpenLocked();
  if (!locked && errno == EWOULDBLOCK && IsClosedTrace(file_)) {
    // A child of fork() keeps it open: the new trace gets another one.
    unlink(path_.c_str());
    close(file_);
    locked = OpenLocked();
  }
  if (!locked) {
    error = errno;
    what = error == EWOULDBLOCK ? "another engine is writing to it" : "cannot be locked";
  } else if ((error = posix_fallocate(file_, 0, kTraceHeaderBytes)) != 0) {
    what = "cannot hold its header";
  } else {
    void* const map = mmap(nullptr, bytes_max_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (map == MAP_FAILED) {
      error = errno;
      what = "cannot be mapped";
    } else if (ftruncate(file_, kTraceHeaderBytes) != 0) {  // last: until here an old trace stays
      error = errno;
      what = "cannot be emptied";
      munmap(map, bytes_max_);
    } else {
      map_ = static_cast<std::byte*>(map);
      mapped_bytes_ = bytes_max_;
    }
  }
  if (what != nullptr) {
    close(file_);
    ThrowIo(path_, what, error);
  }
  std::memset(map_, 0, kTraceHeaderBytes);
  TraceFileHeader& head = header();
  std::memcpy(head.magic, kTraceMagic, sizeof(kTraceMagic));
  head.version = kTraceVersion;
  head.pid = static_cast<std::uint32_t>(getpid());
  head.started_ns = NowNs<std::chrono::steady_clock>();
  head.started_unix_ns = NowNs<std::chrono::system_clock>();
  head.bytes_max = bytes_max_;
  head.file_bytes = kTraceHeaderBytes;
  CopyName(head.process, program_invocation_short_name);
  CopyName(head.machine, BootId());
}

// False: errno says why it could not be locked.
bool TraceWriter::OpenLocked() {
  file_ = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (file_ < 0) ThrowIo(path_, "cannot be opened for writing", errno);
  return flock(file_, LOCK_EX | LOCK_NB) == 0;
}

TraceWriter::~TraceWriter() {
  Finish();
  munmap(map_, mapped_bytes_);
}

void TraceWriter::Finish() noexcept {
  // seq_cst; pairs with Claiming: either it sees that all is over, or this sees it
  if (state_.exchange(State::kFinished, std::memory_order_seq_cst) == State::kFinished) return;
  while (claiming_.load(std::memory_order_seq_cst) > 0) std::this_thread::yield();
  dropped_.store(std::atomic_ref(header().dropped).load(std::memory_order_relaxed),
                 std::memory_order_relaxed);
  std::atomic_ref(header().closed).store(1, std::memory_order_relaxed);
  // Other threads may be in the midst of a record, and end it in memory that nobody reads. Engines
  // record as often as they are asked to: what is left of each time takes no memory. The system
  // call itself, as ThreadSanitizer takes mmap for a write to the pages, which the kernel
  // exchanges.
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t claimed = std::min(claimed_.load(std::memory_order_relaxed), bytes_max_);
  mapped_bytes_ = (claimed + page - 1) / page * page;
  if (mapped_bytes_ < bytes_max_) munmap(map_ + mapped_bytes_, bytes_max_ - mapped_bytes_);
  CHECK(syscall(SYS_mmap, map_, mapped_bytes_, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != -1);
  close(file_);
}

std::uint64_t TraceWriter::dropped() const {
  if (state_.load(std::memory_order_relaxed) == State::kFinished) {
    return dropped_.load(std::memory_order_relaxed);
  }
  return std::atomic_ref(header().dropped).load(std::memory_order_relaxed);
}

// A thread that needs the file open.
class TraceWriter::Claiming {
 public:
  explicit Claiming(TraceWriter& writer) : writer_(writer) {
    writer_.claiming_.fetch_add(1, std::memory_order_seq_cst);  // see Finish
  }
  Claiming(const Claiming&) = delete;
  Claiming& operator=(const Claiming&) = delete;
  ~Claiming() { writer_.claiming_.fetch_sub(1, std::memory_order_seq_cst); }

  bool is_open() const { return writer_.state_.load(std::memory_order_seq_cst) == State::kOpen; }

 private:
  TraceWriter& writer_;
};

// A thread that records in more than this many traces in turn leaves part of a chunk unused at each
// change; nothing else happens. No pointer to the writer: cursors of dead writers match no id.
struct TraceWriter::ThreadCursors {
  static constexpr std::size_t kCount = 4;
  std::array<Cursor, kCount> cursors = {};
  std::size_t last = 0;
};

HEDDLE_TLS TraceWriter::ThreadCursors* TraceWriter::tls_cursors = nullptr;
HEDDLE_TLS bool TraceWriter::tls_cursors_closed = false;

TraceWriter::ThreadCursors& TraceWriter::MakeThreadCursors() noexcept {
  // On the heap: programs that load the library late have little room for thread-local variables.
  struct Closer {
    ~Closer() {
      delete std::exchange(tls_cursors, nullptr);
      tls_cursors_closed = true;
    }
  };
  tls_cursors = new ThreadCursors;
  // What a thread records after that, in destructors of its own, is a few bytes that nobody frees.
  if (!tls_cursors_closed) static thread_local const Closer closer;
  return *tls_cursors;
}

TraceWriter::Cursor& TraceWriter::ThisThread() noexcept {
  ThreadCursors& mine = tls_cursors != nullptr ? *tls_cursors : MakeThreadCursors();
  std::array<Cursor, ThreadCursors::kCount>& cursors = mine.cursors;
  if (cursors[mine.last].writer_id == writer_id_) [[likely]]
    return cursors[mine.last];
  std::size_t oldest = 0;
  for (std::size_t i = 0; i < cursors.size(); ++i) {
    if (cursors[i].writer_id == writer_id_) {
      mine.last = i;
      return cursors[i];
    }
    if (cursors[i].writer_id < cursors[oldest].writer_id) oldest = i;
  }
  cursors[oldest] = Cursor{};
  cursors[oldest].writer_id = writer_id_;
  mine.last = oldest;
  return cursors[oldest];
}

std::byte* TraceWriter::Reserve(Cursor& cursor, std::size_t bytes) noexcept {
  // Relaxed: no data hangs on it. A thread that sees kFull late records a little more.
  if (state_.load(std::memory_order_relaxed) != State::kOpen) [[unlikely]] {
    Drop();
    return nullptr;
  }
  if (cursor.room - cursor.used < bytes && !ClaimChunk(cursor, bytes)) [[unlikely]] {
    Drop();
    return nullptr;
  }
  return reinterpret_cast<std::byte*>(cursor.chunk + 1) + cursor.used;
}

void TraceWriter::Publish(Cursor& cursor, std::size_t bytes) noexcept {
  cursor.used += bytes;
  // release: whoever reads the file while or after we run sees whole records below `used`.
  std::atomic_ref(cursor.chunk->used)
      .store(static_cast<std::uint32_t>(cursor.used), std::memory_order_release);
}

bool TraceWriter::ClaimChunk(Cursor& cursor, std::size_t record_bytes) noexcept {
  if (record_bytes > kTraceRecordBytesMax) return false;
  const Claiming claiming(*this);
  if (!claiming.is_open()) return false;
  const std::size_t wanted = sizeof(TraceChunkHeader) + record_bytes;
  const std::size_t bytes = (wanted + kTraceChunkBytes - 1) / kTraceChunkBytes * kTraceChunkBytes;
  const std::size_t offset = claimed_.fetch_add(bytes, std::memory_order_relaxed);
  const NoFileSizeSignal no_signal;
  // Allocating the blocks now turns a full disk into an error here; a store into the mapping would
  // raise SIGBUS. It also moves the end of the file behind the chunk.
  if (offset + bytes > bytes_max_ ||
      posix_fallocate(file_, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0) {
    State open = State::kOpen;
    state_.compare_exchange_strong(open, State::kFull, std::memory_order_relaxed);
    return false;
  }
  // A later chunk may be there first. relaxed: it is for readers of the file, which has the chunk.
  const std::atomic_ref<std::uint64_t> file_bytes(header().file_bytes);
  std::uint64_t known = file_bytes.load(std::memory_order_relaxed);
  while (known < offset + bytes &&
         !file_bytes.compare_exchange_weak(known, offset + bytes, std::memory_order_relaxed)) {
  }
#ifdef MADV_POPULATE_WRITE
  madvise(map_ + offset, bytes, MADV_POPULATE_WRITE);  // one call for all its page faults; may fail
#endif
  auto* const chunk = reinterpret_cast<TraceChunkHeader*>(map_ + offset);
  chunk->bytes = static_cast<std::uint32_t>(bytes);
  chunk->thread_id = static_cast<std::uint32_t>(gettid());
  pthread_getname_np(pthread_self(), chunk->thread_name, sizeof(chunk->thread_name));
  // release: a reader that finds the magic finds the fields above.
  std::atomic_ref(chunk->magic).store(kTraceChunkMagic, std::memory_order_release);
  cursor.chunk = chunk;
  cursor.used = 0;
  cursor.room = bytes - sizeof(TraceChunkHeader);
  return true;
}

void TraceWriter::Drop() noexcept {
  if (state_.load(std::memory_order_relaxed) == State::kFinished) return;
  std::atomic_ref(header().dropped).fetch_add(1, std::memory_order_relaxed);
}

void TraceWriter::WriteNameIfNew(Cursor& cursor, const char* name) noexcept {
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(name);
  const char*& known = cursor.names[(address ^ address >> 6) % Cursor::kNames];
  if (known == name) [[likely]]
    return;
  known = name;
  {
    MutexLock lock(names_mutex_);
    try {
      if (!names_.insert(name).second) return;
    } catch (const std::bad_alloc&) {
      // Not remembered: the name is written once more.
    }
  }
  WriteText(cursor, TraceKind::kName, address, name);
}

void TraceWriter::WriteText(Cursor& cursor, TraceKind kind, std::uint64_t key,
                            std::string_view text) noexcept {
  static_assert(sizeof(TraceNameRecord) == sizeof(TraceVarRecord));
  const std::size_t padded = (text.size() + 7) / 8 * 8;
  const std::size_t bytes = sizeof(TraceNameRecord) + padded;
  std::byte* const place = Reserve(cursor, bytes);
  if (place == nullptr) return;
  *reinterpret_cast<TraceNameRecord*>(place) = {
      .head = TraceRecordHead(kind, bytes),
      .text_bytes = static_cast<std::uint32_t>(text.size()),
      .name = key};
  std::memset(place + sizeof(TraceNameRecord), 0, padded);
  std::memcpy(place + sizeof(TraceNameRecord), text.data(), text.size());
  Publish(cursor, bytes);
}

void TraceWriter::OnRun(std::uint64_t ticket, std::uint64_t started_ns, std::uint64_t ended_ns,
                        TraceOutcome outcome) noexcept {
  Cursor& cursor = ThisThread();
  std::byte* const place = Reserve(cursor, sizeof(TraceRunRecord));
  if (place == nullptr) return;
  *reinterpret_cast<TraceRunRecord*>(place) = {
      .head = TraceRecordHead(TraceKind::kRun, sizeof(TraceRunRecord)),
      .outcome = static_cast<std::uint32_t>(outcome),
      .ticket = ticket,
      .started_ns = started_ns,
      .ended_ns = ended_ns,
  };
  Publish(cursor, sizeof(TraceRunRecord));
}

void TraceWriter::OnComplete(std::uint64_t ticket, std::uint64_t now_ns,
                             TraceOutcome outcome) noexcept {
  Cursor& cursor = ThisThread();
  std::byte* const place = Reserve(cursor, sizeof(TraceCompleteRecord));
  if (place == nullptr) return;
  *reinterpret_cast<TraceCompleteRecord*>(place) = {
      .head = TraceRecordHead(TraceKind::kComplete, sizeof(TraceCompleteRecord)),
      .outcome = static_cast<std::uint32_t>(outcome),
      .ticket = ticket,
      .completed_ns = now_ns,
  };
  Publish(cursor, sizeof(TraceCompleteRecord));
}

void TraceWriter::OnWait(TraceWait kind, std::uint64_t var_id, std::uint64_t started_ns,
                         std::uint64_t ended_ns) noexcept {
  Cursor& cursor = ThisThread();
  std::byte* const place = Reserve(cursor, sizeof(TraceWaitRecord));
  if (place == nullptr) return;
  *reinterpret_cast<TraceWaitRecord*>(place) = {
      .head = TraceRecordHead(TraceKind::kWait, sizeof(TraceWaitRecord)),
      .kind = static_cast<std::uint32_t>(kind),
      .var = var_id,
      .started_ns = started_ns,
      .ended_ns = ended_ns,
  };
  Publish(cursor, sizeof(TraceWaitRecord));
}

void TraceWriter::OnWork(const internal::DeviceWork& work) noexcept {
  Cursor& cursor = ThisThread();
  if (work.name != nullptr) WriteNameIfNew(cursor, work.name);
  std::byte* const place = Reserve(cursor, sizeof(TraceWorkRecord));
  if (place == nullptr) return;
  *reinterpret_cast<TraceWorkRecord*>(place) = {
      .head = TraceRecordHead(TraceKind::kWork, sizeof(TraceWorkRecord)),
      .kind = static_cast<std::uint32_t>(work.kind),
      .ticket = work.op,
      .started_ns = work.started_ns,
      .ended_ns = work.ended_ns,
      .name = reinterpret_cast<std::uintptr_t>(work.name),
      .bytes = work.bytes,
      .device = work.device,
      .stream = work.stream,
  };
  Publish(cursor, sizeof(TraceWorkRecord));
}

void TraceWriter::OnText(TraceKind kind, std::uint64_t key, std::string_view text) noexcept {
  WriteText(ThisThread(), kind, key, text);
}

void TraceWriter::OnVar(std::uint64_t id, std::string_view name) noexcept {
  WriteText(ThisThread(), TraceKind::kVar, id, name);
}

}  // namespace heddle::engine
