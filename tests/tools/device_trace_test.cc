// What simulated devices did, from the engine through the file to the JSON. Their reports come some
// time later and in any order, or only at the end.
#include <heddle/engine.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <latch>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "engine/gpu/work_matcher.h"
#include "tests/engine/sim_gpu.h"
#include "tests/engine/support.h"
#include "tests/sanitized.h"
#include "tools/heddle/trace_file.h"
#include "tools/heddle/trace_json.h"
#include "tools/testing/temp_folder.h"

namespace heddle::tools {
namespace {

using engine_test::BaseSeed;
using engine_test::SimGpu;
using internal::DeviceWork;
using nlohmann::json;

class DeviceTraceTest : public ::testing::TestWithParam<std::string> {
 protected:
  EngineOptions Options(const std::string& trace_file) {
    EngineOptions options;
    options.type = GetParam();
    options.num_workers = 2;
    options.worker_host = WorkerHost::kThreads;
    options.gpu_driver = gpu_;
    options.trace_file = trace_file;
    return options;
  }

  // `count` ops on random devices, lanes and variables, each of 0 to 3 kernels.
  void PushRandom(Engine& engine, int count) {
    std::vector<Var> vars;
    for (int i = 0; i < 6; ++i) vars.push_back(engine.NewVar());
    for (int i = 0; i < count; ++i) {
      const std::size_t kernels = random_() % 4;
      engine.PushGpu({.name = OpName(fmt::format("{} kernels", kernels)),
                      .reads = {vars[random_() % 6]},
                      .writes = {vars[random_() % 6]},
                      .device = Gpu(static_cast<int>(random_() % 2)),
                      .lane = random_() % 2 == 0 ? Lane::kNormal : Lane::kCopyOut},
                     [kernels](GpuStream stream) {
                       for (std::size_t k = 0; k < kernels; ++k) SimGpu::Launch(stream, [] {});
                     });
    }
  }

  static std::size_t KernelsOf(const TraceFile& trace, const TracedOp& op) {
    return static_cast<std::size_t>(trace.NameOf(op)[0] - '0');
  }

  // Each op has its works, on one stream, after it was issued and before it was completed; and
  // after what it had to wait for.
  static void ExpectWhole(const TraceFile& trace, std::size_t ops) {
    EXPECT_EQ(trace.ops.size(), ops);
    std::map<std::uint64_t, std::vector<TracedWork>> works;
    for (const TracedWork& work : trace.works) works[work.ticket].push_back(work);
    for (const TracedOp& op : trace.ops) {
      const std::vector<TracedWork>& mine = works[op.ticket];
      ASSERT_EQ(mine.size(), KernelsOf(trace, op)) << "op " << op.ticket;
      for (const TracedWork& work : mine) {
        EXPECT_EQ(work.stream, mine[0].stream);
        EXPECT_EQ(Gpu(work.stream.device), op.device);
        EXPECT_LE(work.started_ns, work.ended_ns);
        ASSERT_TRUE(op.run && op.completion);
        EXPECT_GE(work.started_ns, op.run->started_ns);
        EXPECT_LE(work.ended_ns, op.completion->completed_ns);
        EXPECT_EQ(trace.names.at(work.name), "sim_kernel");
      }
    }
    for (std::size_t i = 1; i < trace.works.size(); ++i) {
      const TracedWork& before = trace.works[i - 1];
      if (before.stream != trace.works[i].stream) continue;
      EXPECT_LE(before.ended_ns, trace.works[i].started_ns) << "one after another";
    }
    for (const TraceArrow& arrow : Dependencies(trace)) {
      for (const TracedWork& from : works[trace.ops[arrow.from].ticket]) {
        for (const TracedWork& to : works[trace.ops[arrow.to].ticket]) {
          EXPECT_LE(from.ended_ns, to.started_ns);
        }
      }
    }
  }

  std::string path() const { return folder_ / "t.trace"; }

