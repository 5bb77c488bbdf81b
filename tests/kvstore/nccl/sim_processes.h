// Processes with a store of type "nccl" each, in one: every one has an engine, and a simulated
// NCCL, of its own, and pushes from some of the GPUs of one simulated machine.
#pragma once

#include <heddle/engine.h>
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "kvstore/nccl/job_meeting.h"
#include "kvstore/nccl/nccl_kvstore.h"
#include "kvstore/nccl/nccl_meeting.h"
#include "tests/kvstore/dist/job.h"
#include "tests/kvstore/nccl/sim_nccl.h"
#include "tests/kvstore/sim_store_gpu.h"
#include "tests/message_of.h"

namespace heddle::kvstore_test {

inline std::vector<float> Six(double value) {
  return std::vector<float>(6, static_cast<float>(value));
}

// What Python's Ctrl-C does to a wait.
struct Interrupted : std::exception {
  const char* what() const noexcept override { return "interrupted"; }
};

// How the processes meet.
enum class Means { kJob, kNccl };

struct ProcessesOptions {
  Means means = Means::kJob;
  std::string engine = "threaded";
  int processes = 2;
  int devices = 2;     // of each
  bool fails = false;  // the job's scheduler and servers end by an error
  kvstore::DeviceGroupOptions group{.deadline = std::chrono::minutes(2)};
};

class SimProcesses;

// What the body of a process has.
class SimProcess {
 public:
  SimProcess(SimProcesses& all, int rank);
  ~SimProcess();
  SimProcess(const SimProcess&) = delete;
  SimProcess& operator=(const SimProcess&) = delete;

  NDArray Full(double value, int device, const Shape& shape = {6}, DType dtype = DType::kFloat32) {
    return NDArray::Full(shape, value, dtype, Gpu(device), *engine);
  }
  // value, value + 1, ... on its devices.
  std::vector<NDArray> OnDevices(double value, const Shape& shape = {6}) {
    std::vector<NDArray> arrays;
    for (const int device : devices) arrays.push_back(Full(value++, device, shape));
    return arrays;
  }
  NDArray Poisoned(int device, const char* why) {
    NDArray array = Full(1, device);
    engine->PushGpu({.name = "fail", .writes = {array.var()}, .device = Gpu(device)},
                    [why](GpuStream) { throw std::runtime_error(why); });
    return array;
  }
  std::vector<float> Pulled(KeyRef key, const Shape& shape = {6}) {
    const NDArray out = Full(-1, devices[0], shape);
    store->Pull(key, out);
    return out.ToVector<float>();
  }
  // Pushes and pulls, and returns the message of the error of the kind E that the push throws, if
  // it is made after the failure, or else the wait for what has been pulled.
  template <class E>
  std::string MessageOfPush(KeyRef key, const std::vector<NDArray>& values) {
    const NDArray out = Full(0, devices[0]);
    return MessageOf<E>([&] {
      store->Push(key, values);
      store->Pull(key, out);
      out.WaitToRead();
    });
  }
  // It is gone, all at once, as far as the others can see.
  void Die();

  const int rank;
  std::vector<int> devices;
  std::optional<Engine> engine;
  std::shared_ptr<SimNccl> nccl;
  std::unique_ptr<KVStore> store;

 private:
  std::shared_ptr<kvstore::dist::WorkerNode> node_;  // of a job
};

class SimProcesses {
 public:
  explicit SimProcesses(const ProcessesOptions& options) : options_(options) {
    gpu->set_turns_max(1);
    if (options.means == Means::kJob) {
      job_.emplace(
          kvstore::dist::JobOptions{.num_workers = options.processes, .fails = options.fails});
    }
  }

  // body(process) for each, on a thread of its own. What it throws is a failure.
  void Run(const std::function<void(SimProcess& process)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < options_.processes; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          SimProcess process(*this, rank);
          body(process);
        } catch (const std::exception& error) {
          ADD_FAILURE() << "process " << rank << ": " << error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  const kvstore::Nccl::Id& id() const { return id_; }

  const std::shared_ptr<SimStoreGpu> gpu = std::make_shared<SimStoreGpu>(8, TestSeed());

 private:
  friend SimProcess;

  const ProcessesOptions options_;
  const std::shared_ptr<SimNccl::Network> network_ = SimNccl::NewNetwork();
  const kvstore::Nccl::Id id_ = SimNccl(gpu, network_).NewId();
  std::optional<kvstore::dist::Job> job_;
};

inline SimProcess::SimProcess(SimProcesses& all, int rank) : rank(rank) {
  const ProcessesOptions& options = all.options_;
  for (int i = 0; i < options.devices; ++i) devices.push_back(rank * options.devices + i);
  EngineOptions engine_options = EngineOptions::FromEnvironment();
  engine_options.type = options.engine;
  engine_options.num_workers = 2;
  engine_options.gpu_driver = all.gpu;
  engine.emplace(engine_options);
  nccl = std::make_shared<SimNccl>(all.gpu, all.network_);
  std::shared_ptr<kvstore::Meeting> meeting;
  if (options.means == Means::kJob) {
    node_ = all.job_->Join(rank);
    meeting = std::make_shared<kvstore::JobMeeting>(
        kvstore::dist::MakeDistStore(*engine, "dist_sync", node_, node_->NewStore()),
        kvstore::JobMeeting::Job{[node = node_.get()](const std::string& why) { node->Fail(why); },
                                 [node = node_.get()] { return node->failure(); }});
  } else {
    meeting = std::make_shared<kvstore::NcclMeeting>(
        *engine, nccl, all.gpu, kvstore::NcclProcess{all.id_, rank, options.processes},
        options.group);
  }
  store = std::make_unique<kvstore::NcclKVStore>(*engine, nccl, KVStore::Create("device", *engine),
                                                 options.group, std::move(meeting));
}

inline SimProcess::~SimProcess() {
  store.reset();
  engine.reset();
  if (node_ != nullptr) node_->Close();
}

inline void SimProcess::Die() {
  nccl->Crash();
  struct Unwinding {  // a store that goes in order says so
    SimProcess& process;
    ~Unwinding() { process.store.reset(); }
  };
  try {
    const Unwinding unwinding{*this};
    throw Interrupted();
  } catch (const Interrupted&) {
  }
  engine.reset();
  node_.reset();
}

}  // namespace heddle::kvstore_test
