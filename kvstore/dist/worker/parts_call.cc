#include "kvstore/dist/worker/parts_call.h"

#include <heddle/error.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "base/utf8.h"
#include "engine/access_check.h"
#include "engine/running_op.h"
#include "engine/trace_source.h"
#include "ops/copy.h"
#include "ops/row_ids.h"

namespace heddle::kvstore::dist {

const char* NameOf(Kind kind) {
  switch (kind) {
    case Kind::kInit:
      return "init";
    case Kind::kPush:
      return "push";
    case Kind::kPull:
      return "pull";
    case Kind::kPushPull:
      return "pushpull";
    case Kind::kRowPull:
      return "row_sparse_pull";
    case Kind::kReset:
      return "reset";
    case Kind::kRemove:
      return "remove";
    default:
      return "describe";
  }
}

namespace {

// A run of an array that a payload is received into, until it is given up.
class ArrayLanding final : public Landing {
 public:
  ArrayLanding(std::span<std::byte> run, ops::StoreMode mode) : run_(run), mode_(mode) {}

  std::span<const std::span<std::byte>> runs() override { return {&run_, 1}; }
  ops::StoreMode store_mode() const override { return mode_; }

  bool BeginRead() override {
    State expected = State::kIdle;
    return state_.compare_exchange_strong(expected, State::kReading, std::memory_order_acquire);
  }
  void EndRead() override { state_.store(State::kIdle, std::memory_order_release); }

  Payload Finish() override { return {nullptr, {run_.data(), run_.size()}}; }

  // A read takes what the socket has and never waits, so neither does this for long.
  void Revoke() {
    State expected = State::kIdle;
    while (!state_.compare_exchange_weak(expected, State::kRevoked, std::memory_order_acq_rel)) {
      if (expected == State::kRevoked) return;
      expected = State::kIdle;
      std::this_thread::yield();
    }
  }

 private:
  enum class State : std::uint8_t { kIdle, kReading, kRevoked };

