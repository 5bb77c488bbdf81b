// What a server does with values, as its state machine tells it to: the machine decides what
// happens, in which order, once; a PartStore has the bytes. The server of a job keeps arrays and
// runs kernels (kvstore/dist/server/), tests of the protocol keep vectors of integers.
#pragma once

#include <heddle/dtype.h>
#include <heddle/key.h>
#include <heddle/shape.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/protocol/message.h"

namespace heddle::kvstore::dist {

// What all requests about a part agree on; sent with kInit.
struct PartInfo {
  Key key;
  Shape shape;  // of the whole array
  DType dtype = DType::kFloat32;
  bool row_sparse = false;
  std::uint32_t num_parts = 1;
  // Where the part lies in the whole: elements of a dense array, rows of a row-sparse one.
  std::int64_t begin = 0;
  std::int64_t end = 0;

  friend bool operator==(const PartInfo&, const PartInfo&) = default;
};

// What the sender's optimizer gives for one update of a key.
struct UpdateRates {
  double learning_rate = 0;
  double weight_decay = 0;
};

// Which optimizer of a store a version is of, from 1 on; the version's low half counts the changes
// of its parameters.
constexpr std::uint64_t GenerationOf(std::uint64_t version) { return version >> 32; }

// How a part is updated: `version` 0 is the default updater, ASSIGN.
struct UpdateBy {
  std::uint64_t version = 0;           // of the optimizer and its parameters
  std::optional<UpdateRates> rates{};  // nobody has sent any: those of the optimizer itself
};

// The array that a part is of: how many of its parts are on this server, and which other servers
// have some, in order.
struct WholeArray {
  std::size_t parts_here = 0;
  std::vector<std::int32_t> others{};
};
// What the passes of the other servers have summed, by server.
using OthersSums = std::map<std::int32_t, Payload>;
// How a pass over the parts that are here has ended.
struct PassResult {
  std::exception_ptr error{};
  Payload sums{};     // what the other servers need of it; of the last pass nothing
  bool last = false;  // the parts are updated
};

// Calls come one at a time, from the node that runs the machine. Parts are those made by Create.
// Unless said, a call returns when all is done.
class PartStore {
 public:
  virtual ~PartStore() = default;

  // A part with its first value.
  virtual void Create(const PartId& id, const PartInfo& info, const Payload& value) = 0;
  // Forgets a part; no call about it comes any more. Not between a call that has returned false and
  // its end.
  virtual void Remove(const PartId& id) = 0;
  // The next calls are about this part, if it is here; only for speed.
  virtual void Expect(const PartId& /*id*/) const {}
  // Overwrites the value and forgets the optimizer's state of the part. A sum that has begun stays:
  // it is of the next round.
  virtual void Reset(const PartId& id, const Payload& value) = 0;
  // Throws if `message`, a push, pull or reset of the part, cannot work: InvalidArgument for a
  // wrong size, dtype or kind, and row ids that are out of range or not sorted; or std::bad_alloc.
  virtual void Check(const PartId& id, const Message& message) = 0;

  // Adds a push to the sum of the part; `first` begins a new sum. Calls of one sum come in the
  // order in which the contributions are to be added. Keeps message.payload as long as it needs.
  virtual void Add(const PartId& id, const Message& push, bool first) = 0;
  // Forgets the sum, if one has begun.
  virtual void DropSum(const PartId& id) = 0;
  // Hands the sum to the updater. False: the update goes on elsewhere, and its end will be told to
  // the machine by OnUpdated; until then no Add, Update, Read or Reset of the part is called.
  virtual bool Update(const PartId& id, const UpdateBy& by, std::exception_ptr* error) = 0;
  // Whether an update by that version needs sums over the whole array, so that RunPass updates all
  // of its parts together, in place of Update. The same for all parts of an array.
  virtual bool UpdatesWhole(const PartId& id, std::uint64_t version) = 0;
  virtual WholeArray WholeOf(const PartId& id) = 0;
  // A pass over all parts of an array that are here, whose sums are complete; pass 0 comes first,
  // and then the next ones until one is the last. `sums`: what the pass before has summed on the
  // others. False: as Update, and the end will be told by OnPassed, with the first of `parts`.
  virtual bool RunPass(std::span<const PartId> parts, const UpdateBy& by, int pass, OthersSums sums,
                       PassResult* result) = 0;
  // No further pass will come over the array of that part: the update under way is given up.
  virtual void DropPasses(const PartId& id) = 0;
  // The value, or the rows of `pull`, as `pull` wants them (cast to pull.dtype). It stays as it is
  // now, whatever happens to the part later.
  virtual Payload Read(const PartId& id, const Message& pull) = 0;
};

}  // namespace heddle::kvstore::dist
