#include "kvstore/dist/run.h"

#include <heddle/error.h>

#include <cstdlib>
#include <exception>
#include <utility>

#include <fmt/format.h>
#include <unistd.h>

#include "base/env.h"
#include "base/job_file.h"
#include "base/mutex.h"
#include "engine/trace_source.h"
#include "kvstore/dist/listen_address.h"
#include "kvstore/dist/on_terminate.h"
#include "kvstore/dist/scheduler_node.h"
#include "kvstore/dist/server/server_node.h"
#include "kvstore/dist/worker/dist_kvstore.h"
#include "kvstore/gpu_sums.h"

namespace heddle::kvstore::dist {

namespace {

void CheckRole(const DistOptions& options, DistRole role) {
  if (options.role == role) return;
  throw InvalidArgument(
      fmt::format("expected role {}, got {}", DistRoleName(role), options.Describe("role")));
}

// A minute by default: who is that late by its own fault does nothing else either.
constexpr int kConfirmLimits = 20;

}  // namespace

TcpOptions TcpOptionsOf(const DistOptions& options) {
  const bool is_worker = options.role == DistRole::kWorker;
  TcpOptions tcp;
  tcp.self = {static_cast<Role>(options.role), options.role == DistRole::kScheduler ? 0 : -1};
  tcp.job_id = options.job_id;
  tcp.token = options.token;
  tcp.tls = {.certificate = options.tls_certificate,
             .key = options.tls_key,
             .authorities = options.tls_authorities,
             .name = options.tls_name};
  tcp.listen = !is_worker;
  if (tcp.listen) {
    const ListenAddress listen = ResolveListenAddress(options);
    tcp.bind_address = listen.bind;
    tcp.node_host = listen.advertised;
    tcp.setting = listen.settings;
  }
  if (options.role == DistRole::kScheduler) {
    tcp.port = static_cast<std::uint16_t>(options.root_port);
    tcp.listen_fd = options.listen_fd;
    tcp.peers_are_provisional = true;
  } else {
    // Where processes start before their scheduler does.
    tcp.reserved_port = static_cast<std::uint16_t>(options.root_port);
  }
  tcp.reception = is_worker ? Reception::kCallersFirst : Reception::kThread;
  if (options.io_threads > 0) tcp.io_threads = options.io_threads;
  tcp.shared_memory = options.shared_memory;
  tcp.cut_limit = options.dead_after * options.heartbeat_interval;
  tcp.confirm_limit = kConfirmLimits * tcp.cut_limit;
  tcp.spin = options.spin;
  tcp.io_cpu = options.io_cpu;
  tcp.capture = JobFileName(EnvString("HEDDLE_WIRE_CAPTURE", ""));
  return tcp;
}

TransportFactory TcpTransports(const DistOptions& options) {
  return [options](TransportEvents& events, Incarnation incarnation) -> std::unique_ptr<Transport> {
    TcpOptions tcp = TcpOptionsOf(options);
    tcp.incarnation = incarnation;
    return TcpTransport::Create(std::move(tcp), events);
  };
}

namespace {

// The worker that this process is. Its node outlives the stores, to tell the job how the process
// ends. After an end without order it stays until the process has ended: a launcher shall see that
// before the ends of others that follow from it.
class ProcessWorker {
 public:
  // With one more store, for which StoreGone will be called.
  std::shared_ptr<WorkerNode> Get() EXCLUDES(joining_mutex_, mutex_) {
    MutexLock joining(joining_mutex_);
    if (joined_) {
      std::shared_ptr<WorkerNode> node = Present();
      if (node != nullptr && node->StoreMade()) return node;
      throw InvalidState(
          "this process has left its job: expected all dist stores to be made while one is there");
    }
    const DistOptions options = DistOptions::FromEnvironment();
    options.Validate();
    if (options.role != DistRole::kWorker) {
      throw InvalidState(fmt::format("a process of {} has no stores: expected a worker",
                                     options.Describe("role")));
    }
    std::shared_ptr<WorkerNode> node = WorkerNode::Join(options, TcpTransports(options));
    joined_ = true;
    node->StoreMade();
    {
      MutexLock lock(mutex_);
      node_ = node;
      process_ = getpid();
    }
    ReportOnTerminate(&FailProcessWorker);
    // Runs before the destructors of what was made before, such as the default engine.
    on_exit([](int status, void* self) { static_cast<ProcessWorker*>(self)->OnExit(status); },
            this);
    return node;
  }

  void Fail(const std::string& why) EXCLUDES(mutex_) {
    const std::shared_ptr<WorkerNode> node = Present();
    if (node != nullptr) node->Fail(why);
  }

