#include "tools/heddle/trace_json.h"

#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "engine/trace.h"

namespace heddle::tools {
namespace {

using engine::TraceAccess;
using engine::TraceOutcome;
using engine::TraceWait;
using nlohmann::json;

constexpr std::uint64_t kStart = 1'000'000;

// "load" writes x; "use" reads x, on another thread; "send" is async; "stuck" never ran.
TraceFile SmallTrace() {
  TraceFile trace;
  trace.process = "program";
  trace.pid = 10;
  trace.started_ns = kStart;
  trace.last_ns = kStart + 50'000;
  trace.threads = {{11, "main"}, {12, "worker"}};
  trace.names = {{100, "load"}, {200, "use \"x\"\n"}, {300, "send"}, {400, "stuck\xff"}};
  trace.vars = {{1, "x"}};
  const auto add = [&trace](std::uint64_t name, TraceAccess access) -> TracedOp& {
    TracedOp op;
    op.ticket = trace.ops.size();
    op.pushed = true;
    op.pushed_ns = kStart + 1000;
    op.name = name;
    op.device = Cpu(3);
    op.lane = Lane::kCopy;
    op.priority = -2;
    op.accesses_begin = trace.accesses.size();
    trace.accesses.push_back({1, access});
    op.accesses_end = trace.accesses.size();
    trace.ops.push_back(op);
    return trace.ops.back();
  };
  add(100, TraceAccess::kWrite).run =
      TracedRun{11, kStart + 2000, kStart + 4500, TraceOutcome::kOk};
  add(200, TraceAccess::kRead).run =
      TracedRun{12, kStart + 5000, kStart + 6000, TraceOutcome::kFailed};
  TracedOp& send = add(300, TraceAccess::kRead);
  send.run = TracedRun{12, kStart + 7000, kStart + 8000, TraceOutcome::kOk};
  send.completion = TracedCompletion{kStart + 20'000, TraceOutcome::kOk};
  add(400, TraceAccess::kReadWrite);
  trace.waits.push_back({11, TraceWait::kVar, 1, kStart + 5000, kStart + 9000});
  trace.waits.push_back({11, TraceWait::kAll, 0, kStart + 9000, kStart + 9500});
  return trace;
}

json Convert(const TraceFile& trace, const TraceJsonOptions& options = {}) {
  std::ostringstream out;
  WriteTraceJson(JoinTraces({trace}), options, out);
  return json::parse(out.str());
}

std::vector<json> EventsOf(const json& trace, const std::string& type,
                           const std::string& category) {
  std::vector<json> found;
  for (const json& event : trace["traceEvents"]) {
    if (event["ph"] == type && event.value("cat", "") == category) found.push_back(event);
  }
  return found;
}

TEST(TraceJson, OpsAreSlicesOnTheThreadsThatRanThem) {
  const std::vector<json> ops = EventsOf(Convert(SmallTrace()), "X", "op");
  ASSERT_EQ(ops.size(), 3u);
  EXPECT_EQ(ops[0]["name"], "load");
  EXPECT_EQ(ops[0]["pid"], 10);
  EXPECT_EQ(ops[0]["tid"], 11);
  EXPECT_DOUBLE_EQ(ops[0]["ts"], 2.0);  // microseconds since the start
  EXPECT_DOUBLE_EQ(ops[0]["dur"], 2.5);
  const json& args = ops[0]["args"];
  EXPECT_EQ(args["device"], "cpu(3)");
  EXPECT_EQ(args["lane"], "copy");
  EXPECT_EQ(args["priority"], -2);
  EXPECT_DOUBLE_EQ(args["pushed_us"], 1.0);
  EXPECT_DOUBLE_EQ(args["queued_us"], 1.0);
  EXPECT_EQ(args["writes"], json::array({"x"}));
  EXPECT_EQ(args["reads"], json::array());
  EXPECT_EQ(args["outcome"], "ok");
  EXPECT_EQ(ops[1]["args"]["outcome"], "failed");
  EXPECT_EQ(ops[1]["args"]["reads"], json::array({"x"}));
}

TEST(TraceJson, NamesMayHoldAnything) {
  const json trace = Convert(SmallTrace());
  EXPECT_EQ(EventsOf(trace, "X", "op")[1]["name"], "use \"x\"\n");
  EXPECT_EQ(EventsOf(trace, "b", "pending")[0]["name"], "stuck\xef\xbf\xbd");
}

TEST(TraceJson, ArrowsLeadFromInsideAnOpToTheStartOfItsDependents) {
  const json trace = Convert(SmallTrace());
  const std::vector<json> starts = EventsOf(trace, "s", "dependency");
  const std::vector<json> ends = EventsOf(trace, "f", "dependency");
  ASSERT_EQ(starts.size(), 2u);  // load -> use, load -> send; "stuck" never started
  ASSERT_EQ(ends.size(), 2u);
  EXPECT_EQ(starts[0]["id"], ends[0]["id"]);
  EXPECT_NE(starts[0]["id"], starts[1]["id"]);
  EXPECT_EQ(starts[0]["tid"], 11);
  EXPECT_GE(starts[0]["ts"], 2.0);
  EXPECT_LT(starts[0]["ts"], 4.5);
  EXPECT_EQ(ends[0]["tid"], 12);
  EXPECT_DOUBLE_EQ(ends[0]["ts"], 5.0);
  EXPECT_EQ(ends[0]["bp"], "e");
  EXPECT_TRUE(EventsOf(Convert(SmallTrace(), {.arrows = false}), "s", "dependency").empty());
}

TEST(TraceJson, WaitsAreACategoryOfTheirOwn) {
  const std::vector<json> waits = EventsOf(Convert(SmallTrace()), "X", "wait");
  ASSERT_EQ(waits.size(), 2u);
  EXPECT_EQ(waits[0]["name"], "WaitForVar x");
  EXPECT_DOUBLE_EQ(waits[0]["dur"], 4.0);
  EXPECT_EQ(waits[1]["name"], "WaitForAll");
}

TEST(TraceJson, AsyncOpsLastUntilTheirCompletion) {
  const json trace = Convert(SmallTrace());
  const std::vector<json> begins = EventsOf(trace, "b", "async");
  const std::vector<json> ends = EventsOf(trace, "e", "async");
  ASSERT_EQ(begins.size(), 1u);
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_EQ(begins[0]["name"], "send");
  EXPECT_EQ(begins[0]["id"], ends[0]["id"]);
  EXPECT_DOUBLE_EQ(begins[0]["ts"], 7.0);
  EXPECT_DOUBLE_EQ(ends[0]["ts"], 20.0);
}

TEST(TraceJson, OpsThatNeverFinishedLastUntilTheEnd) {
  const json trace = Convert(SmallTrace());
  const std::vector<json> pending = EventsOf(trace, "b", "pending");
  ASSERT_EQ(pending.size(), 1u);
  EXPECT_DOUBLE_EQ(pending[0]["ts"], 1.0);
  EXPECT_EQ(pending[0]["args"]["modifies"], json::array({"x"}));
  EXPECT_DOUBLE_EQ(EventsOf(trace, "e", "pending")[0]["ts"], 50.0);
}

// Two kernels of an op that somebody else's work lies between are two slices.
TEST(TraceJson, WorkOfDevicesHasATrackForEachStream) {
  TraceFile trace = SmallTrace();
  using Kind = internal::DeviceWork::Kind;
  trace.names[700] = "_ZN6heddle3ops4cuda12_GLOBAL__N_112RunDotBlocksIfEEvT_";
  trace.names[800] = "plain_kernel";
  trace.names[900] = "f";  // extern "C"; used to be shown as float
  const auto add = [&](int device, std::uint64_t ticket, std::uint64_t from, std::uint64_t to,
                       Kind kind, std::uint64_t name, std::uint64_t bytes) {
    trace.works.push_back({{device, 7}, ticket, kStart + from, kStart + to, kind, name, bytes});
  };
  add(0, 0, 3000, 4000, Kind::kKernel, 700, 0);
  add(0, 0, 4000, 4100, Kind::kKernel, 800, 0);
  add(0, 1, 5000, 5500, Kind::kCopy, 0, 64);
  add(0, 0, 6000, 6500, Kind::kFill, 0, 32);
  add(1, 99, 3000, 3500, Kind::kKernel, 0, 0);
  add(1, 99, 3500, 3600, Kind::kKernel, 900, 0);
  std::ostringstream out;
  const TraceJsonCounts counts = WriteTraceJson(JoinTraces({trace}), {}, out);
  EXPECT_EQ(counts.streams, 2u);
  EXPECT_EQ(counts.device_ops, 4u);
  const json written = json::parse(out.str());
  const std::vector<json> ops = EventsOf(written, "X", "device");
  ASSERT_EQ(ops.size(), 4u);
  EXPECT_EQ(ops[0]["name"], "load");
  EXPECT_DOUBLE_EQ(ops[0]["ts"], 3.0);
  EXPECT_DOUBLE_EQ(ops[0]["dur"], 1.1);
  EXPECT_EQ(ops[0]["args"]["works"], 2);
  EXPECT_EQ(ops[1]["args"]["bytes"], 64);
  EXPECT_EQ(ops[2]["name"], "load");
  EXPECT_EQ(ops[3]["name"], "op 99");
  EXPECT_EQ(ops[0]["tid"], ops[2]["tid"]);
  EXPECT_NE(ops[0]["tid"], ops[3]["tid"]);
  std::vector<std::string> names;
  for (const json& work : EventsOf(written, "X", "work")) names.push_back(work["name"]);
  const std::vector<std::string> expected = {
      "heddle::ops::cuda::RunDotBlocks", "plain_kernel", "copy", "fill", "kernel", "f"};
  EXPECT_EQ(names, expected);
  EXPECT_EQ(EventsOf(written, "s", "issue").size(), 3u);  // nothing is known of op 99
  EXPECT_EQ(EventsOf(written, "f", "issue")[0]["tid"], ops[0]["tid"]);
}

TEST(TraceJson, CountsWhatItWrites) {
  std::ostringstream out;
  const TraceJsonCounts counts = WriteTraceJson(JoinTraces({SmallTrace()}), {}, out);
  EXPECT_EQ(counts.ops, 4u);
  EXPECT_EQ(counts.unfinished, 1u);
  EXPECT_EQ(counts.arrows, 2u);
  EXPECT_EQ(counts.waits, 2u);
}

TEST(TraceJson, EmptyTraceIsAnEmptyListOfSlices) {
  EXPECT_TRUE(EventsOf(Convert(TraceFile{}), "X", "op").empty());
}

}  // namespace
}  // namespace heddle::tools
