// The traces of a real job, joined: three workers and two servers, as a user runs and reads them.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/tools/child_process.h"
#include "tools/testing/temp_folder.h"

namespace heddle::tools {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr const char* kHeddle = HEDDLE_COMMAND;
constexpr int kWorkers = 3, kRounds = 4;

struct Slice {
  std::string process, category, name, id;
  double start = 0, end = 0;
};

class JobTrace : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TempFolder;
    const ProgramResult job = RunProgram({kHeddle, "launch", "-n", std::to_string(kWorkers), "-s",
                                          "2", "--env", "HEDDLE_TRACE=" + (*folder_ / "run.trace"),
                                          "--", WORKER_PROGRAM, "train", std::to_string(kRounds)});
    ASSERT_EQ(job.status, 0) << job.output;
    std::vector<std::string> command = {kHeddle, "trace"};
    for (const char* place : {"scheduler", "server0", "server1", "worker0", "worker1", "worker2"}) {
      command.push_back(*folder_ / ("run." + std::string(place) + ".trace"));
    }
    command.insert(command.end(), {"-o", *folder_ / "run.json"});
    const ProgramResult joined = RunProgram(command);
    ASSERT_EQ(joined.status, 0) << joined.output;
    EXPECT_THAT(joined.output, HasSubstr("6 processes"));
    std::ifstream file(*folder_ / "run.json");
    trace_ = new json(json::parse(file));
    Collect();
  }
  static void TearDownTestSuite() {
    delete std::exchange(trace_, nullptr);
    delete std::exchange(folder_, nullptr);
  }

  static void Collect() {
    std::map<int, std::string> processes;
    for (const json& event : (*trace_)["traceEvents"]) {
      if (event["ph"] == "M" && event["name"] == "process_name") {
        const std::string name = event["args"]["name"];
        processes[event["pid"]] = name.substr(0, name.find(" ("));
      }
    }
    std::map<int, json> starts;
    for (const json& event : (*trace_)["traceEvents"]) {
      if (event["ph"] == "X") {
        const double start = event["ts"], length = event["dur"];
        slices_.push_back({processes.at(event["pid"]), event["cat"], event["name"],
                           event.value("/args/id"_json_pointer, ""), start, start + length});
        threads_.push_back({event["pid"], event["tid"]});
      } else if (event["ph"] == "s" && event["cat"] == "request") {
        starts[event["id"]] = event;
      }
    }
    for (const json& event : (*trace_)["traceEvents"]) {
      if (event["ph"] != "f" || event["cat"] != "request") continue;
      const json& start = starts.at(event["id"]);
      EXPECT_LE(start["ts"], event["ts"]) << start << event;
      const int from = SliceAround(start), to = SliceAround(event);
      ASSERT_TRUE(from >= 0 && to >= 0) << start << event;
      arrows_[from].insert(to);
    }
  }

  // The innermost slice of the thread at that time, which is where a viewer draws the arrow's end.
  static int SliceAround(const json& event) {
    int found = -1;
    const double at = event["ts"];
    for (std::size_t i = 0; i < slices_.size(); ++i) {
      if (threads_[i] != std::pair<int, int>(event["pid"], event["tid"])) continue;
      if (at < slices_[i].start - 0.0005 || at > slices_[i].end + 0.0005) continue;
      if (found < 0 || slices_[i].start >= slices_[static_cast<std::size_t>(found)].start) {
        found = static_cast<int>(i);
      }
    }
    return found;
  }

  static std::vector<int> Find(const std::string& process, const std::string& name,
                               const std::string& id = "") {
    std::vector<int> found;
    for (std::size_t i = 0; i < slices_.size(); ++i) {
      const Slice& slice = slices_[i];
      if (slice.process.rfind(process, 0) == 0 && slice.name == name &&
          (id.empty() || slice.id == id)) {
        found.push_back(static_cast<int>(i));
      }
    }
    return found;
  }
  // Those that the arrows from `from` lead to and that are called so.
  static std::vector<int> Next(int from, const std::string& name) {
    std::vector<int> found;
    for (const int to : arrows_[from]) {
      if (slices_[static_cast<std::size_t>(to)].name == name) found.push_back(to);
    }
    return found;
  }
  static const Slice& At(int slice) { return slices_[static_cast<std::size_t>(slice)]; }

  static inline TempFolder* folder_ = nullptr;
  static inline json* trace_ = nullptr;
  static inline std::vector<Slice> slices_;
  static inline std::vector<std::pair<int, int>> threads_;  // process and thread of each
  static inline std::map<int, std::set<int>> arrows_;
};

