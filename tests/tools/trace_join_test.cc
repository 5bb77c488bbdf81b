#include "tools/heddle/trace_join.h"

#include <heddle/error.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/protocol/message.h"
#include "tools/heddle/trace_json.h"

namespace heddle::tools {
namespace {

using kvstore::dist::Kind;
using kvstore::dist::NodeId;
using kvstore::dist::Role;
using kvstore::dist::TraceAction;
using kvstore::dist::TraceDirection;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::uint64_t kKey = 0x1234;
constexpr NodeId kScheduler{Role::kScheduler, 0}, kServer{Role::kServer, 0},
    kWorker{Role::kWorker, 1};

TraceFile FileOf(NodeId place, const std::string& machine) {
  TraceFile file;
  file.process = "program";
  file.pid = 100 + static_cast<std::uint32_t>(place.role);
  file.machine = machine;
  file.place.emplace();
  file.place->role = static_cast<std::uint8_t>(place.role);
  file.place->rank = place.rank;
  file.closed = true;
  return file;
}

TracedMessage MessageOf(TraceDirection direction, NodeId peer, Kind kind, std::uint64_t sequence,
                        std::uint64_t started_ns) {
  TracedMessage message;
  message.rank = kWorker.rank;
  message.started_ns = started_ns;
  message.ended_ns = started_ns + 10;
  message.key = kKey;
  message.sequence = sequence;
  message.kind = static_cast<std::uint8_t>(kind);
  message.direction = direction;
  message.peer_role = static_cast<std::uint8_t>(peer.role);
  message.peer_rank = peer.rank;
  message.thread = 7;
  return message;
}

TracedPart PartOf(TraceAction action, std::int32_t rank, std::uint64_t sequence,
                  std::uint64_t started_ns) {
  TracedPart part;
  part.action = action;
  part.rank = rank;
  part.sequence = sequence;
  part.key = kKey;
  part.started_ns = started_ns;
  part.ended_ns = started_ns + 5;
  part.thread = 8;
  return part;
}

// `from` sends at `sent` by its clock, `to` receives at `received` by its own.
void Exchange(TraceFile& from, TraceFile& to, NodeId from_id, NodeId to_id, Kind kind,
              std::uint64_t sequence, std::uint64_t sent, std::uint64_t received) {
  from.messages.push_back(MessageOf(TraceDirection::kSent, to_id, kind, sequence, sent));
  to.messages.push_back(MessageOf(TraceDirection::kReceived, from_id, kind, sequence, received));
}

// A push of worker 1 and its pull, with a push of worker 0, by times of one clock.
std::vector<TraceFile> OneRound(const std::string& machine_of_worker) {
  TraceFile worker = FileOf(kWorker, machine_of_worker), server = FileOf(kServer, "m");
  Exchange(worker, server, kWorker, kServer, Kind::kPush, 0, 1000, 1100);
  Exchange(worker, server, kWorker, kServer, Kind::kPull, 1, 1020, 1120);
  server.parts.push_back(PartOf(TraceAction::kMerge, 0, 0, 1200));
  server.parts.push_back(PartOf(TraceAction::kMerge, 1, 0, 1210));
  server.parts.push_back(PartOf(TraceAction::kUpdate, -1, 0, 1220));
  server.parts.push_back(PartOf(TraceAction::kRead, 1, 1, 1230));
  Exchange(server, worker, kServer, kWorker, Kind::kValue, 1, 1240, 1300);
  server.keys[kKey] = "'weight'";
  return {worker, server};
}

using Ends = std::pair<std::uint64_t, std::uint64_t>;  // where an arrow starts and ends

std::vector<Ends> EndsOf(const JoinedTrace& trace, RequestArrow::Kind kind) {
  std::vector<Ends> ends;
  for (const RequestArrow& arrow : trace.arrows) {
    if (arrow.kind == kind) ends.emplace_back(arrow.from.ns, arrow.to.ns);
  }
  std::ranges::sort(ends);
  return ends;
}

TEST(TraceJoin, ArrowsLeadFromAPushThroughMergeAndUpdateToThePull) {
  const JoinedTrace trace = JoinTraces(OneRound("m"));
  // The push to its merge, the pull to where it was received, the read to the value's arrival.
  EXPECT_EQ(EndsOf(trace, RequestArrow::Kind::kMessage),
            (std::vector<Ends>{{1000, 1210}, {1020, 1120}, {1234, 1300}}));
  EXPECT_EQ(EndsOf(trace, RequestArrow::Kind::kRound),
            (std::vector<Ends>{{1204, 1220}, {1214, 1220}, {1224, 1230}}));
}

TEST(TraceJoin, AFailedRoundLeadsNowhere) {
  std::vector<TraceFile> files = OneRound("m");
  files[1].parts[2].action = TraceAction::kDrop;
  EXPECT_TRUE(EndsOf(JoinTraces(files), RequestArrow::Kind::kRound).empty());
}

TEST(TraceJoin, EverySliceOfARequestHasItsId) {
  const JoinedTrace trace = JoinTraces(OneRound("m"));
  for (const TraceFile& file : trace.files) {  // the worker has learnt the key's name
    EXPECT_EQ(RequestId(file, file.messages[0]), "w1 s0 'weight' p0 #0");
    EXPECT_EQ(RequestId(file, file.messages[1]), "w1 s0 'weight' p0 #1");
    EXPECT_EQ(RequestId(file, file.messages[2]), "w1 s0 'weight' p0 #1");
  }
  EXPECT_EQ(RequestId(trace.files[1], trace.files[1].parts[1]), "w1 s0 'weight' p0 #0");
  EXPECT_EQ(RequestId(trace.files[1], trace.files[1].parts[2]), "");  // an update is of all
}

TEST(TraceJoin, WhatAnOpSentLaterHasAnArrowFromTheOp) {
  std::vector<TraceFile> files = OneRound("m");
  TraceFile& worker = files[0];
  for (const std::uint64_t ticket : {3, 4}) {
    TracedOp op;
    op.ticket = ticket;
    op.run = TracedRun{7, 990, 1010, engine::TraceOutcome::kOk};
    worker.ops.push_back(op);
  }
  worker.messages[0].op = 3 + 1;  // sent inside the body
  worker.messages[1].op = 4 + 1;  // sent after it
  EXPECT_EQ(EndsOf(JoinTraces(files), RequestArrow::Kind::kCall),
            (std::vector<Ends>{{1009, 1020}}));
}

// A thread may be kept from the end of its slice while another goes on with what came of it.
TEST(TraceJoin, NoArrowOfAProcessLeadsBackInTime) {
  std::vector<TraceFile> files = OneRound("m");
  TracedOp op;
  op.ticket = 3;
  op.run = TracedRun{9, 990, 5000, engine::TraceOutcome::kOk};
  files[0].ops.push_back(op);
  files[0].messages[1].op = 3 + 1;    // sent at 1020 on another thread
  files[1].parts[3].ended_ns = 5000;  // a read, whose value left at 1240
  const JoinedTrace trace = JoinTraces(files);
  EXPECT_EQ(EndsOf(trace, RequestArrow::Kind::kCall), (std::vector<Ends>{{1020, 1020}}));
  EXPECT_THAT(EndsOf(trace, RequestArrow::Kind::kMessage), testing::Contains(Ends{1240, 1300}));
}

// Machines whose clocks differ by anything: messages that took at least some time each way say by
// how much, to within that time.
TEST(TraceJoin, ClocksOfOtherMachinesFollowFromTheMessages) {
  std::mt19937_64 random(20260101);
  for (int repeat = 0; repeat < 50; ++repeat) {
    SCOPED_TRACE(repeat);
    const auto delay = [&] { return 20'000 + random() % 200'000; };
    // What the machines' clocks are ahead of the first one's.
    const std::uint64_t server_ahead = random() % 1'000'000'000'000, worker_ahead = random() % 1000;
    TraceFile scheduler = FileOf(kScheduler, "a"), server = FileOf(kServer, "b"),
              worker = FileOf(kWorker, "c");
    std::uint64_t now = 5'000'000'000'000;
    for (std::uint64_t i = 0; i < 40; ++i) {
      now += 1'000'000;
      // The worker's clock is known only by way of the server's.
      Exchange(server, scheduler, kServer, kScheduler, Kind::kHeartbeat, i, now + server_ahead,
               now + delay());
      Exchange(scheduler, server, kScheduler, kServer, Kind::kHeartbeat, i, now,
               now + server_ahead + delay());
      Exchange(worker, server, kWorker, kServer, Kind::kPull, i, now + worker_ahead,
               now + server_ahead + delay());
      Exchange(server, worker, kServer, kWorker, Kind::kValue, i, now + server_ahead,
               now + worker_ahead + delay());
    }
    const JoinedTrace trace = JoinTraces({scheduler, server, worker});
    const std::int64_t expected[] = {0, -static_cast<std::int64_t>(server_ahead),
                                     -static_cast<std::int64_t>(worker_ahead)};
    for (std::size_t i = 0; i < 3; ++i) {
      const TraceClock& clock = trace.clocks[i];
      EXPECT_EQ(clock.from, i == 0 ? TraceClock::From::kSame : TraceClock::From::kMessages);
      EXPECT_LE(std::abs(clock.offset_ns - expected[i]), clock.error_ns) << i;
      EXPECT_LE(clock.error_ns, static_cast<std::int64_t>(i) * 120'000) << i;
    }
    for (const RequestArrow& arrow : trace.arrows) {
      if (arrow.kind != RequestArrow::Kind::kMessage) continue;
      EXPECT_LE(trace.At(arrow.from.file, arrow.from.ns), trace.At(arrow.to.file, arrow.to.ns));
    }
  }
}

TEST(TraceJoin, ProcessesOfOneMachineHaveOneClock) {
  std::vector<TraceFile> files = OneRound("m");
  EXPECT_EQ(JoinTraces(files).clocks[1].offset_ns, 0);
  EXPECT_EQ(JoinTraces(files).clocks[1].from, TraceClock::From::kSame);
}

TEST(TraceJoin, WithoutMessagesBothWaysTheWallClocksCount) {
  TraceFile here = FileOf(kServer, "a"), there = FileOf(kWorker, "b");
  here.started_ns = 1000;
  here.started_unix_ns = 500'000;
  there.started_ns = 70'000;
  there.started_unix_ns = 500'500;
  Exchange(there, here, kWorker, kServer, Kind::kPush, 0, 70'100, 1600);
  const JoinedTrace trace = JoinTraces({here, there});
  EXPECT_EQ(trace.clocks[1].from, TraceClock::From::kWall);
  EXPECT_EQ(trace.At(1, there.started_ns), 1500);  // 500 ns after the first one's start
}

// It used to say 0, as of clocks that are known.
TEST(TraceJoin, HowFarWallClocksAreWrongNobodyKnows) {
  TraceFile here = FileOf(kServer, "a"), there = FileOf(kWorker, "b");
  EXPECT_EQ(JoinTraces({here, there}).clocks[0].error_ns, 0);
  EXPECT_EQ(JoinTraces({here, there}).clocks[1].error_ns, std::nullopt);
  std::ostringstream text;
  WriteTraceJson(JoinTraces({here, there}), {}, text);
  const nlohmann::json clocks = nlohmann::json::parse(text.str())["otherData"]["clocks"];
  EXPECT_EQ(clocks[0]["error_ns"], 0);
  EXPECT_TRUE(clocks[1]["error_ns"].is_null());
}

// Both used to go by their wall clocks, so that what one sent could come before it was sent.
TEST(TraceJoin, MachinesWithoutAWayToTheFirstGoByMessagesAmongThem) {
  TraceFile first = FileOf(kScheduler, "a"), server = FileOf(kServer, "b"),
            worker = FileOf(kWorker, "c");
  first.started_unix_ns = server.started_unix_ns = worker.started_unix_ns = 500'000;
  constexpr std::uint64_t kAhead = 70'000;  // the worker's clock, which does not start with it
  Exchange(worker, server, kWorker, kServer, Kind::kPull, 0, 1000 + kAhead, 1100);
  Exchange(server, worker, kServer, kWorker, Kind::kValue, 0, 1200, 1300 + kAhead);
  const JoinedTrace trace = JoinTraces({first, server, worker});
  EXPECT_EQ(trace.clocks[1].from, TraceClock::From::kWall);
  EXPECT_EQ(trace.clocks[2].from, TraceClock::From::kWall);
  EXPECT_EQ(trace.clocks[2].error_ns, std::nullopt);
  EXPECT_EQ(trace.At(1, 1100) - trace.At(2, 1000 + kAhead), 100);
}

// As profiler.pause() and resume() make them.
TEST(TraceJoin, FilesThatOneProcessHasWrittenInTurnAreJoined) {
  std::vector<TraceFile> files = OneRound("m");
  TraceFile later = files[0];
  later.started_ns = 1250;
  files[0].messages.pop_back();  // the value, which came later
  later.messages.erase(later.messages.begin(), later.messages.end() - 1);
  files.push_back(later);
  const JoinedTrace trace = JoinTraces(files);
  EXPECT_EQ(EndsOf(trace, RequestArrow::Kind::kMessage),
            (std::vector<Ends>{{1000, 1210}, {1020, 1120}, {1234, 1300}}));
}

TEST(TraceJoin, OneTraceGivenTwiceIsRefusedNamingBothFiles) {
  TraceFile first = FileOf(kWorker, "a");
  first.place.reset();  // a program without a job
  first.path = "run.trace";
  TraceFile second = first;
  second.path = "copy.trace";
  try {
    JoinTraces({first, second});
    FAIL() << "nothing was thrown";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("run.trace"), HasSubstr("copy.trace")));
  }
  second.started_ns = 7;  // another engine of the process
  EXPECT_NO_THROW(JoinTraces({first, second}));
}

TEST(TraceJoin, TracesOfTwoJobsAreRefusedNamingBoth) {
  TraceFile scheduler = FileOf(kScheduler, "a"), server = FileOf(kServer, "a"),
            worker = FileOf(kWorker, "a");
  scheduler.place->job = 11;
  server.place->job = 12;
  server.path = "old/run.server0.trace";
  worker.path = "run.worker1.trace";  // by a program that does not tell its job
  EXPECT_NO_THROW(JoinTraces({scheduler, worker}));
  EXPECT_NO_THROW(JoinTraces({server, worker}));
  try {
    JoinTraces({worker, scheduler, server});
    FAIL() << "nothing was thrown";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("one job"), HasSubstr("the scheduler"),
                                    HasSubstr("old/run.server0.trace of server 0")));
  }
}

TEST(TraceJoin, TwoFilesOfOnePlaceAreRefusedNamingBoth) {
  TraceFile first = FileOf(kWorker, "a"), second = FileOf(kWorker, "a");
  first.pid = 11;
  second.pid = 12;
  second.place->incarnation = 1;
  try {
    JoinTraces({first, second});
    FAIL() << "nothing was thrown";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("worker 1"), HasSubstr("process 11"), HasSubstr("process 12")));
  }
}

}  // namespace
}  // namespace heddle::tools
