// What a server does for its workers besides arrays: optimizers, compression, commands, states.
#pragma once

#include <heddle/dist.h>
#include <heddle/engine.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <unordered_map>

#include "kvstore/dist/protocol/server.h"
#include "kvstore/dist/server/array_parts.h"

namespace heddle::kvstore::dist {

// Threads: as ServerControl, under the node's lock. Commands and states are ops of the engine; they
// end by `ended`, which takes that lock.
class ArrayControl final : public ServerControl {
 public:
  // Calls its argument under the node's lock.
  using UnderLock = std::function<void(const std::function<void()>&)>;
  using Ended = std::function<void(const ControlId& id, ControlResult result)>;

  ArrayControl(Engine& engine, ArrayParts& parts, ServerProgram program, UnderLock under_lock,
               Ended ended);

  void OpenStore(std::uint32_t store, const std::string& type) override;
  void SetOptimizer(std::uint32_t store, std::uint64_t version,
                    const OptimizerBody& optimizer) override;
  void DropOptimizer(std::uint32_t store, std::uint64_t version) override;
  void SetParameters(std::uint32_t store, std::uint64_t version,
                     const OptimizerBody& optimizer) override;
  void SetCompression(std::uint32_t store, const CompressionOptions& options) override;
  void DropCompression(std::uint32_t store) override { parts_.SetCompression(store, nullptr); }
  bool Start(const ControlId& id, const Message& request, ControlResult* result) override;

 private:
  struct Set {
    OptimizerBody optimizer;
    ServerUpdater updater;  // of one that is not heddle's
  };

  void QueueCommand(const ControlId& id, const CommandBody& command);
  void QueueStates(const ControlId& id, const Message& request);
  void Trace(const std::string& file);

  Engine& engine_;
  ArrayParts& parts_;
  const ServerProgram program_;
  const UnderLock under_lock_;
  const Ended ended_;
  const Var commands_;  // keeps them in order
  // By store and generation.
  std::unordered_map<std::uint32_t, std::map<std::uint64_t, Set>> optimizers_;
};

}  // namespace heddle::kvstore::dist
