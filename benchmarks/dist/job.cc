#include "benchmarks/dist/job.h"

#include <heddle/dist.h>

#include <utility>

#include "benchmarks/support/bars.h"
#include "kvstore/dist/protocol/placement.h"
#include "kvstore/dist/run.h"
#include "kvstore/dist/scheduler_node.h"
#include "kvstore/dist/worker/dist_kvstore.h"
#include "tools/testing/test_network.h"

namespace heddle::bench_dist {

using namespace kvstore::dist;  // NOLINT(google-build-using-namespace)

namespace {

DistOptions OptionsOf(DistRole role, const JobShape& shape, int scheduler_port) {
  DistOptions options;
  options.role = role;
  options.root_host = shape.hosts.empty() ? "127.0.0.1" : "10.77.0.1";
  options.root_port = scheduler_port;
  options.num_workers = shape.workers;
  options.num_servers = shape.servers;
  options.spin = shape.spin;
  options.shared_memory = shape.shared_memory;
  options.tls_certificate = shape.tls.certificate;
  options.tls_key = shape.tls.key;
  options.tls_authorities = shape.tls.authorities;
  if (!shape.hosts.empty()) options.token = "of a benchmark";
  if (!shape.signs_of_life) options.heartbeat_interval = std::chrono::minutes(1);
  return options;
}

// Before its first thread but this one starts.
void GoTo(DistRole role, const JobShape& shape) {
  if (shape.hosts.empty()) return;
  const std::size_t host = role == DistRole::kScheduler ? 0 : role == DistRole::kServer ? 1 : 2;
  tools::TestNetwork::Enter(shape.hosts[host]);
}

}  // namespace

Worker::Worker(std::shared_ptr<WorkerNode> node)
    : node_(std::move(node)),
      engine_(std::make_unique<Engine>()),
      store_(MakeDistStore(*engine_, "dist_sync", node_, node_->NewStore())) {}

Worker::~Worker() {
  store_.reset();
  engine_.reset();
  node_->Close();
}

NDArray Worker::Array(std::size_t bytes, double value) {
  return NDArray::Full({static_cast<std::int64_t>(bytes / sizeof(float))}, value, DType::kFloat32,
                       Cpu(), *engine_);
}

std::vector<std::size_t> Worker::BytesOfServers(const std::vector<std::int64_t>& elements) const {
  const PlacementOptions& placement = node_->placement();
  std::vector<std::size_t> bytes(static_cast<std::size_t>(placement.num_servers));
  for (std::size_t key = 0; key < elements.size(); ++key) {
    const std::string name = std::to_string(key);
    for (const PlacedPart& part :
         PlaceKey(KeyId(name), {elements[key]}, DType::kFloat32, /*row_sparse=*/false, placement)) {
      bytes[static_cast<std::size_t>(part.server)] +=
          static_cast<std::size_t>(part.end - part.begin) * sizeof(float);
    }
  }
  return bytes;
}

std::function<void()> PushPullOf(Worker& worker, std::size_t bytes) {
  const NDArray value = worker.Array(bytes, 1);
  const NDArray out = worker.Array(bytes);
  const std::string key = bench::BytesText(bytes);
  worker.store().Init(key, value);
  return [&worker, key, value, out] {
    worker.store().PushPull(key, value, out);
    out.WaitToRead();
  };
}

Job::Job(JobShape shape)
    : shape_(std::move(shape)), scheduler_([&](const auto& ready) {
        GoTo(DistRole::kScheduler, shape_);
        const DistOptions options = OptionsOf(DistRole::kScheduler, shape_, 0);
        SchedulerNode node(options, TcpTransports(options));
        ready(node.address());
        node.Run();
      }) {
  for (int server = 0; server < shape_.servers; ++server) {
    servers_.push_back(std::make_unique<Process>([this] {
      GoTo(DistRole::kServer, shape_);
      RunServer(OptionsOf(DistRole::kServer, shape_, scheduler_port()));
    }));
  }
}

std::unique_ptr<Worker> Job::Join() const {
  GoTo(DistRole::kWorker, shape_);
  const DistOptions options = OptionsOf(DistRole::kWorker, shape_, scheduler_port());
  return std::make_unique<Worker>(WorkerNode::Join(options, TcpTransports(options)));
}

void Job::Pin(int cpu) const {
  for (const auto& server : servers_) {
    server->Pin(cpu);
    if (cpu != kAnywhere) ++cpu;
  }
}

double Job::CpuSeconds() const {
  double seconds = 0;
  for (const auto& server : servers_) seconds += server->CpuSeconds();
  return seconds;
}

int Job::scheduler_port() const {
  const std::string& address = scheduler_.address();
  return std::stoi(address.substr(address.rfind(':') + 1));
}

}  // namespace heddle::bench_dist