  const std::span<std::byte> run_;
  const ops::StoreMode mode_;
  std::atomic<State> state_{State::kIdle};
};

void CopyOut(const Payload& payload, std::byte* to) {
  for (std::span<const std::byte> run : payload.runs()) {
    if (run.data() != to && !run.empty()) ops::Copy(run.data(), to, run.size());
    to += run.size();
  }
}

// What an op has to say goes with a request, whose words are limited.
constexpr std::size_t kMessageBytesMax = std::size_t{64} << 10;

}  // namespace

std::optional<ErrorBody> FailureOfInput(Engine& engine, const Var& var) {
  const std::exception_ptr error = engine.ErrorOf(var);
  if (error == nullptr) return std::nullopt;
  ErrorBody body = ToErrorBody(error);
  if (const std::optional<Failure> failure = engine.FailureOf(var)) {
    body.message = fmt::format("{}: {}", failure->op, failure->message);
  }
  body.message.resize(CutAtLetter(body.message, kMessageBytesMax).size());
  return body;
}

PartsCall::PartsCall(const std::shared_ptr<CallCount>& count, std::shared_ptr<DistKey> key,
                     const CallOptions& options)
    : alive_(count), key_(std::move(key)), options_(options) {
  if (IsPush(options_.kind)) not_submitted_ = key_->link().pushes().Enter();
}

// ---- What is sent

Request& PartsCall::AddRequest(const PlacedPart& part) {
  Request& request = requests_.emplace_back();
  request.kind = options_.kind;
  request.server = part.server;
  request.part = key_->IdOf(part);
  request.priority = options_.priority;
  request.dtype = options_.dtype;
  request.flags = options_.flags;
  request.version = options_.version;
  request.deadline = options_.deadline;
  request.what = {NameOf(options_.kind), key_->name()};
  request.one_of_several = key_->parts().size() > 1;
  if (options_.rates) {
    request.flags |= kFlagRates;
    request.meta = Encode(RatesBody{*options_.rates});
  }
  if (options_.kind == Kind::kInit || options_.kind == Kind::kReset) {
    request.meta = Encode(InitBody{key_->InfoOf(part)});
  }
  slots_.reserve(key_->parts().size());
  Slot& slot = slots_.emplace_back();
  slot.call = this;
  slot.part = &part;
  request.token = TokenOf(slot);
  return request;
}

void PartsCall::SendNothing() {
  for (const PlacedPart& part : key_->parts()) AddRequest(part);
}

void PartsCall::SendNothingToTheFirst() { AddRequest(key_->parts().front()); }

void PartsCall::SendElements(const NDArray& array) {
  const auto owner = std::allocate_shared<const NDArray>(engine::BlockAllocator<NDArray>(), array);
  const auto* const data = static_cast<const std::byte*>(array.const_data());
  const std::size_t size = SizeOf(array.dtype());
  for (const PlacedPart& part : key_->parts()) {
    if (!Concerns(part)) continue;
    AddRequest(part).payload =
        Payload(owner, {data + static_cast<std::size_t>(part.begin) * size,
                        static_cast<std::size_t>(part.end - part.begin) * size});
  }
}

void PartsCall::SendCodes(const NDArray& codes, const Compressor& compressor) {
  const auto owner = std::make_shared<const NDArray>(codes);
  const auto* const data = static_cast<const std::byte*>(codes.const_data());
  for (const PlacedPart& part : key_->parts()) {
    Request& request = AddRequest(part);
    request.flags |= kFlagCompressed;
    request.payload =
        Payload(owner, {data + compressor.CodeBytes(part.begin),
                        static_cast<std::size_t>(compressor.CodeBytes(part.end - part.begin))});
  }
}

void PartsCall::SendRows(const RowSparseNDArray& array) {
  const auto owner = std::make_shared<const RowSparseNDArray>(array);
  const std::span<const std::int64_t> ids = array.row_ids();
  const auto* const rows = static_cast<const std::byte*>(array.const_rows());
  const std::size_t element_bytes = SizeOf(array.dtype());
  const std::size_t row_bytes = static_cast<std::size_t>(array.row_size()) * element_bytes;
  std::size_t begin = 0;
  for (const PlacedPart& part : key_->parts()) {
    const PartRows here = key_->RowsOf(part);
    begin = ops::LowerBoundFrom(ids, begin, here.first());
    const std::size_t end = ops::LowerBoundFrom(ids, begin, here.end());
    std::vector<std::span<const std::byte>> runs = {std::as_bytes(ids.subspan(begin, end - begin))};
    if (here.width() == array.row_size()) {
      runs.emplace_back(rows + begin * row_bytes, (end - begin) * row_bytes);
    } else {  // the part is shorter than a row: two of them at most
      for (std::size_t i = begin; i < end; ++i) {
        const auto from = static_cast<std::size_t>(here.WindowIn(ids[i])) * element_bytes;
        runs.emplace_back(rows + i * row_bytes + from,
                          static_cast<std::size_t>(here.width()) * element_bytes);
      }
    }
    // The next part may begin within the last of these rows.
    if (end > begin) begin = end - 1;
    if (!Concerns(part)) continue;
    Request& request = AddRequest(part);
    request.flags |= kFlagRowSparse;
    request.payload = Payload(owner, std::move(runs));
  }
}

// A part without rows answers with none. Whether the value has some, and is of use, only all of its
// parts can tell: those that none of the ids is of are asked for their first row.
void PartsCall::SendRowIds(std::vector<std::int64_t> sorted_ids) {
  const auto owner = std::make_shared<const std::vector<std::int64_t>>(std::move(sorted_ids));
  const std::span<const std::int64_t> ids = *owner;
  std::size_t begin = 0;
  for (const PlacedPart& part : key_->parts()) {
    const std::size_t end = ops::LowerBoundFrom(ids, begin, part.end);
    const auto wanted = ids.subspan(begin, end - begin);
    wanted_.push_back(wanted);
    Request& request = AddRequest(part);
    if (!wanted.empty()) {
      request.payload = Payload(owner, std::as_bytes(wanted));
    } else if (part.end > part.begin) {
      const auto first = std::make_shared<const std::int64_t>(part.begin);
      request.payload = Payload(first, std::as_bytes(std::span(first.get(), 1)));
    }
    begin = end;
  }
  wanted_owner_ = owner;
}

void PartsCall::SendFailure(const ErrorBody& error) {
  for (const PlacedPart& part : key_->parts()) {
    Request& request = AddRequest(part);
    request.flags = static_cast<std::uint8_t>((request.flags & ~kFlagRates) | kFlagFailed);
    request.meta = Encode(error);
  }
}

void PartsCall::AwaitElements() {
  for (const PlacedPart& part : key_->parts()) AddRequest(part).awaits_value = true;
}

void PartsCall::Supply(std::size_t part, PushValue&& value) {
  const Slot& slot = slots_[part];
  if (key_->SetUnsent(*this, part, &value)) return;
  ReusedOutputs out;
  key_->link().Supply(slot.part->server, key_->IdOf(*slot.part), TokenOf(slots_[part]),
                      std::move(value), &*out);
  key_->link().Carry(*out);
}

void PartsCall::ReceiveElements(const NDArray& out) {
  out_ = out;
  out_data_ = static_cast<std::byte*>(out.data());
}

void PartsCall::ReceiveElementsOrFail(const NDArray& out) {
  try {
    ReceiveElements(out);
  } catch (...) {
    out_ = NDArray();
    MutexLock lock(mutex_);
    error_ = std::current_exception();  // of part 0, as it were: it stays the first
  }
}

void PartsCall::Start(Completion done) {
  DCHECK(!started_);
  started_ = true;
  done_ = std::move(done);
  for (Request& request : requests_) request.op = engine::TracedOpOfThread();
  missing_.store(slots_.size(), std::memory_order_relaxed);  // before Ready, which publishes it
  const bool empty = slots_.empty();
  if (!empty) self_ = shared_from_this();
  key_->Ready(*this, engine::TicketOfRunningOp());
  if (empty) Finish();
}

void PartsCall::Cancel() {
  if (std::exchange(started_, true)) return;
  key_->Drop(*this);
  if (arrivals_ != nullptr) arrivals_->End();
}

// ---- What is received

std::span<std::byte> PartsCall::DestinationOf(const PlacedPart& part) const {
  const std::size_t size = SizeOf(options_.dtype);
  return {out_data_ + static_cast<std::size_t>(part.begin) * size,
          static_cast<std::size_t>(part.end - part.begin) * size};
}

std::shared_ptr<Landing> PartsCall::Slot::LandingFor(const Message& header, std::uint64_t bytes) {
  if (header.kind != Kind::kValue || call->out_data_ == nullptr || landing != nullptr) {
    return nullptr;
  }
  const std::span<std::byte> destination = call->DestinationOf(*part);
  if (bytes != destination.size()) return nullptr;
  // The array is overwritten whole, after as much was read to be sent.
  landing = std::allocate_shared<ArrayLanding>(engine::BlockAllocator<ArrayLanding>(), destination,
                                               ops::StoreModeFor(2 * call->out_.bytes()));
  return landing;
}

void PartsCall::OnAnswer(Slot& slot, Answer&& answer) {
  std::exception_ptr error = std::move(answer.error);
  if (error != nullptr) {
    // The caller may do with its array what it likes from now on.
    if (slot.landing != nullptr) static_cast<ArrayLanding&>(*slot.landing).Revoke();
  } else if (answer.message.kind == Kind::kValue) {
    if (out_data_ != nullptr) {
      const std::span<std::byte> destination = DestinationOf(*slot.part);
      if (answer.message.payload.bytes() == destination.size()) {
        CopyOut(answer.message.payload, destination.data());
        if (arrivals_ != nullptr) arrivals_->Arrived(IndexOf(slot));
      } else {
        error = std::make_exception_ptr(NetworkError(fmt::format(
            "{} key {}: expected {} bytes from server {}, got {}", NameOf(options_.kind),
            *key_->name(), destination.size(), slot.part->server, answer.message.payload.bytes())));
      }
    } else if (!rows_.empty()) {
      rows_[IndexOf(slot)] = std::move(answer.message.payload);
    }
  }
  if (error != nullptr && missing_parts_ != nullptr && options_.kind == Kind::kReset &&
      ToErrorBody(error).code == ErrorBody::Code::kUnknownKey) {
    error = nullptr;
    MutexLock lock(mutex_);
    missing_parts_->insert(slot.part->part);
  }
  if (error != nullptr && passes_over_failed_inputs_ &&
      ToErrorBody(error).code == ErrorBody::Code::kInputFailed) {
    error = nullptr;
  }
  if (error != nullptr) {
    MutexLock lock(mutex_);
    ++failed_;
    if (error_ == nullptr || slot.part->part < error_part_) {
      error_ = std::move(error);
      error_part_ = slot.part->part;
    }
  }
  // acq_rel: the last one sees what all others have received
  if (missing_.fetch_sub(1, std::memory_order_acq_rel) == 1) Finish();
}

// A value that some parts have and others not is said to be one.
std::exception_ptr PartsCall::TakeError() {
  std::exception_ptr error = std::move(error_);
  const bool writes = options_.kind == Kind::kReset ||
                      (options_.kind == Kind::kInit && (options_.flags & kFlagNoValue) == 0);
  const std::size_t parts = key_->parts().size();
  if (error == nullptr || !writes || parts == 1) return error;
  ErrorBody body = ToErrorBody(error);
  const std::size_t done = parts - failed_;
  if (done == 0 && (given_up_ || body.code != ErrorBody::Code::kTimeout)) return error;
  body.message += fmt::format("; {} of {} parts {}: the key is of no use until {} succeeds", done,
                              parts, options_.kind == Kind::kReset ? "are reset" : "have the value",
                              options_.kind == Kind::kReset ? "a Reset" : "an Init");
  return ToException(body);
}

void PartsCall::Finish() {
  const std::shared_ptr<PartsCall> self = std::move(self_);  // its end, at the end of this call
  if (arrivals_ != nullptr) arrivals_->End();
  std::exception_ptr error = TakeError();
  if (error == nullptr && rows_out_) {
    try {
      AssembleRows();
    } catch (...) {
      error = std::current_exception();
    }
  }
  const Completion done = *std::exchange(done_, std::nullopt);
  out_ = NDArray();
  rows_out_ = RowSparseNDArray();
  done(std::move(error));
}

// Of rows that were asked for those that the value lacks are zeros, or none if it has no rows at
// all.
void PartsCall::AssembleRows() {
  // This runs on the thread that takes the last answer, in whatever op that is.
  const engine::UncheckedScope unchecked;
  const std::size_t row_bytes =
      static_cast<std::size_t>(rows_out_.row_size()) * SizeOf(options_.dtype);
  constexpr std::size_t kIdBytes = sizeof(std::int64_t);
  const bool has_rows =
      std::ranges::any_of(rows_, [](const Payload& rows) { return !rows.empty(); });
  std::vector<std::vector<std::byte>> received;  // in the order of the parts, and so of the rows
  std::vector<std::int64_t> ids;
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    std::vector<std::byte>& bytes = received.emplace_back();
    if (!wanted_.empty() && (wanted_[i].empty() || (rows_[i].empty() && has_rows))) {
      ids.insert(ids.end(), wanted_[i].begin(), wanted_[i].end());
      bytes.resize(wanted_[i].size() * (kIdBytes + row_bytes));
      continue;
    }
    bytes.resize(rows_[i].bytes());
    CopyOut(rows_[i], bytes.data());
    rows_[i] = {};
    const std::size_t before = ids.size();
    const std::size_t count = bytes.size() / (kIdBytes + row_bytes);
    ids.resize(before + count);
    if (count > 0) std::memcpy(ids.data() + before, bytes.data(), count * kIdBytes);
  }
  rows_out_.SetRowIds(ids);
  auto* to = static_cast<std::byte*>(rows_out_.rows());
  for (const std::vector<std::byte>& bytes : received) {
    const std::size_t count = bytes.size() / (kIdBytes + row_bytes);
    if (count > 0) ops::Copy(bytes.data() + count * kIdBytes, to, count * row_bytes);
    to += count * row_bytes;
  }
}

}  // namespace heddle::kvstore::dist
