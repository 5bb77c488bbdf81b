// The trace file byte for byte, as docs/trace.md describes it: read here with the format's structs
// only, not with the reader of `heddle trace`.
#include "engine/trace.h"

#include <heddle/engine.h>
#include <heddle/error.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tools/testing/temp_folder.h"

namespace heddle::engine {
namespace {

constexpr std::int64_t kPlenty = 64 << 20;

struct Chunk {
  TraceChunkHeader header;
  std::vector<std::string> records;  // raw bytes
};

struct File {
  TraceFileHeader header;
  std::vector<Chunk> chunks;
};

template <class T>
T As(const std::string& bytes) {
  T value;
  EXPECT_GE(bytes.size(), sizeof(T));
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

std::uint64_t Word(const std::string& record, std::size_t offset) {
  return As<std::uint64_t>(record.substr(offset));
}

TraceKind KindOf(const std::string& record) {
  return static_cast<TraceKind>(As<std::uint32_t>(record) & 0xff);
}

File Parse(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(stream)), {});
  File file{.header = As<TraceFileHeader>(bytes), .chunks = {}};
  for (std::size_t at = kTraceHeaderBytes; at < bytes.size();) {
    Chunk chunk{.header = As<TraceChunkHeader>(bytes.substr(at, 32)), .records = {}};
    EXPECT_EQ(chunk.header.magic, kTraceChunkMagic) << "at byte " << at;
    if (chunk.header.magic != kTraceChunkMagic) break;
    EXPECT_LE(at + chunk.header.bytes, bytes.size());
    std::size_t record = at + sizeof(TraceChunkHeader);
    const std::size_t end = record + chunk.header.used;
    while (record < end) {
      const std::size_t size = (As<std::uint32_t>(bytes.substr(record, 4)) >> 8) * std::size_t{8};
      chunk.records.push_back(bytes.substr(record, size));
      EXPECT_GT(size, 0u);
      if (size == 0) break;
      record += size;
    }
    EXPECT_EQ(record, end);
    at += chunk.header.bytes;
    file.chunks.push_back(std::move(chunk));
  }
  return file;
}

std::vector<std::string> RecordsOf(const File& file, TraceKind kind) {
  std::vector<std::string> found;
  for (const Chunk& chunk : file.chunks) {
    for (const std::string& record : chunk.records) {
      if (KindOf(record) == kind) found.push_back(record);
    }
  }
  return found;
}

class TraceWriterTest : public ::testing::Test {
 protected:
  std::string path(const std::string& name = "t.trace") const { return folder_ / name; }

  static void PushEmpty(TraceWriter& writer, std::uint64_t ticket, const char* name = "op") {
    writer.OnPush(ticket, 1, name, Cpu(), Lane::kNormal, 0, 0,
                  [](std::size_t) { return TraceWriter::TraceVar{}; });
  }

  // Runs `body` in a child process, which is expected to end itself; returns its wait status.
  static int InChild(const std::function<void()>& body) {
    const pid_t child = fork();
    if (child == 0) {
      body();
      _exit(0);
    }
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    return status;
  }

