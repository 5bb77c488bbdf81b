// The values of a server: a PartStore with arrays, the kernels of ops/ and the optimizers of
// kvstore/optimizer/.
//
// Memory. A pushed payload is used where it lies: the only contribution of a round by the default
// updater becomes the value, and what a pull reads is sent from the value. So a value that is being
// sent is never written: an update that finds it lent goes on with a copy.
// Sums. float32, float64 and integers are added as they come; float16 and bfloat16 wait until all
// are there, since they are added in float32 and rounded once; codes are decoded as they come, and
// added in float32. The bits are those of a local store that sums the same list.
// Norms. An optimizer that needs the norm of a whole array updates all parts of it together, pass
// by pass (RunPass); the block sums, also those of other servers, are added in the order of the
// array, so the bits are those of an uncut one. A key of a dist_async store that is cut is refused:
// its parts may take pushes in different orders.
// Threads. Calls come one at a time, under the node's lock. An update that is not short
// (kInlineBytes, kInlineTime) is an op of the engine, which alone touches its part until it has
// told `updated`.
#pragma once

#include <heddle/dist.h>
#include <heddle/engine.h>
#include <heddle/ndarray.h>
#include <heddle/optimizer.h>
#include <heddle/row_sparse.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvstore/compression/compressor.h"
#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/protocol/message.h"
#include "kvstore/dist/protocol/part_store.h"
#include "kvstore/dist/protocol/part_table.h"
#include "kvstore/dist/protocol/placement.h"
#include "kvstore/dist/server/update_pace.h"
#include "kvstore/key_table.h"

namespace heddle::kvstore::dist {

class ArrayParts final : public PartStore {
 public:
  // Called by a worker of the engine, without any lock, when an update that went on there has
  // ended.
  using Updated = std::function<void(const PartId& id, std::exception_ptr error)>;
  using Passed = std::function<void(const PartId& id, PassResult result)>;  // likewise, of passes

  // An update is done on the receiving thread if the part has at most so many bytes, or if it takes
  // at most so long, going by those before it: less than to receive and add up what it is of. To
  // wake another thread, and to bring the part into its cache, costs more.
  static constexpr std::int64_t kInlineBytes = 64 << 10;
  static constexpr std::chrono::microseconds kInlineTime{200};
  // A store keeps so many changes of the parameters of its optimizers. A push that is of an earlier
  // one is updated by the first that is left.
  static constexpr std::size_t kParametersMax = 4096;

  ArrayParts(Engine& engine, Updated updated, Passed passed)
      : engine_(engine), updated_(std::move(updated)), passed_(std::move(passed)) {}

  void Create(const PartId& id, const PartInfo& info, const Payload& value) override;
  void Remove(const PartId& id) override;
  void Expect(const PartId& id) const override { dist::Expect(parts_, id); }
  void Reset(const PartId& id, const Payload& value) override;
  void Check(const PartId& id, const Message& message) override;
  void Add(const PartId& id, const Message& push, bool first) override;
  void DropSum(const PartId& id) override;
  bool Update(const PartId& id, const UpdateBy& by, std::exception_ptr* error) override;
  bool UpdatesWhole(const PartId& id, std::uint64_t version) override;
  WholeArray WholeOf(const PartId& id) override;
  bool RunPass(std::span<const PartId> parts, const UpdateBy& by, int pass, OthersSums sums,
               PassResult* result) override;
  void DropPasses(const PartId& id) override { wholes_.erase({id.store, id.key}); }
  Payload Read(const PartId& id, const Message& pull) override;

  // How keys are cut; `self`: this server. From then on parts that lie elsewhere are refused.
  void SetPlacement(const PlacementOptions& placement, std::int32_t self) {
    placement_ = placement;
    self_ = self;
  }
  // Which stores are asynchronous.
  void SetAsync(std::uint32_t store) { stores_[store].async = true; }
  // How pushes of that version and later ones update the parts of a store. Parts keep their state
  // where `keeps_states`: the optimizer is the one before with other parameters. `updater`: what
  // updates in its place.
  void SetOptimizer(std::uint32_t store, std::uint64_t version, const OptimizerPtr& optimizer,
                    bool keeps_states, ServerUpdater updater = {});
  // Pushes go by the optimizer before again; what the one of `version` has left is nobody's states.
  void DropOptimizer(std::uint32_t store, std::uint64_t version);
  // Null: there is none.
  void SetCompression(std::uint32_t store, std::shared_ptr<const Compressor> compressor);

