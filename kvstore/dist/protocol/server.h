// The server's half of the data plane, as a state machine: no thread, clock or socket inside.
//
// It decides which request takes effect, once, in which order, and what is answered; the bytes are
// a PartStore's. Every part has rounds of its own (dist_sync) or takes pushes as they come
// (dist_async); which of the two a store is, says the kOpenStore that every worker sends.
//
// Invariants, of each part:
//   (S1) A rank's requests take effect in the order of their sequence numbers, each once; what
//   comes
//        early is held (at most kRequestsAheadMax), what comes again is answered again.
//   (S2) dist_sync: round r is complete when every rank that has not left, or left after its push
//        r, has contributed push r; contributions are added in the order of the ranks. A rank
//        that leaves may name pushes that do not come: they are contributions that failed, and
//        it has left after them.
//   (S3) dist_sync: a pull by a rank that has pushed r times is answered when round r is complete
//        and before anything of round r + 1 is added.
//   (S4) dist_sync: a rank has at most kPushesAheadMax pushes recorded beyond the last complete
//        round; as soon as it has so many beyond the round that it knows of, it is told the latest.
//   (S5) A push is acknowledged when it is recorded (dist_async: applied), never before.
//   (S6) Of the ranks that a round waits for, the lowest is let in, however many bytes are held.
//
//   (S7) Parts of an array whose update needs sums over all of it are updated together: a pass
//        begins when all parts that are here have the sum of the same round, and all other servers'
//        sums of the pass before are here; the first one, when they have said that their parts have
//        the sum of that round, so that a round that fails has changed nothing. Sums count for the
//        round and pass that they name. States are neither saved nor loaded between the passes of
//        an update, nor while the update of a part that the rank has not removed has failed.
//
//   (S8) A rank that has removed the part takes no part in later rounds, as if it had left. The
//        value goes when all have removed it that have not left, and the identities stay: what is
//        late or comes again finds its place taken. A key that is initialised anew is another part.
//   (S9) A rank that has closed a store takes no part in rounds of a part once it has made all the
//        requests about it that it has announced; their answers are what they would be otherwise.
//        The value goes when all ranks have closed the store, or removed the part, or left.
//
// Failure cases: a contribution that failed, or that does not fit the part, takes its place in the
// round; the round then ends without an update, every pull of it answers the error of the lowest
// such rank, and the value stands; the next good round cures. A failed update poisons the part
// until kReset. A request for a part that does not exist is an error and uses its sequence number.
// What a process other than the roster's sends is refused and changes nothing.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/protocol/limits.h"
#include "kvstore/dist/protocol/message.h"
#include "kvstore/dist/protocol/outputs.h"
#include "kvstore/dist/protocol/part_store.h"
#include "kvstore/dist/protocol/part_table.h"

namespace heddle::kvstore::dist {

struct ServerOptions {
  // What waits for so long is named in the log, again and again.
  Time warn_after = std::chrono::seconds(10);
  std::uint64_t unfinished_bytes_max = kUnfinishedBytesMax;  // the same on workers
  // Answers with values that are kept for each rank and part, to be given once more if the request
  // comes again; beyond them a repeated pull reads the value as it is by then. Where connections
  // are not restored, nothing comes again.
  std::size_t answers_kept = 0;
  // A rank is called slow when from the end of a round to its next push it takes slow_factor times
  // the median of all ranks, and slow_min more, slow_rounds times in a row, for slow_time. (Of
  // sixteen on two CPUs one or another is the last several times in a row.)
  double slow_factor = 2;
  Time slow_min = std::chrono::milliseconds(20);
  int slow_rounds = 5;
  Time slow_time = std::chrono::seconds(2);
};

// How a control request ended.
struct ControlResult {
  std::exception_ptr error;  // answered as kError
  std::string meta{};
  Payload payload{};
};

// Which control request: OnControlDone wants it back.
struct ControlId {
  std::uint32_t store = 0;
  std::int32_t rank = 0;
  std::uint64_t sequence = 0;
};

// What a server does besides arrays. Calls come one at a time, each request's once. What the first
// four throw is answered as an error, and then nothing has changed.
class ServerControl {
 public:
  virtual ~ServerControl() = default;
  virtual void OpenStore(std::uint32_t store, const std::string& type) = 0;
  // A new generation of the store's optimizer: `version` is generation << 32.
  virtual void SetOptimizer(std::uint32_t store, std::uint64_t version,
                            const OptimizerBody& optimizer) = 0;
  // New parameters of the generation version >> 32: pushes of `version` and later use them.
  virtual void SetParameters(std::uint32_t store, std::uint64_t version,
                             const OptimizerBody& optimizer) = 0;
  // Once a store; again only if it has thrown, or been dropped.
  virtual void SetCompression(std::uint32_t store, const CompressionOptions& options) = 0;
  // The last generation is taken back: it is as if it had not been set. Once a SetOptimizer.
  virtual void DropOptimizer(std::uint32_t store, std::uint64_t version) = 0;
  // Likewise; then another one may be set.
  virtual void DropCompression(std::uint32_t store) = 0;
  // kCommand, kSaveStates or kLoadStates. False: its end will be told by OnControlDone.
  virtual bool Start(const ControlId& id, const Message& request, ControlResult* result) = 0;
};

// Threads: one call at a time. `parts` and `control` are called from inside these calls only.
class ServerMachine {
 public:
  ServerMachine(ServerOptions options, PartStore& parts, ServerControl& control);
  virtual ~ServerMachine();
  ServerMachine(const ServerMachine&) = delete;
  ServerMachine& operator=(const ServerMachine&) = delete;

