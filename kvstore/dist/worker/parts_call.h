// One call of the program on one key: its requests to the parts, and their answers.
#pragma once

#include <heddle/completion.h>
#include <heddle/engine.h>
#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <boost/container/small_vector.hpp>

#include "base/mutex.h"
#include "engine/block_pool.h"
#include "kvstore/compression/compressor.h"
#include "kvstore/dist/worker/dist_key.h"
#include "kvstore/dist/worker/staged_parts.h"
#include "kvstore/dist/worker/worker_link.h"

namespace heddle::kvstore::dist {

// How many calls of a store are alive.
class CallCount {
 public:
  class Ticket {
   public:
    explicit Ticket(std::shared_ptr<CallCount> count) : count_(std::move(count)) {
      count_->alive_.fetch_add(1, std::memory_order_relaxed);
    }
    Ticket(const Ticket&) = delete;
    Ticket& operator=(const Ticket&) = delete;
    ~Ticket() {
      // seq_cst: who sees none sees what all calls have done; and either this sees that somebody
      // waits, or that one that none is alive
      if (count_->alive_.fetch_sub(1, std::memory_order_seq_cst) > 1 ||
          count_->waiters_.load(std::memory_order_seq_cst) == 0) {
        return;
      }
      MutexLock lock(count_->mutex_);
      count_->none_.NotifyAll();
    }

   private:
    const std::shared_ptr<CallCount> count_;
  };

  // Whether there was a moment without calls before `until`.
  bool WaitUntilNone(std::chrono::steady_clock::time_point until) EXCLUDES(mutex_) {
    waiters_.fetch_add(1, std::memory_order_seq_cst);  // see ~Ticket
    bool none = false;
    {
      MutexLock lock(mutex_);
      bool in_time = true;
      while (!(none = alive() == 0) && in_time) in_time = none_.WaitUntil(mutex_, until);
    }
    waiters_.fetch_sub(1, std::memory_order_relaxed);
    return none;
  }

 private:
  std::int64_t alive() const { return alive_.load(std::memory_order_seq_cst); }  // see ~Ticket

  std::atomic<std::int64_t> alive_{0};
  std::atomic<int> waiters_{0};
  Mutex mutex_;
  CondVar none_;
};

// As people know calls.
const char* NameOf(Kind kind);

// Why the running op, which runs in any case, has no value to send; nothing if it has.
std::optional<ErrorBody> FailureOfInput(Engine& engine, const Var& var);

// What the requests of a call have in common.
struct CallOptions {
  Kind kind{};
  std::int32_t priority = 0;
  std::uint8_t flags = 0;
  std::uint64_t version = 0;
  std::optional<UpdateRates> rates;
  DType dtype = DType::kFloat32;  // as Message::dtype
  Time deadline{0};
};

using PartNumbers = std::set<std::uint32_t>;

// Life: Start or Cancel once, by a CallStarter, and DistKey::Enter, before or after that (see
// PushOpOf); then the answers; when the last one is there, the completion is called. The queue of
// the key holds the call until it has sent its requests, and the call holds itself until its last
// answer.
class PartsCall : public std::enable_shared_from_this<PartsCall> {
 public:
  PartsCall(const std::shared_ptr<CallCount>& count, std::shared_ptr<DistKey> key,
            const CallOptions& options);
  static std::shared_ptr<PartsCall> Make(const std::shared_ptr<CallCount>& count,
                                         std::shared_ptr<DistKey> key, const CallOptions& options) {
    return std::allocate_shared<PartsCall>(engine::BlockAllocator<PartsCall>(), count,
                                           std::move(key), options);
  }

  DistKey& key() { return *key_; }
  const CallOptions& options() const { return options_; }
  std::span<Request> requests() { return {requests_.data(), requests_.size()}; }

  // Of the calls that make an Init whole which has failed: a reset of what there is, which notes in
  // `missing` the parts that are not there, and an init of these. Before its requests are there.
  void MakeWhole(std::shared_ptr<PartNumbers> missing) { missing_parts_ = std::move(missing); }

  // A round that fails by its input is none of the call's concern. Before its requests are there.
  void PassOverFailedInputs() { passes_over_failed_inputs_ = true; }

  // What the requests to the parts have with them; one of these is called, before Start. The arrays
  // are those that the running op may read.
  void SendNothing();
  void SendNothingToTheFirst();             // part; to no others
  void SendElements(const NDArray& array);  // dense, of the key's shape
  void SendCodes(const NDArray& codes, const Compressor& compressor);
  void SendRows(const RowSparseNDArray& array);  // to each part the windows of its rows
  void SendRowIds(std::vector<std::int64_t> sorted_ids);
  void SendFailure(const ErrorBody& error);  // instead of a value
  // Or each part has its value, dense elements, later, by Supply: once each, from any thread.
  // Called before any op of the call is pushed.
  void AwaitElements();
  void Supply(std::size_t part, PushValue&& value);
  // Where values are received: the elements of `out`, of options().dtype and the key's shape.
  void ReceiveElements(const NDArray& out);
  // The same of a call that sends a value, too. If there is no memory for `out` the value goes all
  // the same, since the other workers count on it, and the call fails with that error at its end.
  void ReceiveElementsOrFail(const NDArray& out);
  // These hear of each part of it, and of the end. Before any op of the call is pushed.
  void TellArrivals(std::shared_ptr<PartArrivals> arrivals) { arrivals_ = std::move(arrivals); }
  // Or `out` gets all rows that come. After the requests are there.
  void ReceiveRows(const RowSparseNDArray& out) {
    rows_out_ = out;
    rows_.resize(slots_.size());
  }