  // The optimizer's states of the parts of a store behind `after`, as many as fit a message; none:
  // there are no more. No update of them goes on. InvalidState for an updater that does not save.
  std::pair<StatesBody, Payload> SaveStates(std::uint32_t store,
                                            const std::optional<PartId>& after) const;
  // Takes those that `states` names. InvalidArgument, changing nothing, if they do not fit; what an
  // updater of the server's own throws, after some keys of its own perhaps.
  void LoadStates(std::uint32_t store, const StatesBody& states, const Payload& arrays);

  // An op that writes this one has all states to itself: updates that are ops read it. It must not
  // fail.
  const Var& states() const { return states_; }

 private:
  struct Value;
  struct Part;
  struct Rule {
    OptimizerPtr optimizer;
    std::shared_ptr<const internal::UpdatePlan> plan;
    std::uint64_t generation = 0;  // of states
    bool needs_norms = false;      // of the whole array
    std::shared_ptr<UpdatePace> pace;
    ServerUpdater updater{};  // in place of the plan's rule
  };
  struct Store {
    std::map<std::uint64_t, Rule> rules;  // by version
    std::size_t parameters = 0;           // rules that are changed parameters of an optimizer
    std::uint64_t dropped = 0;            // the last version of such a one that is gone
    std::shared_ptr<const Compressor> compressor;
    bool async = false;
  };
  // One that is cut into parts.
  struct CutArray {
    PartInfo info{};                 // as the first part has it
    std::vector<PlacedPart> here{};  // those that this server is to have
    std::size_t parts = 0;           // those that it has
  };
  struct Begun;  // an update that has its gradient
  struct Whole;  // an update of all parts of an array

  Part& Find(const PartId& id) { return *FindShared(id); }
  const std::shared_ptr<Part>& FindShared(const PartId& id);
  void Check(const Part& part, const Message& message) const;
  void CheckPlace(const PartId& id, const PartInfo& info);
  const Compressor& CompressorOf(const Part& part) const;  // InvalidArgument: there is none
  const Rule* RuleOf(std::uint32_t store, std::uint64_t version) const;
  const Rule* LatestRuleOf(std::uint32_t store) const;  // null: there is none
  // Queues it: of what an updater of the server's own keeps of the part's key, of whose lives it
  // does not know.
  void ForgetState(const Part& part) const;
  const ServerUpdater* UpdaterThatForgets(const Part& part) const;  // null: there is none
  // Whether the key of a part that is counted has parts of an earlier or later life, too.
  bool HasOtherLife(const Part& part) const;
  void Count(const Part& part);
  void Uncount(const Part& part);
  void Assign(Part& part);
  static bool IsFast(const Part& part, const Rule& rule);
  // Those of `by`; if it has none, what the optimizer says by itself.
  static UpdateRates RatesOf(const Part& part, const Rule& rule, const UpdateBy& by);
  void Apply(Part& part, const Rule& rule, const UpdateRates& rates) const;
  void ApplyUpdater(Part& part, const Rule& rule, const UpdateRates& rates) const;
  Begun Begin(Part& part, const Rule& rule, const UpdateRates& rates) const;
  std::vector<PlacedPart> PlaceOf(const Part& part) const;
  void BeginWhole(Whole& whole) const;
  void TakeSums(Whole& whole, int pass, const OthersSums& sums) const;
  PassResult PassOver(Whole& whole, int pass, const OthersSums& sums) const;

  Engine& engine_;
  const Var states_ = engine_.NewVar("dist.states");
  const Updated updated_;
  const Passed passed_;
  PartTable<std::shared_ptr<Part>> parts_;
  const std::shared_ptr<Part>* found_ = nullptr;  // last, among parts_: calls come in groups
  std::unordered_map<std::uint32_t, Store> stores_;
  // Of states. A version may be another optimizer's again, see DropOptimizer.
  std::uint64_t generations_ = 0;
  // Those under way, by store and key.
  std::map<std::pair<std::uint32_t, std::uint64_t>, std::shared_ptr<Whole>> wholes_;
  PlacementOptions placement_;
  std::optional<std::int32_t> self_;
  std::map<std::pair<std::uint32_t, std::uint64_t>, CutArray> cut_arrays_;  // by store and key
  // How many parts are here of each life of a key: by store, name, and PartId's key.
  std::unordered_map<std::uint32_t, KeyTable<std::map<std::uint64_t, std::size_t>>> lives_;
};

}  // namespace heddle::kvstore::dist