  std::optional<std::string> failure() EXCLUDES(mutex_) {
    const std::shared_ptr<WorkerNode> node = Present();
    return node != nullptr ? node->failure() : std::nullopt;
  }

  // As one more store, which goes then.
  void LeaveAtExit() EXCLUDES(mutex_) {
    const std::shared_ptr<WorkerNode> node = Present();
    if (node == nullptr) return;
    MutexLock lock(mutex_);
    leaves_at_exit_ = leaves_at_exit_ || node->Stay();
  }

 private:
  // A forked child is no worker.
  std::shared_ptr<WorkerNode> Present() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return process_ == getpid() ? node_ : nullptr;
  }

  void OnExit(int argument) EXCLUDES(mutex_) {
    const int status = argument & 0xff;  // all that others ever see of what exit() was given
    const std::shared_ptr<WorkerNode> node = Present();
    if (node == nullptr) return;
    bool leaves = false;
    {
      MutexLock lock(mutex_);
      leaves = leaves_at_exit_;
      if (status == 0) node_.reset();
    }
    if (status != 0) {
      node->Fail(fmt::format("its process exited with status {}", status));
    } else if (leaves) {
      node->StoreGone(/*orderly=*/true);
    }
  }

  Mutex joining_mutex_;
  bool joined_ GUARDED_BY(joining_mutex_) = false;
  Mutex mutex_;
  std::shared_ptr<WorkerNode> node_ GUARDED_BY(mutex_);
  pid_t process_ GUARDED_BY(mutex_) = 0;
  bool leaves_at_exit_ GUARDED_BY(mutex_) = false;
};

ProcessWorker& TheWorker() {
  static ProcessWorker* const worker =
      new ProcessWorker;  // never destroyed: stores may outlive main
  return *worker;
}

}  // namespace

void FailProcessWorker(const std::string& why) { TheWorker().Fail(why); }
std::optional<std::string> FailureOfProcessJob() { return TheWorker().failure(); }
void LeaveAtProcessExit() { TheWorker().LeaveAtExit(); }

std::unique_ptr<KVStore> MakeProcessStore(const std::string& type, Engine& engine,
                                          const KVStoreOptions& options) {
  const GpuSums gpu_sums = GpuSumsOf(options);
  std::shared_ptr<WorkerNode> node = TheWorker().Get();
  // The last store that holds it leaves the job.
  WorkerNode* const borrowed = node.get();
  const std::shared_ptr<WorkerLink> link(
      borrowed, [node](WorkerLink*) { node->StoreGone(std::uncaught_exceptions() == 0); });
  return MakeDistStore(engine, type, link, borrowed->NewStore(), gpu_sums);
}

}  // namespace heddle::kvstore::dist

namespace heddle::kvstore {

std::unique_ptr<KVStore> MakeDistSyncStore(Engine& engine, const KVStoreOptions& options) {
  return dist::MakeProcessStore("dist_sync", engine, options);
}
std::unique_ptr<KVStore> MakeDistAsyncStore(Engine& engine, const KVStoreOptions& options) {
  return dist::MakeProcessStore("dist_async", engine, options);
}
std::unique_ptr<KVStore> MakeDistDeviceSyncStore(Engine& engine, const KVStoreOptions& options) {
  return dist::MakeProcessStore("dist_device_sync", engine, options);
}
std::unique_ptr<KVStore> MakeDistDeviceAsyncStore(Engine& engine, const KVStoreOptions& options) {
  return dist::MakeProcessStore("dist_device_async", engine, options);
}

}  // namespace heddle::kvstore

namespace heddle {

void RunScheduler(const DistOptions& options) {
  using namespace kvstore::dist;  // NOLINT(google-build-using-namespace)
  CheckRole(options, DistRole::kScheduler);
  options.Validate();
  const EngineOptions traces = EngineOptions::FromEnvironment();
  const engine::TraceSource trace =
      traces.trace_file.empty() ? nullptr
                                : engine::NewTrace(traces.trace_file, traces.trace_bytes_max);
  SchedulerNode(options, TcpTransports(options), trace).Run();
}

void RunServer(const DistOptions& options, ServerProgram program) {
  using namespace kvstore::dist;  // NOLINT(google-build-using-namespace)
  CheckRole(options, DistRole::kServer);
  options.Validate();
  EngineOptions engine = EngineOptions::FromEnvironment();
  // Others run ops while somebody waits for them: a server never does.
  engine.type = "threaded";
  ServerNode(options, engine, std::move(program), TcpTransports(options)).Run();
}

}  // namespace heddle
