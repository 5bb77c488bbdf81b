#include "kvstore/dist/worker/dist_kvstore.h"

#include <chrono>
#include <exception>
#include <utility>

#include <fmt/format.h>

#include "base/log.h"
#include "engine/fork.h"
#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/worker/control_call.h"

namespace heddle::kvstore::dist {

DistKVStore::DistKVStore(Engine& engine, std::string type, std::shared_ptr<WorkerLink> link,
                         std::uint32_t store, GpuSums gpu_sums)
    : KVStore(engine),
      link_(std::move(link)),
      store_(store),
      async_(type.find("async") != std::string::npos),
      sums_on_gpus_(type.find("device") != std::string::npos),
      sums_along_links_(gpu_sums != GpuSums::kDirect),
      removing_(engine.NewVar("dist.removing")) {
  link_->Serve(engine);
  try {
    CallServersInTurn("opening the store", Kind::kOpenStore,
                      Encode(OpenStoreBody{std::move(type)}));
  } catch (...) {
    link_->Leave(engine);
    throw;
  }
}

// What is under way completes first: nothing of the store outlives it, so that its place in the job
// can be given up right after.
DistKVStore::~DistKVStore() {
  if (engine::InForkedChild()) {
    // The job is the parent's: the link, by whose end a worker leaves, must not end here.
    [[maybe_unused]] const auto* const kept = new std::shared_ptr<WorkerLink>(link_);
    return;
  }
  while (!calls_->WaitUntilNone(std::chrono::steady_clock::now() + std::chrono::milliseconds(50))) {
    // Other engines run ops only inside waits.
    if (engine().options().type == "threaded") continue;
    try {
      engine().WaitForAll();
    } catch (const std::exception& error) {
      Log(LogLevel::kWarning, "a dist store was dropped while an op failed: {}", error.what());
    }
  }
  link_->Leave(engine());
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
  CallServers(fmt::format("command {}", head), Kind::kCommand,
              Encode(CommandBody{head, std::string(body)}));
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
