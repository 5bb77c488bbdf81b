#include "kvstore/dist/worker/dist_kvstore.h"

#include <chrono>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/log.h"
#include "engine/fork.h"
#include "engine/wait_checks.h"
#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/worker/control_call.h"

namespace heddle::kvstore::dist {

namespace {

// How long what the destructor waits for may keep it from looking at anything else.
constexpr std::chrono::milliseconds kStep(50);

// The link, by whose end a worker leaves, must not end before the process does.
void KeepForever(const std::shared_ptr<WorkerLink>& link) {
  [[maybe_unused]] const auto* const kept = new std::shared_ptr<WorkerLink>(link);
}

// For an engine that runs ops only inside waits: runs some.
void RunOps(Engine& engine) {
  if (engine.options().type == "threaded") return;
  const WaitCheckScope unchecked(kStep, nullptr);  // an exception here is one of the ops
  const Deadline deadline(kStep);
  try {
    engine.WaitForAll(deadline);
  } catch (const std::exception& error) {
    if (std::chrono::steady_clock::now() >= deadline.time()) return;  // the wait's own
    Log(LogLevel::kWarning, "a dist store was dropped while an op failed: {}", error.what());
  }
}

}  // namespace

DistKVStore::DistKVStore(Engine& engine, std::string type, std::shared_ptr<WorkerLink> link,
                         std::uint32_t store, GpuSums gpu_sums)
    : KVStore(engine),
      link_(std::move(link)),
      store_(store),
      async_(type.find("async") != std::string::npos),
      sums_on_gpus_(type.find("device") != std::string::npos),
      sums_along_links_(gpu_sums != GpuSums::kDirect),
      removing_(engine.NewVar("dist.removing")) {
  link_->Serve(engine, *this);
  try {
    CallServersInTurn("opening the store", Kind::kOpenStore,
                      Encode(OpenStoreBody{std::move(type)}));
  } catch (...) {
    link_->DropStore();
    link_->Leave(engine, *this);
    throw;
  }
}

// What is under way completes first: nothing of the store outlives it, so that its place in the job
// can be given up right after. If the check of a WaitCheckScope throws, the host wants to leave:
// this worker has failed then. No exception leaves a destructor, so the scope keeps it.
DistKVStore::~DistKVStore() {
  if (engine::InForkedChild()) {
    KeepForever(link_);  // the job is the parent's
    return;
  }
  const bool orderly = std::uncaught_exceptions() == 0;
  if (orderly) {
    Close();
  } else {
    link_->DropStore();
  }
  const auto ended = [this] {
    return calls_->WaitUntilNone(std::chrono::steady_clock::now() + kStep);
  };
  std::exception_ptr left;
  while (left == nullptr && !ended()) {
    RunOps(engine());
    if (internal::WaitChecks::Any()) left = internal::WaitChecks::Call();
  }
  if (left != nullptr) {
    link_->Fail("its program was interrupted while a store waited for its end");
    RunOps(engine());
    if (!ended()) KeepForever(link_);  // an op of the program holds some up
    internal::WaitChecks::Keep(std::move(left));
  }
  if (orderly) link_->StoreClosed(store_);
  link_->Leave(engine(), *this);
}

// The others must not wait for this worker while it waits for them.
void DistKVStore::Close() {
  for (const KeyPtr& key : KeysAlive()) key->TellUnsent();
  link_->CloseStore(store_);
}

// Also those that are not initialised wholly, and the removed ones that have calls.
std::vector<KeyPtr> DistKVStore::KeysAlive() const {
  std::vector<KeyPtr> keys;
  MutexLock lock(mutex_);
  for (const auto& [name, key] : keys_) keys.push_back(key);
  for (const auto& [id, key] : unfinished_) keys.push_back(key);
  for (const auto& removed : removed_) {
    if (KeyPtr key = removed.lock()) keys.push_back(std::move(key));
  }
  return keys;
}

void DistKVStore::CheckUnsent(Time now, Time warn_after, UnsentFound* found) {
  std::vector<std::weak_ptr<DistKey>> removed;
  {
    MutexLock lock(mutex_);
    for (const auto& [name, key] : keys_) key->CheckUnsent(now, warn_after, found);
    std::erase_if(removed_, [](const auto& key) { return key.expired(); });
    removed = removed_;
  }
  for (const auto& each : removed) {
    if (const KeyPtr key = each.lock()) key->CheckUnsent(now, warn_after, found);
  }
}

Request DistKVStore::ControlRequest(std::string_view what, Kind kind, std::int32_t server) const {
  Request request;
  request.kind = kind;
  request.server = server;
  request.part = ControlPart(store_);
  request.what = std::string(what);
  return request;
}

std::vector<Request> DistKVStore::ControlRequests(std::string_view what, Kind kind,
                                                  const std::string& meta,
                                                  std::uint64_t version) const {
  std::vector<Request> requests;
  for (std::int32_t server = 0; server < link_->placement().num_servers; ++server) {
    Request& request = requests.emplace_back(ControlRequest(what, kind, server));
    request.version = version;
    request.meta = meta;
  }
  return requests;
}

std::vector<Message> DistKVStore::CallServers(std::string_view what, Kind kind,
                                              const std::string& meta) const {
  return CallAndWait(engine(), *link_, ControlRequests(what, kind, meta, /*version=*/0));
}

// For what only one of several workers may get through: server 0 decides whose call came first, and
// what it refuses no other server hears of.
void DistKVStore::CallServersInTurn(std::string_view what, Kind kind, const std::string& meta,
                                    std::uint64_t version) const {
  std::vector<Request> others = ControlRequests(what, kind, meta, version);
  CallAndWait(engine(), *link_, {others.front()});
  others.erase(others.begin());
  if (!others.empty()) CallAndWait(engine(), *link_, others);
}

void DistKVStore::Barrier() { BarrierAndWait(engine(), *link_); }

void DistKVStore::SendCommandToServers(int head, std::string_view body) {
  if (head == kTraceCommand) {
    throw InvalidArgument(
        fmt::format("command {}: expected a number above it, which is heddle's own", head));
  }
  CallServers(fmt::format("command {}", head), Kind::kCommand,
              Encode(CommandBody{head, std::string(body)}));
}

void DistKVStore::TraceServers(const std::string& file) {
  CallServers("trace of the servers", Kind::kCommand, Encode(CommandBody{kTraceCommand, file}));
}

void TraceServers(KVStore& store, const std::string& file) {
  auto* const dist = dynamic_cast<DistKVStore*>(&store);
  if (dist == nullptr) {
    throw InvalidArgument(fmt::format(
        "trace of the servers: expected a dist store, got one of type {}", store.type()));
  }
  dist->TraceServers(file);
}

CallOptions DistKVStore::OptionsOf(Kind kind, const DistKey& key, int priority) const {
  CallOptions options;
  options.kind = kind;
  options.priority = priority;
  options.dtype = key.dtype();
  if (key.is_row_sparse()) options.flags |= kFlagRowSparse;
  options.deadline = link_->deadline();
  return options;
}

std::unique_ptr<KVStore> MakeDistStore(Engine& engine, const std::string& type,
                                       std::shared_ptr<WorkerLink> link, std::uint32_t store,
                                       GpuSums gpu_sums) {
  return std::make_unique<DistKVStore>(engine, type, std::move(link), store, gpu_sums);
}

}  // namespace heddle::kvstore::dist
