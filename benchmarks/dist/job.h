// The processes of a distributed job, and the worker that a process is.
#pragma once

#include <heddle/engine.h>
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/dist/processes.h"
#include "kvstore/dist/transport/tcp/tls.h"
#include "kvstore/dist/worker/worker_node.h"

namespace heddle::bench_dist {

struct JobShape {
  int workers = 1;
  int servers = 1;
  std::chrono::microseconds spin{0};  // of workers and servers, before sleeping
  bool shared_memory = false;         // else TCP, also on one host
  bool signs_of_life = true;          // else minutes apart: bytes that are counted have none
  kvstore::dist::TlsOptions tls = {};
  // Where the scheduler, the servers and the worker run: files of a TestNetwork's first three
  // hosts; empty: on this one.
  std::vector<std::string> hosts = {};
};

// A worker of a job with a store dist_sync; it leaves in order.
class Worker {
 public:
  explicit Worker(std::shared_ptr<kvstore::dist::WorkerNode> node);
  ~Worker();

  KVStore& store() { return *store_; }
  Engine& engine() { return *engine_; }
  // Float32, on the CPU; all elements have that value.
  NDArray Array(std::size_t bytes, double value = 0);
  // How many bytes of arrays of these sizes each server has, with the keys "0", "1", ...
  std::vector<std::size_t> BytesOfServers(const std::vector<std::int64_t>& elements) const;

 private:
  const std::shared_ptr<kvstore::dist::WorkerNode> node_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<KVStore> store_;
};

// A pushpull of a key of its own until it can be read.
std::function<void()> PushPullOf(Worker& worker, std::size_t bytes);

// A scheduler and servers.
class Job {
 public:
  explicit Job(JobShape shape);

  // Makes the calling process a worker; returns when all of the job have met.
  std::unique_ptr<Worker> Join() const;

  // The first server runs on this CPU, the next on the next.
  void Pin(int cpu) const;
  double CpuSeconds() const;  // of the servers
  int scheduler_port() const;

 private:
  JobShape shape_;
  ServerProcess scheduler_;
  std::vector<std::unique_ptr<Process>> servers_;
};

}  // namespace heddle::bench_dist