  // What comes before the roster is held until it is there.
  void OnRoster(Time now, const RosterBody& roster, Outputs& out);
  void OnMessage(Time now, NodeId from, Message&& message, Outputs& out);
  // Acknowledgements are gathered, to go in one message a worker. To be called when no more input
  // is at hand, before the node waits for some.
  void EndTurn(Outputs& out);
  // The end of an update for which PartStore::Update returned false.
  void OnUpdated(Time now, const PartId& part, const std::exception_ptr& error, Outputs& out);
  // The end of a pass for which PartStore::RunPass returned false.
  void OnPassed(Time now, const PartId& part, PassResult result, Outputs& out);
  // A link to another server stands. What is for that server waits until then.
  void OnLinked(std::int32_t server, Outputs& out);
  // The end of a request for which ServerControl::Start returned false.
  void OnControlDone(Time now, const ControlId& id, ControlResult result, Outputs& out);
  // The connection to `peer` is gone for good. A worker that has left may go; otherwise the
  // scheduler is told.
  void OnLost(Time now, NodeId peer, const std::string& address, const std::string& why,
              Outputs& out);
  // The next calls are about this part; only for speed.
  void Expect(const PartId& id) const {
    dist::Expect(parts_, id);
    values_.Expect(id);
  }
  void OnTime(Time now, Outputs& out);
  std::optional<Time> next_time() const;  // when OnTime wants to be called

  const std::optional<FailureBody>& failure() const { return failure_; }  // of the job
  // What waits, for people.
  // What the scheduler hears of this server; what is stalled as OnTime last saw it.
  StateBody State() const;
  std::string DescribeState(Time now) const;

 protected:
  enum class Admission : std::uint8_t {
    kTake,      // it is the next
    kEarly,     // others come before it
    kRepeated,  // it has taken effect already
    kStale,     // it is not from the process that the roster names
  };
  // What to do with a request, by its identity alone; `next` is the sequence number that the rank's
  // next request of the part has.
  virtual Admission Admit(const Message& message, Incarnation known, std::uint64_t next) const;
  // Of which round and pass another server's sums are.
  struct RoundPass {
    std::uint64_t round = 0;
    std::uint64_t pass = 0;
  };
  virtual RoundPass PassOf(const Message& sums) const {
    return {.round = sums.sequence, .pass = sums.version};
  }

 private:
  struct Contribution;
  struct RankExtra;
  struct RankState;
  struct Waiting;
  struct Part;
  struct Generation;
  struct Store;
  struct Worker;
  struct Peer;
  struct Whole;

  // Requests.
  void OnWorkerMessage(Time now, NodeId from, Message&& message, Outputs& out);
  void OnRequest(Time now, Message&& message, Outputs& out);
  bool Blocked(const Part& part, const Message& message) const;
  void Hold(Time now, Part& part, Message&& message, bool blocked);
  void Drain(Time now, Part& part, std::int32_t rank, Outputs& out);
  void DrainBlocked(Time now, Part& part, Outputs& out);
  void DrainStore(Time now, std::uint32_t store, Outputs& out);
  void Apply(Time now, Part& part, Message&& message, Outputs& out);
  void ApplyToPart(Time now, Part& part, Message&& message, Outputs& out);
  void ApplyInit(Time now, Part& part, const Message& message, Outputs& out);
  void ApplyRead(Time now, Part& part, Message&& message, Outputs& out);
  void ApplyReset(Part& part, const Message& message, Outputs& out);
  void ApplyRemove(Time now, Part& part, const Message& message, Outputs& out);
  void DropIfUnwanted(Part& part);
  bool HasLeftPart(const Part& part, std::int32_t rank) const;  // has left, or removed the part
  std::optional<std::uint64_t> RequestsInAll(const Part& part, std::int32_t rank) const;
  bool IsGone(const Part& part, std::int32_t rank) const;  // or closed the store, and asked for all
  void Describe(Part& part, const Message& message, Outputs& out);
  void Repeat(Part& part, const Message& message, Outputs& out);
  void OnStatus(Time now, NodeId from, const Message& message, Outputs& out);