  const tools::TempFolder folder_;
};

TEST_F(TraceWriterTest, WorkOfDevicesHoldsWhatWasGiven) {
  {
    TraceWriter writer(path(), kPlenty);
    writer.OnWork({.op = 42,
                   .started_ns = 1000,
                   .ended_ns = 2000,
                   .kind = internal::DeviceWork::Kind::kCopy,
                   .device = 3,
                   .stream = 17,
                   .bytes = 1ULL << 40});
    writer.OnWork({.op = 43, .name = "kernel"});
    writer.OnWork({.op = 44, .name = "kernel"});
  }
  const File file = Parse(path());
  const std::vector<std::string> works = RecordsOf(file, TraceKind::kWork);
  ASSERT_EQ(works.size(), 3u);
  ASSERT_EQ(works[0].size(), 56u);
  EXPECT_EQ(As<std::uint32_t>(works[0].substr(4)), 1u);  // a copy
  EXPECT_EQ(Word(works[0], 8), 42u);
  EXPECT_EQ(Word(works[0], 16), 1000u);
  EXPECT_EQ(Word(works[0], 24), 2000u);
  EXPECT_EQ(Word(works[0], 32), 0u);
  EXPECT_EQ(Word(works[0], 40), 1ULL << 40);
  EXPECT_EQ(As<std::int32_t>(works[0].substr(48)), 3);
  EXPECT_EQ(As<std::uint32_t>(works[0].substr(52)), 17u);
  const std::vector<std::string> names = RecordsOf(file, TraceKind::kName);
  ASSERT_EQ(names.size(), 1u);
  EXPECT_EQ(Word(works[1], 32), Word(names[0], 8));
  EXPECT_EQ(Word(works[2], 32), Word(names[0], 8));
}

TEST_F(TraceWriterTest, RecordsHoldWhatWasGiven) {
  {
    TraceWriter writer(path(), kPlenty);
    const TraceWriter::TraceVar vars[] = {
        {7, TraceAccess::kRead}, {1ULL << 40, TraceAccess::kWrite}, {9, TraceAccess::kReadWrite}};
    writer.OnPush(42, 1000, "forward", Device{DeviceType::kGpu, 3}, Lane::kComm, -5, 3,
                  [&](std::size_t i) { return vars[i]; });
    writer.OnRun(42, 2000, 3000, TraceOutcome::kFailed);
    writer.OnComplete(42, 4000, TraceOutcome::kSkipped);
    writer.OnWait(TraceWait::kAll, 0, 5000, 6000);
    writer.OnVar(7, "weights of layer 1");
  }
  const File file = Parse(path());
  EXPECT_EQ(std::memcmp(file.header.magic, "HEDDLTRC", 8), 0);
  EXPECT_EQ(file.header.version, kTraceVersion);
  EXPECT_EQ(file.header.pid, static_cast<std::uint32_t>(getpid()));
  EXPECT_EQ(file.header.closed, 1u);
  EXPECT_EQ(file.header.dropped, 0u);
  ASSERT_EQ(file.chunks.size(), 1u);
  EXPECT_EQ(file.chunks[0].header.thread_id, static_cast<std::uint32_t>(gettid()));
  const std::vector<std::string>& records = file.chunks[0].records;
  ASSERT_EQ(records.size(), 6u);

  EXPECT_EQ(KindOf(records[0]), TraceKind::kName);
  EXPECT_EQ(As<std::uint32_t>(records[0].substr(4)), 7u);
  EXPECT_EQ(records[0].substr(16), std::string("forward\0", 8));

  EXPECT_EQ(KindOf(records[1]), TraceKind::kPush);
  ASSERT_EQ(records[1].size(), 64u);
  EXPECT_EQ(As<std::int32_t>(records[1].substr(4)), -5);
  EXPECT_EQ(Word(records[1], 8), 42u);
  EXPECT_EQ(Word(records[1], 16), 1000u);
  EXPECT_EQ(Word(records[1], 24), Word(records[0], 8));  // the name
  EXPECT_EQ(As<std::int16_t>(records[1].substr(32)), 3);
  EXPECT_EQ(records[1][34], 2);  // gpu
  EXPECT_EQ(records[1][35], 2);  // comm
  EXPECT_EQ(As<std::uint32_t>(records[1].substr(36)), 3u);
  EXPECT_EQ(Word(records[1], 40), 7u * 4 + 1);
  EXPECT_EQ(Word(records[1], 48), (1ULL << 40) * 4 + 2);
  EXPECT_EQ(Word(records[1], 56), 9u * 4 + 3);

  EXPECT_EQ(KindOf(records[2]), TraceKind::kRun);
  EXPECT_EQ(As<std::uint32_t>(records[2].substr(4)), 1u);
  EXPECT_EQ(Word(records[2], 8), 42u);
  EXPECT_EQ(Word(records[2], 16), 2000u);
  EXPECT_EQ(Word(records[2], 24), 3000u);

  EXPECT_EQ(KindOf(records[3]), TraceKind::kComplete);
  EXPECT_EQ(As<std::uint32_t>(records[3].substr(4)), 2u);
  EXPECT_EQ(Word(records[3], 16), 4000u);

  EXPECT_EQ(KindOf(records[4]), TraceKind::kWait);
  EXPECT_EQ(As<std::uint32_t>(records[4].substr(4)), 2u);
  EXPECT_EQ(Word(records[4], 8), 0u);
  EXPECT_EQ(Word(records[4], 24), 6000u);

  EXPECT_EQ(KindOf(records[5]), TraceKind::kVar);
  EXPECT_EQ(Word(records[5], 8), 7u);
  EXPECT_EQ(records[5].substr(16, 18), "weights of layer 1");
}

TEST_F(TraceWriterTest, EveryRecordOfManyThreadsIsThereOnceAndInItsThread) {
  constexpr int kThreads = 8, kEach = 20'000;
  {
    TraceWriter writer(path(), kPlenty);
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&writer, t] {
        for (int i = 0; i < kEach; ++i) {
          PushEmpty(writer, static_cast<std::uint64_t>(t) * kEach + static_cast<std::uint64_t>(i));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(writer.dropped(), 0u);
  }
  const File file = Parse(path());
  EXPECT_EQ(RecordsOf(file, TraceKind::kName).size(), 1u);  // one text for all threads
  std::set<std::uint64_t> tickets;
  for (const Chunk& chunk : file.chunks) {
    std::set<std::uint64_t> pushers;  // a chunk is one thread's
    for (const std::string& record : chunk.records) {
      if (KindOf(record) != TraceKind::kPush) continue;
      EXPECT_TRUE(tickets.insert(Word(record, 8)).second) << Word(record, 8);
      pushers.insert(Word(record, 8) / kEach);
    }
    EXPECT_LE(pushers.size(), 1u);
  }
  EXPECT_EQ(tickets.size(), std::size_t{kThreads} * kEach);
}

TEST_F(TraceWriterTest, BeyondTheCapRecordsAreDroppedAndCounted) {
  constexpr std::uint64_t kRecords = 100'000;
  constexpr std::int64_t kCap = 1 << 20;
  std::uint64_t dropped = 0;
  {
    TraceWriter writer(path(), kCap);
    for (std::uint64_t i = 0; i < kRecords; ++i) PushEmpty(writer, i);
    dropped = writer.dropped();
  }
  EXPECT_LE(std::filesystem::file_size(path()), static_cast<std::uintmax_t>(kCap));
  const File file = Parse(path());
  const auto pushes = RecordsOf(file, TraceKind::kPush);
  EXPECT_GT(dropped, 0u);
  EXPECT_EQ(file.header.dropped, dropped);
  EXPECT_EQ(pushes.size() + dropped, kRecords);
  // What is there is the beginning, without holes.
  EXPECT_EQ(Word(pushes.back(), 8), pushes.size() - 1);
}

TEST_F(TraceWriterTest, NoRoomForTheHeaderIsAnErrorAndTheProcessGoesOn) {
  const int status = InChild([this] {
    const rlimit limit{1000, 1000};
    setrlimit(RLIMIT_FSIZE, &limit);
    try {
      const TraceWriter writer(path(), kPlenty);
    } catch (const IoError&) {
      _exit(7);
    }
  });
  ASSERT_TRUE(WIFEXITED(status)) << status;
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

TEST_F(TraceWriterTest, FullDiskDropsRecordsAndTheProcessGoesOn) {
  const int status = InChild([this] {
    const rlimit limit{200'000, 200'000};
    setrlimit(RLIMIT_FSIZE, &limit);
    TraceWriter writer(path(), kPlenty);
    for (std::uint64_t i = 0; i < 100'000; ++i) PushEmpty(writer, i);
    _exit(writer.dropped() > 0 ? 7 : 8);
  });
  ASSERT_TRUE(WIFEXITED(status)) << status;
  EXPECT_EQ(WEXITSTATUS(status), 7);
  const File file = Parse(path());
  EXPECT_LE(file.header.file_bytes, std::filesystem::file_size(path()));
  EXPECT_GT(file.header.dropped, 0u);
  EXPECT_GT(RecordsOf(file, TraceKind::kPush).size(), 1000u);
}

TEST_F(TraceWriterTest, RecordsSurviveSigkill) {
  const int status = InChild([this] {
    TraceWriter writer(path(), kPlenty);
    for (std::uint64_t i = 0; i < 5000; ++i) PushEmpty(writer, i);
    raise(SIGKILL);
  });
  ASSERT_TRUE(WIFSIGNALED(status));
  const File file = Parse(path());
  EXPECT_EQ(file.header.closed, 0u);
  EXPECT_EQ(RecordsOf(file, TraceKind::kPush).size(), 5000u);
}

TEST_F(TraceWriterTest, OpWithMoreVariablesThanAChunkHolds) {
  constexpr std::size_t kVars = 20'000;
  {
    TraceWriter writer(path(), kPlenty);
    writer.OnPush(1, 1, "wide", Cpu(), Lane::kNormal, 0, kVars, [](std::size_t i) {
      return TraceWriter::TraceVar{i + 1, TraceAccess::kRead};
    });
    PushEmpty(writer, 2);
  }
  const auto pushes = RecordsOf(Parse(path()), TraceKind::kPush);
  ASSERT_EQ(pushes.size(), 2u);
  EXPECT_EQ(Word(pushes[0], 40 + (kVars - 1) * 8), kVars * 4 + 1);
}

TEST_F(TraceWriterTest, OneThreadMayRecordInManyTracesInTurn) {
  constexpr std::size_t kWriters = 6;
  {
    std::vector<std::unique_ptr<TraceWriter>> writers;
    for (std::size_t w = 0; w < kWriters; ++w) {
      writers.push_back(std::make_unique<TraceWriter>(path(std::to_string(w)), kPlenty));
    }
    for (std::uint64_t i = 0; i < 50; ++i) {
      for (std::size_t w = 0; w < kWriters; ++w) PushEmpty(*writers[w], i * 10 + w);
    }
  }
  for (std::size_t w = 0; w < kWriters; ++w) {
    const auto pushes = RecordsOf(Parse(path(std::to_string(w))), TraceKind::kPush);
    ASSERT_EQ(pushes.size(), 50u);
    for (const std::string& push : pushes) EXPECT_EQ(Word(push, 8) % 10, w);
  }
}

TEST_F(TraceWriterTest, FinishedWriterIgnoresRecords) {
  TraceWriter writer(path(), kPlenty);
  PushEmpty(writer, 1);
  writer.Finish();
  PushEmpty(writer, 2);
  EXPECT_EQ(writer.dropped(), 0u);
  EXPECT_EQ(RecordsOf(Parse(path()), TraceKind::kPush).size(), 1u);
}

// Threads are in the midst of records when it ends, or of counting what no longer fits.
TEST_F(TraceWriterTest, FinishesUnderThreadsThatRecord) {
  constexpr std::int64_t kFew = 256 << 10;
  for (int round = 0; round < 20; ++round) {
    const std::uint64_t before = round % 2 == 0 ? 10 : kFew / sizeof(TracePushRecord);
    TraceWriter writer(path(std::to_string(round)), kFew);
    std::atomic<bool> ends = false;
    std::atomic<int> begun = 0;
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&] {
        for (std::uint64_t ticket = 1; !ends.load(); ++ticket) {
          PushEmpty(writer, ticket);
          if (ticket == before) ++begun;
        }
      });
    }
    while (begun.load() < 3) std::this_thread::yield();
    writer.Finish();
    const std::size_t records = RecordsOf(Parse(writer.path()), TraceKind::kPush).size();
    EXPECT_GE(records, 30u);
    ends = true;
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(RecordsOf(Parse(writer.path()), TraceKind::kPush).size(), records);
  }
}

// It ends the record in memory that nobody reads.
TEST_F(TraceWriterTest, FinishesWhileAThreadIsInTheMidstOfARecord) {
  TraceWriter writer(path(), kPlenty);
  // Relaxed: these order nothing that the writer must order by itself.
  std::atomic<bool> in_midst = false;
  std::atomic<bool> finished = false;
  const auto wait_for = [](const std::atomic<bool>& flag) {
    while (!flag.load(std::memory_order_relaxed)) std::this_thread::yield();
  };
  std::thread thread([&] {
    PushEmpty(writer, 1);
    writer.OnPush(2, 1, "op", Cpu(), Lane::kNormal, 0, 1, [&](std::size_t) {
      in_midst.store(true, std::memory_order_relaxed);
      wait_for(finished);
      return TraceWriter::TraceVar{};
    });
  });
  wait_for(in_midst);
  writer.Finish();
  finished.store(true, std::memory_order_relaxed);
  thread.join();
  EXPECT_EQ(RecordsOf(Parse(path()), TraceKind::kPush).size(), 1u);
}

TEST_F(TraceWriterTest, FinishedWritersHoldNoFiles) {
  const auto open_files = [] {
    const std::filesystem::directory_iterator files("/proc/self/fd");
    return std::distance(begin(files), end(files));
  };
  Engine engine;
  const auto before = open_files();
  for (int i = 0; i < 20; ++i) {
    engine.StartTrace(path("again"));
    engine.Push({.name = "traced"}, [] {});
    engine.WaitForAll();
    engine.StopTrace();
    EXPECT_EQ(RecordsOf(Parse(path("again")), TraceKind::kPush).size(), 1u);
  }
  EXPECT_LE(open_files(), before + 2);  // the engine's own
}

TEST_F(TraceWriterTest, PercentPInThePathIsTheProcessId) {
  TraceWriter writer(path("t.%p.trace"), kPlenty);
  EXPECT_EQ(writer.path(), path("t." + std::to_string(getpid()) + ".trace"));
  EXPECT_TRUE(std::filesystem::exists(writer.path()));
}

TEST_F(TraceWriterTest, RefusesAFileThatAnotherWriterUses) {
  TraceWriter first(path(), kPlenty);
  PushEmpty(first, 1);
  try {
    TraceWriter second(path(), kPlenty);
    FAIL() << "expected IoError";
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find(path()), std::string::npos) << error.what();
  }
  EXPECT_EQ(RecordsOf(Parse(path()), TraceKind::kPush).size(), 1u);  // untouched
}

