// The trace file as bytes, shared by TraceWriter and the readers. docs/trace.md describes it in
// prose.
//
// A file is one TraceFileHeader, then chunks. A chunk belongs to one thread and is a
// TraceChunkHeader followed by whole records. Everything is little-endian and lies on 8-byte
// boundaries.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace heddle::engine {

static_assert(std::endian::native == std::endian::little,
              "trace files are little-endian and written as they lie in memory");

inline constexpr char kTraceMagic[8] = {'H', 'E', 'D', 'D', 'L', 'T', 'R', 'C'};
inline constexpr std::uint32_t kTraceVersion = 3;
inline constexpr std::uint32_t kTraceVersionLeast = 2;  // readers take it, too: it has no kWork
inline constexpr std::uint32_t kTraceChunkMagic = 0x4b4e4843;  // "CHNK"
inline constexpr std::size_t kTraceHeaderBytes = 4096;         // the first chunk starts here
inline constexpr std::size_t kTraceChunkBytes =
    std::size_t{64} * 1024;  // chunks are a multiple of this

struct TraceFileHeader {
  char magic[8];
  std::uint32_t version;
  std::uint32_t pid;
  std::uint64_t started_ns;       // steady clock at the start
  std::uint64_t started_unix_ns;  // wall clock at the same moment
  std::uint64_t bytes_max;        // the cap
  std::uint64_t dropped;          // records that did not fit
  std::uint64_t closed;           // 1: the writer ended in order; 0: it still runs or was killed
  char process[64];               // name of the program, ends with a zero
  char machine[40];               // boot id of the machine, ends with a zero: equal ones, one clock
  std::uint64_t file_bytes;       // of the file, chunks that are claimed included; 0: not told
};
static_assert(sizeof(TraceFileHeader) == 168);

struct TraceChunkHeader {
  std::uint32_t magic;
  std::uint32_t bytes;      // of the whole chunk, header included
  std::uint32_t used;       // bytes of whole records after the header
  std::uint32_t thread_id;  // the kernel's
  char thread_name[16];     // ends with a zero
};
static_assert(sizeof(TraceChunkHeader) == 32);

enum class TraceKind : std::uint32_t {
  kName = 1,      // TraceNameRecord: text of an op name
  kVar = 2,       // TraceVarRecord: name of a variable
  kPush = 3,      // TracePushRecord
  kRun = 4,       // TraceRunRecord
  kComplete = 5,  // TraceCompleteRecord
  kWait = 6,      // TraceWaitRecord
  // Of processes of a job: kvstore/dist/trace_records.h.
  kPlace = 7,
  kKey = 8,  // as TraceNameRecord
  kMessage = 9,
  kPart = 10,
  // What devices did.
  kWork = 11,
};

// The first word of every record: kind in the low 8 bits, size of the record in 8-byte units above.
constexpr std::uint32_t TraceRecordHead(TraceKind kind, std::size_t bytes) {
  return static_cast<std::uint32_t>(kind) | static_cast<std::uint32_t>(bytes / 8) << 8;
}
inline constexpr std::size_t kTraceRecordBytesMax = (std::size_t{1} << 24) * 8 - 8;

struct TraceNameRecord {  // then the text, zero-padded to 8 bytes
  std::uint32_t head;
  std::uint32_t text_bytes;
  std::uint64_t name;  // what TracePushRecord::name says
};

struct TraceVarRecord {  // then the text, zero-padded to 8 bytes
  std::uint32_t head;
  std::uint32_t text_bytes;
  std::uint64_t var;
};

struct TracePushRecord {  // then `accesses` words: var id * 4 + TraceAccess
  std::uint32_t head;
  std::int32_t priority;
  std::uint64_t ticket;
  std::uint64_t pushed_ns;
  std::uint64_t name;
  std::int16_t device_id;
  std::uint8_t device_type;
  std::uint8_t lane;
  std::uint32_t accesses;
};

struct TraceRunRecord {  // the body of an op ran, on this chunk's thread; skipped ops start when
                         // they end
  std::uint32_t head;
  std::uint32_t outcome;
  std::uint64_t ticket;
  std::uint64_t started_ns;
  std::uint64_t ended_ns;
};

struct TraceCompleteRecord {  // an async op finished
  std::uint32_t head;
  std::uint32_t outcome;
  std::uint64_t ticket;
  std::uint64_t completed_ns;
};

struct TraceWaitRecord {
  std::uint32_t head;
  std::uint32_t kind;
  std::uint64_t var;  // 0: the wait is not for one variable
  std::uint64_t started_ns;
  std::uint64_t ended_ns;
};

struct TraceWorkRecord {  // a piece of what an op did on a device
  std::uint32_t head;
  std::uint32_t kind;  // DeviceWork::Kind
  std::uint64_t ticket;
  std::uint64_t started_ns;
  std::uint64_t ended_ns;
  std::uint64_t name;  // of a kernel, or 0
  std::uint64_t bytes;
  std::int32_t device;
  std::uint32_t stream;
};

static_assert(sizeof(TraceNameRecord) == 16 && sizeof(TraceVarRecord) == 16);
static_assert(sizeof(TracePushRecord) == 40 && sizeof(TraceRunRecord) == 32);
static_assert(sizeof(TraceCompleteRecord) == 24 && sizeof(TraceWaitRecord) == 32);
static_assert(sizeof(TraceWorkRecord) == 56);

}  // namespace heddle::engine