  // Pushes.
  std::unique_ptr<ErrorBody> TakePush(Part& part, Message& message,
                                      std::optional<UpdateRates>* rates);
  void RecordPush(Time now, Part& part, Message&& message, Outputs& out);
  void PushAsync(Time now, Part& part, Message&& message, Outputs& out);
  void FinishAsync(Time now, Part& part, const std::exception_ptr& error, Outputs& out);
  void Advance(Time now, Part& part, Outputs& out);
  void AddContribution(Part& part, std::int32_t rank, Contribution&& contribution);
  bool AddMissing(Part& part, std::int32_t rank);
  static std::optional<UpdateRates> RatesOf(const Part& part, std::uint64_t version);
  bool Update(Part& part, const UpdateBy& by, std::exception_ptr* error);
  bool StartUpdate(Time now, Part& part, Outputs& out);
  void FinishRound(Time now, Part& part, Outputs& out);
  void AnswerWaiting(Part& part, Outputs& out);
  void AnswerRead(Part& part, const Message& message, Outputs& out);
  ErrorBody UpdateFailure(const Part& part) const;  // which has an update_error
  void NoteWaiting(Time now, Part& part);
  void NoteSlow(Time now, Part& part, Outputs& out);

  // Updates of whole arrays.
  Whole& WholeOf(const PartId& id);
  std::exception_ptr LearnWhole(const PartId& id);
  void JoinWhole(Time now, Part& part, Outputs& out);
  void SkipWhole(Time now, Part& part, Outputs& out);
  void ContinueWhole(Time now, Whole& whole, std::uint64_t round, Outputs& out);
  bool RunWholePass(Whole& whole, std::uint64_t round, PassResult* result);
  bool TakeWholePass(Time now, Whole& whole, std::uint64_t round, PassResult result, Outputs& out);
  void EndWhole(Time now, Whole& whole, std::uint64_t round, Outputs& out);
  void FailWhole(Whole& whole, std::uint64_t round, const ErrorBody& error, Outputs& out);
  void TellOthers(const Whole& whole, const Message& message, Outputs& out);
  void OnBlockSums(Time now, std::int32_t from, const Message& message, Outputs& out);
  std::string DescribeWhole(const Part& part) const;

  // Credit.
  void TellComplete(Part& part, std::int32_t rank, Outputs& out);
  void OnAsk(const Message& message, Outputs& out);
  bool EndAsks(Part& part, std::int32_t rank);
  void Grant(Part& part, std::int32_t rank, Outputs& out);
  void GrantUnderCap(std::int32_t rank, Outputs& out);
  void ReleaseBytes(Part& part, Outputs& out);

  // Control.
  void ApplyControl(Time now, Part& part, const Message& message, Outputs& out);
  void OpenStore(const Message& message);
  void SetOptimizer(const Message& message);
  void TakeBackOptimizer(const Message& message);
  void SetParameters(const Message& message);
  void SetCompression(const Message& message);
  void TakeBackCompression(const Message& message);
  void StartControl(Part& part, const Message& message, Outputs& out);
  bool PassesAreUnderWay(std::uint32_t store) const;
  std::exception_ptr WhyNoStates(std::uint32_t store, std::int32_t rank) const;
  void StartStates(Outputs& out);
  void EndControl(Part& part, const ControlId& id, ControlResult result, Outputs& out);
  std::string KeysOf(const Message& message) const;
  void Leave(Time now, const Message& message, Outputs& out);
  void Left(Time now, std::int32_t rank, Outputs& out);
  void CloseStore(const Message& message);
  void GoOnAfterClose(Time now, const Message& message, Outputs& out);
  void GoOnWithout(Time now, Part& part, std::int32_t rank, Outputs& out);

  // Answers.
  void Ack(const Message& message);
  static Message AnswerTo(const Message& request, Kind kind);
  void SendAnswer(Part& part, Message&& answer, Outputs& out);
  void SendDone(Part& part, const Message& request, Outputs& out);
  void SendError(Part& part, const Message& request, const ErrorBody& error, Outputs& out);

  Part& PartOf(const PartId& id);
  Worker& WorkerOf(std::int32_t rank);
  const Worker& WorkerOf(std::int32_t rank) const;
  const Store* FindStore(std::uint32_t store) const;
  Store& OpenedStore(std::uint32_t store);
  std::string NameOf(const Part& part) const;
  std::string DescribePart(Time now, const Part& part) const;
  std::string DescribeRanks(Time now, const Part& part, bool arrived) const;

  const ServerOptions options_;
  PartStore& values_;
  ServerControl& control_;
  PartTable<std::unique_ptr<Part>> parts_;
  std::unordered_map<std::uint32_t, std::unique_ptr<Store>> stores_;
  std::vector<Worker> workers_;                                      // empty before the roster
  std::int32_t self_ = -1;                                           // likewise not known
  std::map<std::int32_t, Peer> peers_;                               // other servers
  std::map<std::pair<std::uint32_t, std::uint64_t>, Whole> wholes_;  // by store and key
  std::vector<Message> states_requests_;  // that wait until no passes are under way
  std::vector<std::pair<NodeId, Message>> before_roster_;
  std::vector<std::int32_t> to_acknowledge_;  // ranks with acknowledgements gathered
  std::vector<Time> durations_;               // of one round, for NoteSlow
  Time next_check_{0};
  StateBody state_;  // but for what waits
  std::optional<FailureBody> failure_;
};

}  // namespace heddle::kvstore::dist
