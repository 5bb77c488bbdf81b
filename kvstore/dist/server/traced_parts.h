// Records in a trace what a server does with its parts.
#pragma once

#include <cstdint>
#include <exception>
#include <unordered_map>

#include "engine/trace_source.h"
#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/protocol/part_store.h"
#include "kvstore/dist/trace_records.h"

namespace heddle::kvstore::dist {

// Stands before the parts themselves, and costs next to nothing while no trace is recorded. Calls
// as those of a PartStore.
class TracedParts final : public PartStore {
 public:
  TracedParts(PartStore& parts, engine::TraceSource trace)
      : parts_(parts), trace_(std::move(trace)) {}

  void Create(const PartId& id, const PartInfo& info, const Payload& value) override;
  void Expect(const PartId& id) const override { parts_.Expect(id); }
  void Remove(const PartId& id) override { parts_.Remove(id); }
  void Reset(const PartId& id, const Payload& value) override;
  void Check(const PartId& id, const Message& message) override { parts_.Check(id, message); }
  void Add(const PartId& id, const Message& push, bool first) override;
  void DropSum(const PartId& id) override;
  bool Update(const PartId& id, const UpdateBy& by, std::exception_ptr* error) override;
  bool UpdatesWhole(const PartId& id, std::uint64_t version) override {
    return parts_.UpdatesWhole(id, version);
  }
  WholeArray WholeOf(const PartId& id) override { return parts_.WholeOf(id); }
  bool RunPass(std::span<const PartId> parts, const UpdateBy& by, int pass, OthersSums sums,
               PassResult* result) override;
  void DropPasses(const PartId& id) override { parts_.DropPasses(id); }
  Payload Read(const PartId& id, const Message& pull) override;

  // The end of an update or a pass for which Update or RunPass returned false; a pass is recorded
  // as an update of its first part.
  void OnUpdated(const PartId& id);

 private:
  std::uint64_t Started() const;  // now; 0 while no trace is recorded
  void Record(TraceAction action, const PartId& id, std::uint64_t started_ns,
              const Message* request = nullptr) const;

  PartStore& parts_;
  const engine::TraceSource trace_;
  std::unordered_map<PartId, std::uint64_t, PartIdHash> updating_;  // since when
};

}  // namespace heddle::kvstore::dist