  std::shared_ptr<SimGpu> gpu_ = std::make_shared<SimGpu>(2, BaseSeed());
  std::mt19937_64 random_{BaseSeed()};
  const TempFolder folder_;
};

TEST_P(DeviceTraceTest, EveryOpHasTheTimesOfItsWork) {
  for (const auto reports : {SimGpu::Reports::kLate, SimGpu::Reports::kAtTheEnd}) {
    SCOPED_TRACE(fmt::format("HEDDLE_TEST_SEED={}", BaseSeed()));
    gpu_->set_reports(reports);
    {
      Engine engine(Options(path()));
      PushRandom(engine, Scaled(300));
      engine.WaitForAll();
      if (reports == SimGpu::Reports::kAtTheEnd) {
        EXPECT_TRUE(ReadTraceFile(path()).works.empty());
        engine.StopTrace();
      }
    }
    const TraceFile trace = ReadTraceFile(path());
    EXPECT_TRUE(trace.closed);
    EXPECT_EQ(trace.damaged_bytes, 0u);
    ExpectWhole(trace, static_cast<std::size_t>(Scaled(300)));
  }
}

TEST_P(DeviceTraceTest, WithoutReportsTheTraceIsAsItWas) {
  gpu_->set_reports(SimGpu::Reports::kNone);
  {
    Engine engine(Options(path()));
    PushRandom(engine, 20);
    engine.WaitForAll();
  }
  const TraceFile trace = ReadTraceFile(path());
  EXPECT_TRUE(trace.works.empty());
  EXPECT_EQ(trace.ops.size(), 20u);
  for (const TracedOp& op : trace.ops) EXPECT_TRUE(op.run && op.completion);
}

TEST_P(DeviceTraceTest, ATraceIsStoppedWhileWorkIsPending) {
  if (GetParam() != "threaded") GTEST_SKIP() << "issues nothing outside of waits";
  Engine engine(Options(path()));
  const Var x = engine.NewVar("x");
  std::latch launched{1}, end{1};
  engine.PushGpu({.name = "1 kernels", .writes = {x}, .device = Gpu(0)}, [&](GpuStream stream) {
    SimGpu::Launch(stream, [&] { end.wait(); });
    launched.count_down();
  });
  launched.wait();
  engine.StopTrace();  // does not wait for the device
  const TraceFile first = ReadTraceFile(path());
  EXPECT_TRUE(first.closed);
  ASSERT_EQ(first.ops.size(), 1u);
  EXPECT_FALSE(first.ops[0].completion);
  EXPECT_TRUE(first.works.empty());
  const auto bytes = std::filesystem::file_size(path());

  // What was pushed before the next trace is not in that one.
  const std::string second_path = folder_ / "second.trace";
  engine.StartTrace(second_path);
  engine.PushGpu({.name = "2 kernels", .writes = {x}, .device = Gpu(0)}, [](GpuStream stream) {
    SimGpu::Launch(stream, [] {});
    SimGpu::Launch(stream, [] {});
  });
  end.count_down();
  engine.WaitForAll();
  engine.Stop();
  const TraceFile second = ReadTraceFile(second_path);
  ASSERT_EQ(second.works.size(), 2u);
  EXPECT_EQ(second.NameOf(*second.Find(second.works[0].ticket)), "2 kernels");
  EXPECT_EQ(second.works[1].ticket, second.works[0].ticket);
  EXPECT_EQ(std::filesystem::file_size(path()), bytes);
  EXPECT_TRUE(ReadTraceFile(path()).works.empty());
}

TEST_P(DeviceTraceTest, EnginesTraceTheirOwnOps) {
  const std::string other_path = folder_ / "other.trace";
  {
    Engine engine(Options(path()));
    Engine other(Options(other_path));
    for (int i = 0; i < 5; ++i) {
      PushRandom(engine, 8);
      PushRandom(other, 4);
    }
    engine.WaitForAll();
    other.WaitForAll();
  }
  ExpectWhole(ReadTraceFile(path()), 40);
  ExpectWhole(ReadTraceFile(other_path), 20);
}

// Tracks and arrows.
TEST_P(DeviceTraceTest, StreamsAreTracksOfTheJson) {
  {
    Engine engine(Options(path()));
    PushRandom(engine, 40);
    engine.WaitForAll();
  }
  const TraceFile trace = ReadTraceFile(path());
  std::ostringstream text;
  const TraceJsonCounts counts = WriteTraceJson(JoinTraces({trace}), {}, text);
  std::set<TracedStream> streams;
  // Two ops that are issued to a stream at the same time may lie there in turns.
  std::size_t slices = 0;
  const TracedWork* before = nullptr;
  for (const TracedWork& work : trace.works) {
    streams.insert(work.stream);
    const bool goes_on =
        before != nullptr && before->stream == work.stream && before->ticket == work.ticket;
    if (!goes_on) ++slices;
    before = &work;
  }
  EXPECT_EQ(counts.streams, streams.size());
  EXPECT_EQ(counts.device_ops, slices);

  std::map<std::uint32_t, std::string> tracks;
  std::map<std::uint64_t, json> hosts;
  std::map<std::uint64_t, std::size_t> works_of;
  std::vector<json> devices, works, leave, arrive;
  const json written = json::parse(text.str());
  for (const json& event : written["traceEvents"]) {
    const std::string category = event.value("cat", "");
    if (event["name"] == "thread_name") tracks[event["tid"]] = event["args"]["name"];
    if (category == "device") devices.push_back(event);
    if (category == "op") hosts[event["args"]["ticket"]] = event;
    if (category == "work") works.push_back(event);
    if (category == "issue") (event["ph"] == "s" ? leave : arrive).push_back(event);
  }
  EXPECT_EQ(works.size(), trace.works.size());
  for (const json& event : devices) {
    const std::uint64_t ticket = event["args"]["ticket"];
    const TracedOp& op = *trace.Find(ticket);
    EXPECT_EQ(event["name"], trace.NameOf(op));
    works_of[ticket] += event["args"]["works"].get<std::size_t>();
    const std::string& track = tracks.at(event["tid"]);
    EXPECT_TRUE(track.starts_with(ToString(op.device))) << track;
    EXPECT_NE(track.find(op.lane == Lane::kNormal ? "normal" : "copy_out"), std::string::npos);
  }
  for (const auto& [ticket, count] : works_of) {
    EXPECT_EQ(count, KernelsOf(trace, *trace.Find(ticket)));
  }
  for (const json& work : works) EXPECT_EQ(work["name"], "sim_kernel");
  ASSERT_EQ(leave.size(), devices.size());
  ASSERT_EQ(arrive.size(), devices.size());
  for (std::size_t i = 0; i < leave.size(); ++i) {
    EXPECT_EQ(leave[i]["id"], arrive[i]["id"]);
    const auto to = std::ranges::find_if(devices, [&](const json& each) {
      return each["tid"] == arrive[i]["tid"] && each["ts"] == arrive[i]["ts"];
    });
    ASSERT_NE(to, devices.end());
    const json& from = hosts.at((*to)["args"]["ticket"]);
    EXPECT_EQ(leave[i]["tid"], from["tid"]);
    EXPECT_GE(leave[i]["ts"], from["ts"]);
  }
}

// A file that was cut, as that of a killed process is, keeps the works that are whole.
TEST_P(DeviceTraceTest, ACutFileIsRead) {
  if (GetParam() != "threaded") GTEST_SKIP() << "a matter of the file alone";
  {
    Engine engine(Options(path()));
    PushRandom(engine, 500);
    engine.WaitForAll();
  }
  const std::size_t all = ReadTraceFile(path()).works.size();
  EXPECT_GT(all, 500u);
  std::ifstream file(path(), std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  for (std::size_t size = 4096; size < bytes.size(); size += 50'021) {
    std::ofstream(path(), std::ios::binary) << bytes.substr(0, size);
    const TraceFile trace = ReadTraceFile(path());
    EXPECT_LE(trace.works.size(), all);
    for (const TracedWork& work : trace.works) EXPECT_LE(work.started_ns, work.ended_ns);
    std::ostringstream json;
    WriteTraceJson(JoinTraces({trace}), {.arrows = false}, json);
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, DeviceTraceTest,
                         ::testing::Values("threaded", "serial", "seeded"),
                         [](const auto& info) { return info.param; });

// --- which op a record is of ---------------------------------------------------------------------

TEST(WorkMatcher, FindsTheOpWhateverTheOrderOfTheRecords) {
  std::mt19937_64 random(BaseSeed());
  for (int round = 0; round < 50; ++round) {
    SCOPED_TRACE(fmt::format("HEDDLE_TEST_SEED={}, round {}", BaseSeed(), round));
    struct Record {
      bool is_call;
      std::uint32_t call;
      std::uint64_t started_ns;  // of work
    };
    std::vector<Record> records;
    std::map<std::uint64_t, std::uint64_t> expected;  // op of each work
    for (std::uint32_t call = 1; call <= 40; ++call) {
      const bool of_an_op = random() % 3 != 0;
      if (of_an_op) records.push_back({true, call, 0});
      for (std::uint64_t i = random() % 3; i > 0; --i) {  // a graph's kernels come of one call
        const std::uint64_t started_ns = call * 10 + i;
        records.push_back({false, call, started_ns});
        if (of_an_op) expected[started_ns] = call * 1000;
      }
    }
    std::ranges::shuffle(records, random);
    engine::WorkMatcher matcher;
    std::map<std::uint64_t, std::uint64_t> found;
    const auto emit = [&](const DeviceWork& work) {
      EXPECT_TRUE(found.emplace(work.started_ns, work.op).second) << "twice";
    };
    for (const Record& record : records) {
      if (record.is_call) {
        matcher.OnCall(record.call, record.call * 1000, emit);
      } else {
        matcher.OnWork(record.call, {.started_ns = record.started_ns}, emit);
      }
    }
    EXPECT_EQ(found, expected);
  }
}

TEST(WorkMatcher, ForgetsTheOldest) {
  engine::WorkMatcher calls_first(10), works_first(10);
  int found = 0;
  const auto emit = [&](const DeviceWork&) { ++found; };
  for (std::uint32_t call = 0; call < 100; ++call) calls_first.OnCall(call, 1, emit);
  for (std::uint32_t call = 0; call < 100; ++call) calls_first.OnWork(call, {}, emit);
  EXPECT_EQ(found, 10);
  for (std::uint32_t call = 0; call < 100; ++call) works_first.OnWork(call, {}, emit);
  for (std::uint32_t call = 0; call < 100; ++call) works_first.OnCall(call, 1, emit);
  EXPECT_EQ(found, 20);
}

}  // namespace
}  // namespace heddle::tools
