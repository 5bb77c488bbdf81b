#include "kvstore/dist/server/server_control.h"

#include <heddle/error.h>

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/job_file.h"
#include "engine/access_check.h"
#include "kvstore/compression/compressor.h"
#include "kvstore/optimizer/foreign.h"

namespace heddle::kvstore::dist {

namespace {

// Not `updater`'s: the library has the formula.
OptimizerPtr Make(const OptimizerBody& body, const ServerUpdater& updater) {
  if (updater.update) return MakeForeignOptimizer(body.name, body.parameters);
  std::vector<std::pair<std::string_view, double>> parameters;
  for (const auto& [name, value] : body.parameters) parameters.emplace_back(name, value);
  return MakeOptimizer(body.name, parameters);
}

}  // namespace

ArrayControl::ArrayControl(Engine& engine, ArrayParts& parts, ServerProgram program,
                           UnderLock under_lock, Ended ended)
    : engine_(engine),
      parts_(parts),
      program_(std::move(program)),
      under_lock_(std::move(under_lock)),
      ended_(std::move(ended)),
      commands_(engine.NewVar("dist.commands")) {}

void ArrayControl::OpenStore(std::uint32_t store, const std::string& type) {
  for (const std::string_view known :
       {"dist_sync", "dist_async", "dist_device_sync", "dist_device_async"}) {
    if (type != known) continue;
    if (type.find("async") != std::string::npos) parts_.SetAsync(store);
    return;
  }
  throw InvalidArgument(fmt::format("a server has no stores of type '{}'", type));
}

void ArrayControl::SetOptimizer(std::uint32_t store, std::uint64_t version,
                                const OptimizerBody& optimizer) {
  std::map<std::uint64_t, Set>& of_store = optimizers_[store];
  const Set* const before = of_store.empty() ? nullptr : &of_store.rbegin()->second;
  const bool same = before != nullptr && before->optimizer.name == optimizer.name &&
                    before->optimizer.parameters == optimizer.parameters;
  ServerUpdater updater = same ? before->updater : ServerUpdater();
  if (!same && IsForeignOptimizer(optimizer.name)) {
    if (!program_.optimizers) {
      throw InvalidState(fmt::format(
          "set_optimizer: {} is none of heddle's optimizers: expected one of them, or servers that "
          "have it (heddle server --module NAME)",
          optimizer.name));
    }
    updater = program_.optimizers(optimizer.name);
  }
  parts_.SetOptimizer(store, version, Make(optimizer, updater), same, updater);
  of_store.insert_or_assign(GenerationOf(version), Set{optimizer, std::move(updater)});
}

void ArrayControl::DropOptimizer(std::uint32_t store, std::uint64_t version) {
  parts_.DropOptimizer(store, version);
  optimizers_[store].erase(GenerationOf(version));
}

void ArrayControl::SetParameters(std::uint32_t store, std::uint64_t version,
                                 const OptimizerBody& optimizer) {
  // Another rank may have set the next one already.
  Set& set = optimizers_.at(store).at(GenerationOf(version));
  parts_.SetOptimizer(store, version, Make(optimizer, set.updater), /*keeps_states=*/true,
                      set.updater);
  set.optimizer = optimizer;
}

void ArrayControl::SetCompression(std::uint32_t store, const CompressionOptions& options) {
  parts_.SetCompression(store, MakeCompressor(options));
}

bool ArrayControl::Start(const ControlId& id, const Message& request, ControlResult* result) {
  if (request.kind != Kind::kCommand) {
    QueueStates(id, request);
    return false;
  }
  CommandBody command;
  if (!Decode(request.meta, &command)) {
    result->error = std::make_exception_ptr(InvalidArgument("a command that cannot be read"));
    return true;
  }
  if (command.head == kTraceCommand) {
    Trace(command.body);
    return true;
  }
  if (!program_.controller) {
    result->error = std::make_exception_ptr(InvalidState(
        fmt::format("unknown command {}: the server runs without a controller", command.head)));
    return true;
  }
  QueueCommand(id, command);
  return false;
}

void ArrayControl::Trace(const std::string& file) {
  if (file.empty()) {
    engine_.StopTrace();
  } else {
    engine_.StartTrace(JobFileName(file));
  }
}

void ArrayControl::QueueCommand(const ControlId& id, const CommandBody& command) {
  const NoWaitScope no_wait;
  engine_.Push({.name = "dist.command", .writes = {commands_}}, [this, id, command] {
    ControlResult result;
    try {
      program_.controller(command.head, command.body);
    } catch (...) {
      result.error = std::current_exception();
    }
    ended_(id, std::move(result));
  });
}

// Behind the updates under way, with the lock that new ones need.
void ArrayControl::QueueStates(const ControlId& id, const Message& request) {
  const NoWaitScope no_wait;
  engine_.Push({.name = "dist.states", .writes = {parts_.states()}}, [this, id, request] {
    const engine::UncheckedScope own;  // no update has the parts' arrays
    ControlResult result;
    under_lock_([&] {
      try {
        if (request.kind == Kind::kSaveStates) {
          std::optional<PartId> after;
          if (SaveStatesBody from; Decode(request.meta, &from)) after = from.after;
          auto [body, arrays] = parts_.SaveStates(id.store, after);
          result.meta = Encode(body);
          result.payload = std::move(arrays);
          return;
        }
        StatesBody states;
        if (!Decode(request.meta, &states)) {
          throw InvalidArgument("loading the optimizer's states: they cannot be read");
        }
        parts_.LoadStates(id.store, states, request.payload);
      } catch (...) {
        result.error = std::current_exception();
      }
    });
    ended_(id, std::move(result));
  });
}

}  // namespace heddle::kvstore::dist
