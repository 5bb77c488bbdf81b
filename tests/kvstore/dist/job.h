// A job inside the test's process: a scheduler, servers and workers, over any transport.
#pragma once

#include <heddle/dist.h>
#include <heddle/engine.h>
#include <heddle/kvstore.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "kvstore/dist/run.h"
#include "kvstore/dist/scheduler_node.h"
#include "kvstore/dist/server/server_node.h"
#include "kvstore/dist/transport/sim/sim_hub.h"
#include "kvstore/dist/worker/dist_kvstore.h"
#include "kvstore/dist/worker/worker_node.h"
#include "tests/kvstore/support.h"

namespace heddle::kvstore::dist {

enum class Network { kSim, kTcp, kSharedMemory };

struct JobOptions {
  Network network = Network::kSim;
  int num_workers = 1;
  int num_servers = 1;
  std::int64_t slice_bytes = 64 << 10;
  std::int64_t cut_bound = 30'000;
  std::chrono::milliseconds op_deadline{0};
  // No role of most jobs dies. One thread delivers all messages of a simulated network, so a
  // heartbeat comes as late as the thousands of messages before it take.
  std::chrono::milliseconds heartbeat_interval{1000};
  int dead_after = 100;
  ServerProgram program = {};
  std::uint64_t seed = kvstore_test::TestSeed();  // of the simulated network
  // What becomes of each transport; empty: nothing.
  std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport>)> wrap = {};
  // Of TCP; 0: what follows from the options.
  std::chrono::milliseconds confirm_limit{0};
  // Whether the job's scheduler and servers end by an error.
  bool fails = false;
  // Of each worker's engine; empty: as the environment says.
  std::function<EngineOptions()> engine = {};
};

class Job {
 public:
  explicit Job(const JobOptions& options) : options_(options) {
    scheduler_ = std::make_unique<SchedulerNode>(OptionsOf(DistRole::kScheduler),
                                                 Factory(DistRole::kScheduler));
    root_ = scheduler_->address();
    Run([this] { scheduler_->Run(); });
    for (int i = 0; i < options.num_servers; ++i) {
      servers_.push_back(std::make_unique<ServerNode>(OptionsOf(DistRole::kServer),
                                                      EngineOptions::FromEnvironment(),
                                                      options.program, Factory(DistRole::kServer)));
      Run([server = servers_.back().get()] { server->Run(); });
    }
  }
  // The roles end by themselves once all workers have left.
  ~Job() {
    for (std::thread& thread : threads_) thread.join();
  }

  // The worker of a rank, which the caller closes. Returns when the job has begun.
  std::shared_ptr<WorkerNode> Join(int rank) {
    DistOptions mine = OptionsOf(DistRole::kWorker);
    mine.rank = rank;
    return WorkerNode::Join(mine, Factory(DistRole::kWorker));
  }
  // Runs `body` on a thread for each worker, and returns when all have ended and left.
  void RunNodes(const std::function<void(int rank, const std::shared_ptr<WorkerNode>& node,
                                         Engine& engine)>& body) {
    std::vector<std::thread> workers;
    for (int i = 0; i < options_.num_workers; ++i) {
      workers.emplace_back([&, i] {
        try {
          const auto node = Join(i);
          {
            Engine engine(options_.engine ? options_.engine() : EngineOptions::FromEnvironment());
            body(i, node, engine);
          }
          node->Close();
        } catch (const std::exception& error) {
          ADD_FAILURE() << "worker " << i << ": " << error.what();
        }
      });
    }
    for (std::thread& worker : workers) worker.join();
  }
  static std::unique_ptr<KVStore> NewStore(const std::shared_ptr<WorkerNode>& node, Engine& engine,
                                           const std::string& type) {
    EXPECT_TRUE(node->StoreMade());
    return MakeDistStore(engine, type, node, node->NewStore());
  }
  // The same with a store for each.
  void RunWorkers(const std::string& type,
                  const std::function<void(int rank, KVStore& store, Engine& engine)>& body) {
    RunNodes([&](int rank, const std::shared_ptr<WorkerNode>& node, Engine& engine) {
      const auto store = NewStore(node, engine, type);
      body(rank, *store, engine);
    });
  }

 private:
  DistOptions OptionsOf(DistRole role) const {
    DistOptions options;
    options.role = role;
    options.root_host = "127.0.0.1";
    const std::size_t colon = root_.rfind(':');
    if (colon != std::string::npos) {
      options.root_host = root_.substr(0, colon);
      options.root_port = std::stoi(root_.substr(colon + 1));
    }
    options.num_workers = options_.num_workers;
    options.num_servers = options_.num_servers;
    options.slice_bytes = options_.slice_bytes;
    options.cut_bound = options_.cut_bound;
    options.op_deadline = options_.op_deadline;
    options.shared_memory = options_.network == Network::kSharedMemory;
    options.heartbeat_interval = options_.heartbeat_interval;
    options.dead_after = options_.dead_after;
    return options;
  }
  TransportFactory Factory(DistRole role) {
    if (options_.network != Network::kSim) {
      return [this, options = OptionsOf(role)](TransportEvents& events, Incarnation incarnation) {
        TcpOptions tcp = TcpOptionsOf(options);
        tcp.incarnation = incarnation;
        if (options_.confirm_limit.count() > 0) tcp.confirm_limit = options_.confirm_limit;
        return Wrapped(TcpTransport::Create(std::move(tcp), events));
      };
    }
    const NodeId self{static_cast<Role>(role), role == DistRole::kScheduler ? 0 : -1};
    return [this, self](TransportEvents& events, Incarnation incarnation) {
      return Wrapped(hub_.MakeTransport({.self = self,
                                         .incarnation = incarnation,
                                         .address = "",
                                         .peers_are_provisional = self.role == Role::kScheduler},
                                        events));
    };
  }
  std::unique_ptr<Transport> Wrapped(std::unique_ptr<Transport> transport) const {
    return options_.wrap ? options_.wrap(std::move(transport)) : std::move(transport);
  }
  template <class Body>
  void Run(const Body& body) {
    threads_.emplace_back([body, fails = options_.fails] {
      try {
        body();
        EXPECT_FALSE(fails) << "a role has ended as if nothing had happened";
      } catch (const std::exception& error) {
        EXPECT_TRUE(fails) << error.what();
      }
    });
  }

  const JobOptions options_;
  SimHub hub_{options_.seed};
  std::string root_;
  std::unique_ptr<SchedulerNode> scheduler_;
  std::vector<std::unique_ptr<ServerNode>> servers_;
  std::vector<std::thread> threads_;
};

}  // namespace heddle::kvstore::dist