TEST_F(JobTrace, EveryRoleIsThereByNameAndOnOneClock) {
  std::set<std::string> processes;
  for (const json& clock : (*trace_)["otherData"]["clocks"]) {
    const std::string name = clock["process"];
    processes.insert(name.substr(0, name.find(" (")));
    EXPECT_EQ(clock["offset_ns"], 0) << name;  // of one machine
  }
  EXPECT_EQ(processes, (std::set<std::string>{"the scheduler", "server 0", "server 1", "worker 0",
                                              "worker 1", "worker 2"}));
  EXPECT_EQ((*trace_)["otherData"]["complete"], true);
}

// A push of each worker and round: sent, merged at its server under the same id; the merges of a
// round lead to its one update, that to a read for each worker's pull, and that to the worker.
TEST_F(JobTrace, ArrowsLeadFromEveryPushThroughItsRoundToThePulls) {
  for (const std::string key : {"'weight'", "'bias'"}) {
    std::set<int> updates;
    for (int rank = 0; rank < kWorkers; ++rank) {
      const std::string worker = "worker " + std::to_string(rank);
      const std::vector<int> sends = Find(worker, "send push " + key);
      ASSERT_EQ(sends.size(), static_cast<std::size_t>(kRounds)) << worker << key;
      for (const int send : sends) {
        EXPECT_THAT(At(send).id, StartsWith("w" + std::to_string(rank) + " s0 " + key + " p0 #"));
        const std::vector<int> merges = Next(send, "merge " + key);
        ASSERT_EQ(merges.size(), 1u) << At(send).id;
        EXPECT_EQ(At(merges[0]).id, At(send).id);
        EXPECT_THAT(At(merges[0]).process, StartsWith("server "));
        const std::vector<int> update = Next(merges[0], "update " + key);
        ASSERT_EQ(update.size(), 1u) << At(send).id;
        EXPECT_LE(At(merges[0]).end, At(update[0]).start + 0.001);
        updates.insert(update[0]);
        int pulls_of_worker = 0;
        for (const int read : Next(update[0], "read " + key)) {
          const std::vector<int> received = Next(read, "receive value " + key);
          ASSERT_EQ(received.size(), 1u) << At(read).id;
          EXPECT_EQ(At(received[0]).id, At(read).id);
          EXPECT_LE(At(update[0]).end, At(received[0]).start);
          pulls_of_worker += At(received[0]).process == worker ? 1 : 0;
          // The pull itself came under that id too.
          EXPECT_EQ(Find(At(received[0]).process, "send pull " + key, At(read).id).size(), 1u);
        }
        EXPECT_EQ(pulls_of_worker, 1) << At(send).id;
      }
    }
    EXPECT_EQ(updates.size(), static_cast<std::size_t>(kRounds)) << key;
  }
}

// What a worker sends and receives for an op names it by its ticket.
TEST_F(JobTrace, RequestsNameTheOpsThatTheyAreOf) {
  std::map<std::pair<int, int>, std::string> ops;
  for (const json& event : (*trace_)["traceEvents"]) {
    if (event["ph"] == "X" && event["cat"] == "op") {
      ops[{event["pid"], event["args"]["ticket"]}] = event["name"];
    }
  }
  int pushes = 0, pulls = 0;
  for (const json& event : (*trace_)["traceEvents"]) {
    if (event["ph"] != "X" || event["cat"] != "message") continue;
    const std::string name = event["name"];
    const auto op_of = [&] { return ops.at({event["pid"], event["args"].at("ticket")}); };
    if (name.rfind("send push", 0) == 0) {
      EXPECT_EQ(op_of(), "kvstore.push");
      ++pushes;
    } else if (name.rfind("send pull", 0) == 0 || name == "receive value 'weight'") {
      EXPECT_EQ(op_of(), "kvstore.pull");
      ++pulls;
    }
  }
  EXPECT_EQ(pushes, 2 * kWorkers * kRounds);
  EXPECT_EQ(pulls, 3 * kWorkers * kRounds);
}