  // From the op's body: requests may go as soon as the key's order allows. `done` is called when
  // all is answered, or with the error of the first part that has one.
  void Start(Completion done);
  // Nothing will be sent. Nothing happens after Start.
  void Cancel();

 private:
  friend class DistKey;

  class Slot final : public AnswerSink {
   public:
    void OnAnswer(Answer&& answer) override { call->OnAnswer(*this, std::move(answer)); }
    std::shared_ptr<Landing> LandingFor(const Message& header, std::uint64_t bytes) override;

    PartsCall* call = nullptr;
    const PlacedPart* part = nullptr;
    std::shared_ptr<Landing> landing;  // guarded by the node's lock until the answer
  };

  bool Concerns(const PlacedPart& part) const {
    return missing_parts_ == nullptr || options_.kind == Kind::kReset ||
           missing_parts_->contains(part.part);
  }
  Request& AddRequest(const PlacedPart& part);
  void OnAnswer(Slot& slot, Answer&& answer);
  std::size_t IndexOf(const Slot& slot) const {
    return static_cast<std::size_t>(&slot - slots_.data());
  }
  void Finish();
  // Of the last answer: no other thread touches it any more.
  std::exception_ptr TakeError() NO_THREAD_SAFETY_ANALYSIS;
  void AssembleRows();
  std::span<std::byte> DestinationOf(const PlacedPart& part) const;

  const CallCount::Ticket alive_;  // goes last
  const std::shared_ptr<DistKey> key_;
  const CallOptions options_;
  // Most keys have one part.
  boost::container::small_vector<Request, 1> requests_;
  boost::container::small_vector<Slot, 1> slots_;  // one for each request; they do not move
  NDArray out_;
  std::byte* out_data_ = nullptr;
  std::shared_ptr<PartArrivals> arrivals_;
  std::shared_ptr<PartNumbers> missing_parts_;  // of a reset: written under mutex_
  bool passes_over_failed_inputs_ = false;
  RowSparseNDArray rows_out_;
  std::vector<Payload> rows_;                          // received, by slot
  std::vector<std::span<const std::int64_t>> wanted_;  // rows, by slot; if some were asked for
  std::shared_ptr<const std::vector<std::int64_t>> wanted_owner_;
  std::optional<Completion> done_;
  bool started_ = false;
  // Guarded by the key's lock.
  bool entered_ = false;  // the queue, or was dropped before that
  bool ready_ = false;
  bool in_batch_ = false;         // B1
  bool submitted_ = false;        // of a call that awaits values
  bool given_up_ = false;         // it has been answered, see DistKey::CheckUnsent
  bool counted_for_all_ = false;  // parts, see DistKey::TellUnsent
  Time ready_since_{0};           // while calls before it are not: the first look that found it so
  Time warned_{0};                // the last time, or ready_since_
  std::uint64_t op_ticket_ = 0;
  PushGate::Entry not_submitted_;      // of a push
  std::shared_ptr<PartsCall> behind_;  // in the key's queue
  std::shared_ptr<PartsCall> self_;    // while answers are missing
  std::atomic<std::size_t> missing_{0};
  Mutex mutex_;
  std::exception_ptr error_ GUARDED_BY(mutex_);
  std::uint32_t error_part_ GUARDED_BY(mutex_) = 0;
  std::size_t failed_ GUARDED_BY(mutex_) = 0;  // answers
};

// In the body of a call's op, which starts the call. If the op never runs, it cancels the call.
class CallStarter {
 public:
  explicit CallStarter(std::shared_ptr<PartsCall> call) : call_(std::move(call)) {}
  CallStarter(CallStarter&&) = default;
  CallStarter& operator=(CallStarter&&) = delete;
  ~CallStarter() {
    if (call_ != nullptr) call_->Cancel();
  }
  PartsCall& operator*() const { return *call_; }
  PartsCall* operator->() const { return call_.get(); }

 private:
  std::shared_ptr<PartsCall> call_;
};

// Pushes the op of `call`, which gives it its requests by prepare(PartsCall&) and starts it, and
// lets it enter the queue of its key.
template <class Prepare>
void PushOpOf(const std::shared_ptr<PartsCall>& call, Engine& engine, OpOptions options,
              Prepare prepare) {
  options.lane = Lane::kComm;
  options.start_inline = true;
  CallStarter starter(call);
  const std::uint64_t ticket = engine.PushAsync(
      options,
      [starter = std::move(starter), prepare = std::move(prepare)](Completion done) mutable {
        prepare(*starter);
        starter->Start(std::move(done));
      });
  call->key().Enter(*call, ticket);
}

}  // namespace heddle::kvstore::dist
