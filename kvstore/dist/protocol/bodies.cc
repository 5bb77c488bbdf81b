#include "kvstore/dist/protocol/bodies.h"

#include <heddle/error.h>
#include <heddle/key.h>
#include <heddle/shape.h>

#include <limits>
#include <new>
#include <utility>
#include <variant>

#include "base/check.h"
#include "kvstore/dist/protocol/codec.h"

namespace heddle::kvstore::dist {
namespace {

// The fewest bytes that an item of a list takes.
constexpr std::size_t kNodeEntryBytesMin = 1 + 4 + 8 + 4;
constexpr std::size_t kAckBytes = 16 + 8;
constexpr std::size_t kPartRequestsBytes = 16 + 8;
constexpr std::size_t kMissingPushBytes = 16 + 8;
constexpr std::size_t kParameterBytesMin = 4 + 8;
constexpr std::size_t kKeyBytesMin = 1 + 4;
constexpr std::size_t kArrayBytesMin = 4 + 1 + 8;
constexpr std::size_t kPartInfoBytesMin = kKeyBytesMin + 4 + 1 + 1 + 4 + 8 + 8;
constexpr std::size_t kPartStatesBytesMin = 16 + kPartInfoBytesMin + 8 + 4 + 4;

constexpr DType kLastDType = kAllDTypes.back();

void Put(WireWriter& out, const NodeId& node) {
  out.Put(node.role);
  out.Put(node.rank);
}

bool Get(WireReader& in, NodeId* node) {
  return in.GetEnum(&node->role, Role::kWorker, Role::kScheduler) && in.Get(&node->rank);
}

void Put(WireWriter& out, const PartId& part) {
  out.Put(part.key);
  out.Put(part.part);
  out.Put(part.store);
}

bool Get(WireReader& in, PartId* part) {
  return in.Get(&part->key) && in.Get(&part->part) && in.Get(&part->store);
}

void Put(WireWriter& out, const Key& key) {
  out.Put(static_cast<std::uint8_t>(key.index()));
  if (const auto* number = std::get_if<std::int64_t>(&key)) {
    out.Put(*number);
  } else {
    out.Put(std::string_view(std::get<std::string>(key)));
  }
}

bool Get(WireReader& in, Key* key) {
  bool is_text = false;
  return in.Get(&is_text) &&
         (is_text ? in.Get(&key->emplace<std::string>()) : in.Get(&key->emplace<std::int64_t>()));
}

void Put(WireWriter& out, const Shape& shape) {
  out.PutCount(shape.ndim());
  for (const std::int64_t extent : shape) out.Put(extent);
}

bool Get(WireReader& in, Shape* shape) {
  std::vector<std::int64_t> extents;
  if (!in.GetList(&extents, sizeof(std::int64_t),
                  [](WireReader& from, std::int64_t* extent) { return from.Get(extent); })) {
    return false;
  }
  try {
    *shape = Shape(extents);
  } catch (const InvalidArgument&) {  // negative, or too many elements
    return in.Fail();
  }
  return true;
}

void Put(WireWriter& out, const PartInfo& info) {
  Put(out, info.key);
  Put(out, info.shape);
  out.Put(info.dtype);
  out.Put(info.row_sparse);
  out.Put(info.num_parts);
  out.Put(info.begin);
  out.Put(info.end);
}

bool Get(WireReader& in, PartInfo* info) {
  if (!Get(in, &info->key) || !Get(in, &info->shape) || !in.GetEnum(&info->dtype, kLastDType) ||
      !in.Get(&info->row_sparse) || !in.Get(&info->num_parts) || !in.Get(&info->begin) ||
      !in.Get(&info->end)) {
    return false;
  }
  if (info->row_sparse && info->shape.ndim() == 0) return in.Fail();
  if (!HasCountableBytes(*info)) return in.Fail();
  const std::int64_t places = info->row_sparse ? info->shape[0] : info->shape.size();
  const bool possible =
      info->num_parts > 0 && info->begin >= 0 && info->begin <= info->end && info->end <= places;
  const bool is_all = info->begin == 0 && info->end == places;
  return (possible && (info->num_parts > 1 || is_all)) || in.Fail();
}

void Put(WireWriter& out, const NodeEntry& entry) {
  Put(out, entry.node);
  out.Put(entry.incarnation);
  out.Put(std::string_view(entry.address));
}

bool Get(WireReader& in, NodeEntry* entry) {
  return Get(in, &entry->node) && in.Get(&entry->incarnation) && in.Get(&entry->address);
}

void Put(WireWriter& out, const OptimizerBody& body) {
  out.Put(std::string_view(body.name));
  out.PutCount(body.parameters.size());
  for (const auto& [name, value] : body.parameters) {
    out.Put(std::string_view(name));
    out.Put(value);
  }
}

bool Get(WireReader& in, OptimizerBody* body) {
  return in.Get(&body->name) &&
         in.GetList(&body->parameters, kParameterBytesMin, [](WireReader& from, auto* parameter) {
           return from.Get(&parameter->first) && from.Get(&parameter->second);
         });
}

void Put(WireWriter& out, const PartStates::Array& array) {
  out.Put(std::string_view(array.name));
  out.Put(array.dtype);
  out.Put(array.elements);
}

bool Get(WireReader& in, PartStates::Array* array) {
  return in.Get(&array->name) && in.GetEnum(&array->dtype, kLastDType) &&
         in.Get(&array->elements) && (array->elements >= 0 || in.Fail());
}

void Put(WireWriter& out, const PartStates& states) {
  Put(out, states.part);
  Put(out, states.info);
  out.Put(states.updates);
  out.PutCount(states.numbers.size());
  for (const double number : states.numbers) out.Put(number);
  out.PutCount(states.arrays.size());
  for (const PartStates::Array& array : states.arrays) Put(out, array);
}

bool Get(WireReader& in, PartStates* states) {
  return Get(in, &states->part) && Get(in, &states->info) && in.Get(&states->updates) &&
         in.GetList(&states->numbers, sizeof(double),
                    [](WireReader& from, double* number) { return from.Get(number); }) &&
         in.GetList(&states->arrays, kArrayBytesMin,
                    [](WireReader& from, PartStates::Array* array) { return Get(from, array); });
}

}  // namespace

bool HasCountableBytes(const PartInfo& info) {
  constexpr auto kIdBytes = static_cast<std::int64_t>(sizeof(std::int64_t));
  const auto element_bytes = static_cast<std::int64_t>(SizeOf(info.dtype));
  std::int64_t bytes = 0;
  if (__builtin_mul_overflow(info.shape.size(), element_bytes, &bytes)) return false;
  // A shape without elements may have rows of any length.
  std::int64_t row_bytes = element_bytes;
  for (std::size_t axis = 1; axis < info.shape.ndim(); ++axis) {
    if (__builtin_mul_overflow(row_bytes, info.shape[axis], &row_bytes)) return false;
  }
  return row_bytes <= std::numeric_limits<std::int64_t>::max() - kIdBytes;
}

std::string Encode(const JoinBody& body) {
  WireWriter out;
  Put(out, NodeId{body.role, body.rank});
  out.Put(body.incarnation);
  out.Put(std::string_view(body.address));
  out.Put(body.num_workers);
  out.Put(body.num_servers);
  return out.Take();
}

bool Decode(std::string_view meta, JoinBody* body) {
  WireReader in(meta);
  NodeId node;
  if (!Get(in, &node) || !in.Get(&body->incarnation) || !in.Get(&body->address) ||
      !in.Get(&body->num_workers) || !in.Get(&body->num_servers)) {
    return false;
  }
  body->role = node.role;
  body->rank = node.rank;
  return in.Ended();
}

std::string Encode(const RosterBody& body) {
  WireWriter out;
  out.Put(body.rank);
  out.Put(body.num_workers);
  out.Put(body.num_servers);
  out.Put(body.epoch);
  out.Put(body.slice_bytes);
  out.Put(body.cut_bytes);
  out.PutCount(body.nodes.size());
  for (const NodeEntry& entry : body.nodes) Put(out, entry);
  return out.Take();
}

bool Decode(std::string_view meta, RosterBody* body) {
  WireReader in(meta);
  in.Get(&body->rank);
  in.Get(&body->num_workers);
  in.Get(&body->num_servers);
  in.Get(&body->epoch);
  in.Get(&body->slice_bytes);
  in.Get(&body->cut_bytes);
  in.GetList(&body->nodes, kNodeEntryBytesMin,
             [](WireReader& from, NodeEntry* entry) { return Get(from, entry); });
  return in.Ended() && body->num_workers > 0 && body->num_servers > 0 && body->slice_bytes > 0 &&
         body->cut_bytes >= 0;
}

std::string Encode(const FailureBody& body) {
  WireWriter out;
  Put(out, body.node);
  out.Put(std::string_view(body.address));
  out.Put(std::string_view(body.why));
  return out.Take();
}

bool Decode(std::string_view meta, FailureBody* body) {
  WireReader in(meta);
  return Get(in, &body->node) && in.Get(&body->address) && in.Get(&body->why) && in.Ended();
}

std::string Encode(const StateBody& body) {
  WireWriter out;
  for (const std::uint64_t number : {body.requests, body.bytes, body.rounds, body.waiting}) {
    out.Put(number);
  }
  out.Put(body.stalled);
  out.Put(std::string_view(body.stall));
  return out.Take();
}

bool Decode(std::string_view meta, StateBody* body) {
  WireReader in(meta);
  return in.Get(&body->requests) && in.Get(&body->bytes) && in.Get(&body->rounds) &&
         in.Get(&body->waiting) && in.Get(&body->stalled) && in.Get(&body->stall) && in.Ended();
}

std::string Encode(const InitBody& body) {
  WireWriter out;
  Put(out, body.info);
  return out.Take();
}

bool Decode(std::string_view meta, InitBody* body) {
  WireReader in(meta);
  return Get(in, &body->info) && in.Ended();
}

std::string Encode(const RatesBody& body) {
  WireWriter out;
  out.Put(body.rates.learning_rate);
  out.Put(body.rates.weight_decay);
  return out.Take();
}

bool Decode(std::string_view meta, RatesBody* body) {
  WireReader in(meta);
  return in.Get(&body->rates.learning_rate) && in.Get(&body->rates.weight_decay) && in.Ended();
}

std::string Encode(const ErrorBody& body) {
  WireWriter out;
  out.Put(body.code);
  out.Put(std::string_view(body.message));
  return out.Take();
}

bool Decode(std::string_view meta, ErrorBody* body) {
  WireReader in(meta);
  return in.GetEnum(&body->code, ErrorBody::Code::kOp) && in.Get(&body->message) && in.Ended();
}

std::string Encode(const AcksBody& body) {
  WireWriter out;
  out.PutCount(body.acks.size());
  for (const AcksBody::Ack& ack : body.acks) {
    Put(out, ack.part);
    out.Put(ack.sequence);
  }
  return out.Take();
}

bool Decode(std::string_view meta, AcksBody* body) {
  WireReader in(meta);
  return in.GetList(&body->acks, kAckBytes, [](WireReader& from, AcksBody::Ack* ack) {
    return Get(from, &ack->part) && from.Get(&ack->sequence);
  }) && in.Ended();
}

std::string Encode(const OpenStoreBody& body) {
  WireWriter out;
  out.Put(std::string_view(body.type));
  return out.Take();
}

bool Decode(std::string_view meta, OpenStoreBody* body) {
  WireReader in(meta);
  return in.Get(&body->type) && in.Ended();
}

std::string Encode(const OptimizerBody& body) {
  WireWriter out;
  Put(out, body);
  return out.Take();
}

bool Decode(std::string_view meta, OptimizerBody* body) {
  WireReader in(meta);
  return Get(in, body) && in.Ended();
}

std::string Encode(const CompressionBody& body) {
  WireWriter out;
  out.Put(std::string_view(body.options.type));
  out.Put(body.options.threshold);
  return out.Take();
}

bool Decode(std::string_view meta, CompressionBody* body) {
  WireReader in(meta);
  return in.Get(&body->options.type) && in.Get(&body->options.threshold) && in.Ended();
}

std::string Encode(const CommandBody& body) {
  WireWriter out;
  out.Put(body.head);
  out.Put(std::string_view(body.body));
  return out.Take();
}

bool Decode(std::string_view meta, CommandBody* body) {
  WireReader in(meta);
  return in.Get(&body->head) && in.Get(&body->body) && in.Ended();
}

std::string Encode(const KeysBody& body) {
  WireWriter out;
  out.PutCount(body.keys.size());
  for (const Key& key : body.keys) Put(out, key);
  return out.Take();
}

bool Decode(std::string_view meta, KeysBody* body) {
  WireReader in(meta);
  return in.GetList(&body->keys, kKeyBytesMin, [](WireReader& from, Key* key) {
    return Get(from, key);
  }) && in.Ended();
}

std::string Encode(const CloseStoreBody& body) {
  WireWriter out;
  out.Put(body.more);
  out.PutCount(body.parts.size());
  for (const CloseStoreBody::Requests& requests : body.parts) {
    Put(out, requests.part);
    out.Put(requests.count);
  }
  return out.Take();
}

bool Decode(std::string_view meta, CloseStoreBody* body) {
  WireReader in(meta);
  return in.Get(&body->more) &&
         in.GetList(&body->parts, kPartRequestsBytes,
                    [](WireReader& from, CloseStoreBody::Requests* requests) {
                      return Get(from, &requests->part) && from.Get(&requests->count);
                    }) &&
         in.Ended();
}

std::string Encode(const LeaveBody& body) {
  WireWriter out;
  out.Put(body.more);
  out.PutCount(body.missing.size());
  for (const LeaveBody::Push& push : body.missing) {
    Put(out, push.part);
    out.Put(push.version);
  }
  return out.Take();
}

bool Decode(std::string_view meta, LeaveBody* body) {
  WireReader in(meta);
  return in.Get(&body->more) &&
         in.GetList(&body->missing, kMissingPushBytes,
                    [](WireReader& from, LeaveBody::Push* push) {
                      return Get(from, &push->part) && from.Get(&push->version);
                    }) &&
         in.Ended();
}

std::string Encode(const AskBody& body) {
  WireWriter out;
  out.Put(body.bytes);
  return out.Take();
}

bool Decode(std::string_view meta, AskBody* body) {
  WireReader in(meta);
  return in.Get(&body->bytes) && in.Ended();
}

std::string Encode(const TextBody& body) {
  WireWriter out;
  out.Put(std::string_view(body.text));
  return out.Take();
}

bool Decode(std::string_view meta, TextBody* body) {
  WireReader in(meta);
  return in.Get(&body->text) && in.Ended();
}

std::string Encode(const SaveStatesBody& body) {
  WireWriter out;
  Put(out, body.after);
  return out.Take();
}

bool Decode(std::string_view meta, SaveStatesBody* body) {
  WireReader in(meta);
  return Get(in, &body->after) && in.Ended();
}

std::string Encode(const StatesBody& body) {
  WireWriter out;
  Put(out, body.optimizer);
  out.PutCount(body.parts.size());
  for (const PartStates& states : body.parts) Put(out, states);
  return out.Take();
}

bool Decode(std::string_view meta, StatesBody* body) {
  WireReader in(meta);
  return Get(in, &body->optimizer) &&
         in.GetList(&body->parts, kPartStatesBytesMin,
                    [](WireReader& from, PartStates* states) { return Get(from, states); }) &&
         in.Ended();
}

std::exception_ptr ToException(const ErrorBody& error) {
  using Code = ErrorBody::Code;
  switch (error.code) {
    case Code::kInvalidArgument:
      return std::make_exception_ptr(InvalidArgument(error.message));
    case Code::kUnknownKey:
      return std::make_exception_ptr(UnknownKey(error.message));
    case Code::kInvalidState:
      return std::make_exception_ptr(InvalidState(error.message));
    case Code::kInputFailed:
      return std::make_exception_ptr(InputFailed(error.message));
    case Code::kUpdateFailed:
    case Code::kOp:
      return std::make_exception_ptr(OpError(error.message));
    case Code::kNetwork:
      return std::make_exception_ptr(NetworkError(error.message));
    case Code::kTimeout:
      return std::make_exception_ptr(TimeoutError(error.message));
    case Code::kOutOfMemory:
      return std::make_exception_ptr(OutOfMemory(error.message));
    case Code::kIo:
      return std::make_exception_ptr(IoError(error.message));
    case Code::kOther:
      break;
  }
  return std::make_exception_ptr(Error(error.message));
}

ErrorBody ToErrorBody(const std::exception_ptr& error) {
  using Code = ErrorBody::Code;
  CHECK(error != nullptr);
  try {
    std::rethrow_exception(error);
  } catch (const UnknownKey& e) {  // an InvalidArgument, so it comes first
    return {Code::kUnknownKey, e.what()};
  } catch (const InvalidArgument& e) {
    return {Code::kInvalidArgument, e.what()};
  } catch (const InvalidState& e) {
    return {Code::kInvalidState, e.what()};
  } catch (const NetworkError& e) {
    return {Code::kNetwork, e.what()};
  } catch (const TimeoutError& e) {
    return {Code::kTimeout, e.what()};
  } catch (const OutOfMemory& e) {
    return {Code::kOutOfMemory, e.what()};
  } catch (const std::bad_alloc& e) {
    return {Code::kOutOfMemory, e.what()};
  } catch (const IoError& e) {
    return {Code::kIo, e.what()};
  } catch (const InputFailed& e) {  // an OpError, so it comes first
    return {Code::kInputFailed, e.what()};
  } catch (const OpError& e) {
    return {Code::kOp, e.what()};
  } catch (const std::exception& e) {
    return {Code::kOther, e.what()};
  } catch (...) {
    return {Code::kOther, "an exception that is no std::exception"};
  }
}

}  // namespace heddle::kvstore::dist