TEST_F(JobTrace, BarriersMeetAtTheScheduler) {
  const std::vector<int> received = Find("the scheduler", "receive barrier");
  const std::vector<int> done = Find("worker", "receive barrier_done");
  EXPECT_EQ(received.size(), static_cast<std::size_t>(2 * kWorkers)) << "and the last of each";
  ASSERT_EQ(done.size(), static_cast<std::size_t>(kWorkers));
  for (const int go : done) {
    const auto come =
        std::ranges::count_if(received, [&](int event) { return At(event).start <= At(go).start; });
    EXPECT_GE(come, kWorkers);
  }
}

TEST(TracesOfTwoJobs, AreNotJoined) {
  const TempFolder folder;
  for (const char* const name : {"old.trace", "new.trace"}) {
    const ProgramResult job =
        RunProgram({kHeddle, "launch", "-n", "1", "-s", "1", "--env",
                    "HEDDLE_TRACE=" + (folder / name), "--", WORKER_PROGRAM, "train", "1"});
    ASSERT_EQ(job.status, 0) << job.output;
  }
  const std::string output = folder / "run.json";
  const ProgramResult mixed = RunProgram({kHeddle, "trace", folder / "old.scheduler.trace",
                                          folder / "new.worker0.trace", "-o", output});
  EXPECT_EQ(mixed.status, 1);
  EXPECT_THAT(mixed.output, HasSubstr("expected traces of one job, got those of two: "));
  EXPECT_FALSE(std::filesystem::exists(output));
}

// --- captured streams ----------------------------------------------------------------------------

// What wire-dump makes of the streams of all processes. Sent here is received there; of the
// handshake, where the token is proved, nothing is in any file.
TEST(WireCapture, StreamsOfAJobAreReadableAndHoldNothingSecret) {
  const TempFolder folder;
  const ProgramResult job = RunProgram({kHeddle, "launch", "-n", "1", "-s", "1", "--env",
                                        "HEDDLE_WIRE_CAPTURE=" + (folder / "job.wire"), "--",
                                        WORKER_PROGRAM, "train", "2"});
  ASSERT_EQ(job.status, 0) << job.output;
  std::map<std::string, std::string> dumps;
  std::string values_sent, values_received;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "")) {
    const std::string name = entry.path().filename();
    EXPECT_EQ(entry.status().permissions(),
              std::filesystem::perms::owner_read | std::filesystem::perms::owner_write)
        << name;
    const ProgramResult dump = RunProgram({kHeddle, "wire-dump", entry.path()});
    EXPECT_EQ(dump.status, 0) << name << dump.output;
    for (const char* const kind : {"hello", "challenge", "proof", "welcome"}) {
      EXPECT_THAT(dump.output, ::testing::Not(HasSubstr(kind))) << name;
    }
    dumps[name] = dump.output;
    if (name.rfind("job.worker0.wire.", 0) == 0 && name.find("server0") != std::string::npos) {
      (name.ends_with(".sent") ? values_sent : values_received) += dump.output;
    }
  }
  EXPECT_THAT(values_sent, HasSubstr("push"));
  EXPECT_THAT(values_received, HasSubstr("value"));
  // The server's connections to the worker: it has accepted them before it knew the rank, or after.
  std::multiset<std::string> of_worker, of_server;
  for (const auto& [name, dump] : dumps) {
    const bool sent = name.ends_with(".sent");
    if (name.rfind("job.worker0.", 0) == 0 && name.find("server") != std::string::npos && sent) {
      of_worker.insert(dump);
    }
    if (name.rfind("job.server0.", 0) == 0 && name.find("-worker") != std::string::npos && !sent) {
      of_server.insert(dump);
    }
  }
  EXPECT_FALSE(of_worker.empty());
  EXPECT_EQ(of_worker, of_server);
}

}  // namespace
}  // namespace heddle::tools
