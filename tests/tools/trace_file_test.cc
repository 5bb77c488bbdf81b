#include "tools/heddle/trace_file.h"

#include <heddle/error.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "engine/trace.h"
#include "tests/sanitized.h"
#include "tools/heddle/trace_json.h"
#include "tools/testing/temp_folder.h"

namespace heddle::tools {
namespace {

using engine::TraceAccess;
using engine::TraceOutcome;
using engine::TraceWait;
using engine::TraceWriter;

constexpr std::int64_t kPlenty = 64 << 20;

void Push(TraceWriter& writer, std::uint64_t ticket, std::vector<TraceWriter::TraceVar> vars,
          const char* name = "op") {
  writer.OnPush(ticket, 10 * ticket, name, Cpu(), Lane::kNormal, 0, vars.size(),
                [&](std::size_t i) { return vars[i]; });
}

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void WriteAll(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

class TraceFileTest : public ::testing::Test {
 protected:
  const TempFolder folder_;
  const std::string path_ = folder_ / "t.trace";
};

TEST_F(TraceFileTest, JoinsWhatTheFileSaysOfAnOp) {
  {
    TraceWriter writer(path_, kPlenty);
    Push(writer, 2, {}, "second");
    Push(writer, 1, {{5, TraceAccess::kRead}, {6, TraceAccess::kReadWrite}}, "first");
    writer.OnRun(2, 100, 200, TraceOutcome::kFailed);
    writer.OnComplete(2, 300, TraceOutcome::kOk);
    writer.OnWait(TraceWait::kVar, 6, 50, 350);
    writer.OnVar(6, "weight");
  }
  const TraceFile trace = ReadTraceFile(path_);
  EXPECT_TRUE(trace.closed);
  EXPECT_EQ(trace.damaged_bytes, 0u);
  EXPECT_GE(trace.last_ns, 350u);
  ASSERT_EQ(trace.ops.size(), 2u);
  EXPECT_EQ(trace.NameOf(trace.ops[0]), "first");
  EXPECT_FALSE(trace.ops[0].run);
  ASSERT_EQ(trace.AccessesOf(trace.ops[0]).size(), 2u);
  EXPECT_EQ(trace.VarName(trace.AccessesOf(trace.ops[0])[0].var), "var5");
  EXPECT_EQ(trace.VarName(trace.AccessesOf(trace.ops[0])[1].var), "weight");
  EXPECT_EQ(trace.AccessesOf(trace.ops[0])[1].access, TraceAccess::kReadWrite);
  EXPECT_EQ(trace.NameOf(trace.ops[1]), "second");
  ASSERT_TRUE(trace.ops[1].run);
  EXPECT_EQ(trace.ops[1].run->started_ns, 100u);
  EXPECT_EQ(trace.ops[1].run->outcome, TraceOutcome::kFailed);
  ASSERT_TRUE(trace.ops[1].completion);
  EXPECT_EQ(trace.ops[1].completion->completed_ns, 300u);
  ASSERT_EQ(trace.waits.size(), 1u);
  EXPECT_EQ(trace.waits[0].ended_ns, 350u);
}

TEST_F(TraceFileTest, RunWithoutItsPushIsAnOpWithoutAName) {
  {
    TraceWriter writer(path_, kPlenty);
    Push(writer, 1, {});
    writer.OnRun(1, 5, 6, TraceOutcome::kOk);
    writer.OnRun(7, 8, 9, TraceOutcome::kOk);
    writer.OnComplete(7, 10, TraceOutcome::kOk);
  }
  const TraceFile trace = ReadTraceFile(path_);
  ASSERT_EQ(trace.ops.size(), 2u);
  EXPECT_EQ(trace.NameOf(trace.ops[1]), "op 7");
  EXPECT_FALSE(trace.ops[1].pushed);
  EXPECT_TRUE(trace.ops[1].run && trace.ops[1].completion);
}

TEST_F(TraceFileTest, ArrowsGoFromWritesToReadsAndFromReadsToTheNextWrite) {
  {
    TraceWriter writer(path_, kPlenty);
    Push(writer, 0, {{1, TraceAccess::kWrite}});
    Push(writer, 1, {{1, TraceAccess::kRead}});
    Push(writer, 2, {{1, TraceAccess::kRead}, {2, TraceAccess::kRead}});
    Push(writer, 3, {{1, TraceAccess::kReadWrite}, {2, TraceAccess::kWrite}});
    Push(writer, 4, {{1, TraceAccess::kWrite}, {2, TraceAccess::kRead}});
  }
  const std::vector<TraceArrow> arrows = Dependencies(ReadTraceFile(path_));
  const std::vector<std::pair<std::size_t, std::size_t>> expected = {
      {0, 1}, {0, 2}, {1, 3}, {2, 3}, {3, 4}};
  ASSERT_EQ(arrows.size(), expected.size());
  for (std::size_t i = 0; i < arrows.size(); ++i) {
    EXPECT_EQ(arrows[i].from, expected[i].first);
    EXPECT_EQ(arrows[i].to, expected[i].second);
  }
}

// Following arrows must lead from one op to another exactly where two ops conflict on a variable,
// or a chain of such conflicts connects them.
TEST_F(TraceFileTest, ArrowsOfRandomProgramsReachWhatConflictsReach) {
  constexpr std::size_t kOps = 120, kVars = 8;
  for (unsigned seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    std::vector<std::vector<TraceWriter::TraceVar>> program;
    {
      TraceWriter writer(path_, kPlenty);
      for (std::size_t op = 0; op < kOps; ++op) {
        std::vector<TraceWriter::TraceVar> vars;
        for (std::uint64_t var = 1; var <= kVars; ++var) {
          if (random() % 4 == 0) vars.push_back({var, static_cast<TraceAccess>(random() % 3 + 1)});
        }
        Push(writer, op, vars);
        program.push_back(std::move(vars));
      }
    }
    const auto conflict = [&](std::size_t a, std::size_t b) {
      for (const auto& x : program[a]) {
        for (const auto& y : program[b]) {
          if (x.id == y.id && (x.access != TraceAccess::kRead || y.access != TraceAccess::kRead)) {
            return true;
          }
        }
      }
      return false;
    };
    std::vector<std::vector<bool>> reached(kOps, std::vector<bool>(kOps)), expected = reached;
    const auto add = [](std::vector<std::vector<bool>>& before, std::size_t from, std::size_t to) {
      before[to][from] = true;
      for (std::size_t i = 0; i < from; ++i) {
        if (before[from][i]) before[to][i] = true;
      }
    };
    for (const TraceArrow& arrow : Dependencies(ReadTraceFile(path_))) {
      ASSERT_LT(arrow.from, arrow.to);
      ASSERT_TRUE(conflict(arrow.from, arrow.to)) << arrow.from << " -> " << arrow.to;
      add(reached, arrow.from, arrow.to);
    }
    for (std::size_t to = 0; to < kOps; ++to) {
      for (std::size_t from = 0; from < to; ++from) {
        if (conflict(from, to)) add(expected, from, to);
      }
    }
    ASSERT_EQ(reached, expected);
  }
}

TEST_F(TraceFileTest, FileThatIsNoTraceIsAnErrorThatNamesIt) {
  const auto message = [this](const std::string& bytes) -> std::string {
    WriteAll(path_, bytes);
    try {
      ReadTraceFile(path_);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(message("").find(path_), std::string::npos);
  EXPECT_NE(message("HEDDLTRC").find("found 8 bytes"), std::string::npos);
  EXPECT_NE(message(std::string(10'000, 'x')).find("another format"), std::string::npos);
  { TraceWriter writer(path_, kPlenty); }
  std::string bytes = ReadAll(path_);
  bytes[8] = 9;
  EXPECT_NE(message(bytes).find("version 2 to 3, found 9"), std::string::npos);
}

TEST_F(TraceFileTest, FilesOfTheVersionBeforeAreRead) {
  {
    TraceWriter writer(path_, kPlenty);
    Push(writer, 1, {}, "old");
  }
  std::string bytes = ReadAll(path_);
  bytes[8] = 2;
  WriteAll(path_, bytes);
  const TraceFile trace = ReadTraceFile(path_);
  ASSERT_EQ(trace.ops.size(), 1u);
  EXPECT_EQ(trace.NameOf(trace.ops[0]), "old");
}

TEST_F(TraceFileTest, MissingFileAndFolderAreIoErrors) {
  EXPECT_THROW(ReadTraceFile(folder_ / "missing"), IoError);
  EXPECT_THROW(ReadTraceFile(folder_ / ""), IoError);
}

// A damaged file may lose ops but must still be read: whatever remains becomes JSON.
class DamagedTraceTest : public TraceFileTest {
 protected:
  DamagedTraceTest() {
    {
      TraceWriter writer(path_, kPlenty);
      for (std::uint64_t i = 0; i < 3000; ++i) {
        Push(writer, i, {{i % 7 + 1, TraceAccess::kReadWrite}, {8, TraceAccess::kRead}});
        writer.OnRun(i, 10 * i, 10 * i + 5, TraceOutcome::kOk);
      }
    }
    bytes_ = ReadAll(path_);
  }

  std::size_t OpsIn(const std::string& bytes) {
    WriteAll(path_, bytes);
    const TraceFile trace = ReadTraceFile(path_);
    std::ostringstream json;
    WriteTraceJson(JoinTraces({trace}), {}, json);
    return trace.ops.size();
  }

  std::string bytes_;
};

TEST_F(DamagedTraceTest, FileCutAnywhereKeepsWhatIsWhole) {
  ASSERT_GT(bytes_.size(), 2 * engine::kTraceChunkBytes);
  std::size_t before = 0;
  for (std::size_t size = engine::kTraceHeaderBytes; size < bytes_.size();
       size += kSanitized ? 49999 : 4999) {
    const std::size_t ops = OpsIn(bytes_.substr(0, size));
    EXPECT_GE(ops, before) << "at " << size << " bytes";
    before = ops;
  }
  EXPECT_GT(before, 2000u);
  EXPECT_EQ(OpsIn(bytes_), 3000u);
}

// Behind a chunk's end nothing looks amiss.
TEST_F(DamagedTraceTest, FileCutBetweenChunksIsNotComplete) {
  const auto complete = [this](const std::string& bytes) {
    WriteAll(path_, bytes);
    std::ostringstream json;
    WriteTraceJson(JoinTraces({ReadTraceFile(path_)}), {}, json);
    return json.str().find("\"complete\":true") != std::string::npos;
  };
  EXPECT_TRUE(complete(bytes_));
  EXPECT_EQ(ReadTraceFile(path_).missing_bytes, 0u);
  for (std::size_t cut = engine::kTraceChunkBytes; cut < bytes_.size();
       cut += engine::kTraceChunkBytes) {
    EXPECT_FALSE(complete(bytes_.substr(0, bytes_.size() - cut))) << cut;
    EXPECT_EQ(ReadTraceFile(path_).missing_bytes, cut);
  }
  EXPECT_FALSE(complete(bytes_.substr(0, engine::kTraceHeaderBytes)));
}

TEST_F(DamagedTraceTest, ChunkWithoutItsHeaderIsSkipped) {
  std::string bytes = bytes_;
  bytes[engine::kTraceHeaderBytes] ^= 1;  // the magic of the first chunk
  EXPECT_GT(OpsIn(bytes), 1000u);
  EXPECT_LT(OpsIn(bytes), 3000u);
  EXPECT_EQ(ReadTraceFile(path_).damaged_bytes, engine::kTraceChunkBytes);
}

TEST_F(DamagedTraceTest, NoMoreIsDamagedThanIsThere) {
  std::string bytes = bytes_;
  constexpr std::size_t kUsed = offsetof(engine::TraceChunkHeader, used);
  std::fill_n(bytes.begin() + engine::kTraceHeaderBytes + kUsed, 4, static_cast<char>(0xff));
  OpsIn(bytes);
  const TraceFile trace = ReadTraceFile(path_);
  EXPECT_GT(trace.damaged_bytes, 0U);
  EXPECT_LT(trace.damaged_bytes, bytes.size());
  std::ostringstream json;
  WriteTraceJson(JoinTraces({trace}), {}, json);
  EXPECT_NE(json.str().find("\"complete\":false"), std::string::npos);
}

TEST_F(DamagedTraceTest, WorkOfADeviceThatCannotBeIsDamaged) {
  for (const int device : {-1, 70000}) {
    {
      TraceWriter writer(path_, kPlenty);
      Push(writer, 1, {});
      writer.OnWork({.op = 1, .device = device, .name = "kernel"});
    }
    EXPECT_EQ(OpsIn(ReadAll(path_)), 1U);
    EXPECT_GT(ReadTraceFile(path_).damaged_bytes, 0U);
  }
}

TEST_F(DamagedTraceTest, RandomBytesInTheFileNeverCrashTheReader) {
  for (unsigned seed = 1; seed <= Scaled(30U); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    std::string bytes = bytes_;
    for (int i = 0; i < 50; ++i) {
      const std::size_t at =
          engine::kTraceHeaderBytes + random() % (bytes.size() - engine::kTraceHeaderBytes);
      bytes[at] = static_cast<char>(random());
    }
    OpsIn(bytes);
  }
}

}  // namespace
}  // namespace heddle::tools
