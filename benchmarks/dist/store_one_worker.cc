// One worker and one server.
#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/dist/contests.h"
#include "benchmarks/dist/job.h"
#include "benchmarks/dist/store_sections.h"

namespace heddle::bench_dist {

using bench::BarReport;

namespace {

constexpr std::chrono::microseconds kSpin{50};

Ours PushPulls(const Job& job, Worker& worker) {
  return {.what = "pushpull",
          .operation_of = [&worker](std::size_t bytes) { return PushPullOf(worker, bytes); },
          .pin_server = [&job](int cpu) { job.Pin(cpu); },
          .server_cpu_seconds = [&job] { return job.CpuSeconds(); }};
}

}  // namespace

void MeasureLatency(BarReport& report, bool quick) {
  const Job job({});
  const ShortContest contest;
  const std::unique_ptr<Worker> worker = job.Join();
  contest.Run(report, PushPulls(job, *worker), quick);
}

void MeasurePolling(BarReport& report, bool quick) {
  const Job job({.spin = kSpin});
  const std::unique_ptr<Worker> worker = job.Join();
  RunPolling(report, PushPulls(job, *worker), quick);
}

void MeasureLarge(BarReport& report, bool quick) {
  const Job job({});
  LongContest contest;
  const std::unique_ptr<Worker> worker = job.Join();
  contest.Run(report, PushPulls(job, *worker), quick);
}

void MeasureSmall(BarReport& report, bool quick) {
  const Job job({});
  const std::unique_ptr<Worker> worker = job.Join();
  KVStore& store = worker->store();
  std::vector<Key> names;
  std::vector<NDArray> values;
  std::vector<NDArray> outs;
  for (int key = 0; key < kSmallCount; ++key) {
    names.emplace_back(std::to_string(key));
    values.push_back(worker->Array(256));
    outs.push_back(worker->Array(256));
  }
  store.Init(names, values);
  const auto wait = [&] {
    for (const NDArray& out : outs) out.WaitToRead();
  };
  const auto in_lists = [&](int /*all*/) {
    store.Push(names, values);
    store.Pull(names, outs);
    wait();
  };
  const auto key_by_key = [&](int keys) {
    for (int key = 0; key < keys; ++key) store.Push(names[key], values[key]);
    for (int key = 0; key < keys; ++key) store.Pull(names[key], outs[key]);
    wait();
  };
  const auto one_by_one = [&](int keys) {
    for (int key = 0; key < keys; ++key) {
      store.Push(names[key], values[key]);
      worker->engine().WaitForAll();
      store.Pull(names[key], outs[key]);
      outs[key].WaitToRead();
    }
  };
  RunSmall(report,
           {.what = "1 000 keys of 256 bytes pushed and pulled, all in a call",
            .together = in_lists,
            .one_by_one = one_by_one},
           quick);
  RunSmall(report,
           {.what = "1 000 keys of 256 bytes pushed and pulled, a call each",
            .together = key_by_key,
            .one_by_one = one_by_one},
           quick);
}

void MeasureUrgent(BarReport& report, bool quick) {
  const Job job({});
  const std::unique_ptr<Worker> worker = job.Join();
  KVStore& store = worker->store();
  const NDArray value = worker->Array(4096);
  const NDArray out = worker->Array(4096);
  store.Init("urgent", value);
  const NDArray bulk = worker->Array(kMiB);
  for (int key = 0; key < kBulkMebibytes; ++key) store.Init(std::to_string(key), bulk);
  RunUrgent(report,
            {.what = "pushpull",
             .urgent =
                 [&] {
                   store.PushPull("urgent", value, out, /*priority=*/1);
                   out.WaitToRead();
                 },
             .send_bulk =
                 [&](int mebibytes) {
                   for (int key = 0; key < mebibytes; ++key) {
                     store.Push(std::to_string(key), bulk, /*priority=*/-1);
                   }
                 },
             .wait = [&] { worker->engine().WaitForAll(); }},
            quick);
}

}  // namespace heddle::bench_dist