TEST_F(TraceWriterTest, ReplacesAFileThatAnotherWriterHasFinished) {
  TraceWriter first(path("%p.trace"), kPlenty);
  PushEmpty(first, 1);
  first.Finish();
  TraceWriter second(path("%p.trace"), kPlenty);
  PushEmpty(second, 2);
  PushEmpty(first, 3);  // changes nothing, and does no harm
  EXPECT_THROW(TraceWriter(path("%p.trace"), kPlenty), IoError);
  const std::vector<std::string> pushes = RecordsOf(Parse(second.path()), TraceKind::kPush);
  ASSERT_EQ(pushes.size(), 1u);
  EXPECT_EQ(As<TracePushRecord>(pushes[0]).ticket, 2u);
}

TEST_F(TraceWriterTest, ReplacesAnOlderFile) {
  { std::ofstream(path()) << std::string(100'000, 'x'); }
  { TraceWriter writer(path(), kPlenty); }
  EXPECT_TRUE(Parse(path()).chunks.empty());
}

// It was empty then.
TEST_F(TraceWriterTest, AnOlderFileStaysIfTheNewOneCannotBeMapped) {
  const std::string old(100'000, 'x');
  { std::ofstream(path()) << old; }
  EXPECT_THROW(TraceWriter(path(), std::int64_t{1} << 60), IoError);
  std::ifstream file(path());
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), old);
}

TEST_F(TraceWriterTest, ANameWithAZeroByteIsRefused) {
  EXPECT_THROW(TraceWriter(path() + std::string("\0more", 5), kPlenty), IoError);
  EXPECT_FALSE(std::filesystem::exists(path()));
}

TEST_F(TraceWriterTest, UnwritablePathIsAnIoErrorThatNamesIt) {
  for (const std::string& bad : {path("missing/t.trace"), folder_.path()}) {
    try {
      TraceWriter writer(bad, kPlenty);
      FAIL() << "expected IoError for " << bad;
    } catch (const IoError& error) {
      EXPECT_NE(std::string(error.what()).find(bad), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace heddle::engine
