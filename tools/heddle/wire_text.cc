// What a message says, for people.
#include <heddle/dtype.h>
#include <heddle/key.h>
#include <heddle/shape.h>

#include <optional>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "kvstore/dist/protocol/bodies.h"
#include "tools/heddle/wire_stream.h"

namespace heddle::tools {
namespace {

using namespace kvstore::dist;  // NOLINT(google-build-using-namespace)

// Texts of peers may hold anything.
std::string Quoted(std::string_view text) {
  std::string quoted = "'";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\'' || c == '\\') quoted += '\\';
    if (byte < 0x20 || byte == 0x7f) {
      quoted += fmt::format("\\x{:02x}", byte);
    } else {
      quoted += c;
    }
  }
  return quoted + "'";
}

std::string Hex(std::string_view bytes) {
  return fmt::format("{:02x}",
                     fmt::join(std::vector<unsigned char>(bytes.begin(), bytes.end()), " "));
}

std::string Text(const PartId& part) {
  if (part.part == kControlPart) return fmt::format("store {} control", part.store);
  return fmt::format("store {} key {:016x} part {}", part.store, part.key, part.part);
}

std::string Text(const Key& key) {
  const auto* const text = std::get_if<std::string>(&key);
  return text != nullptr ? Quoted(*text) : fmt::format("{}", std::get<std::int64_t>(key));
}

std::string Text(const PartInfo& info) {
  return fmt::format("key {} {} of {} {}, {} {} to {}, one of {} parts", Text(info.key),
                     ToString(info.shape), info.row_sparse ? "row-sparse" : "dense",
                     Name(info.dtype), info.row_sparse ? "rows" : "elements", info.begin, info.end,
                     info.num_parts);
}

std::string Text(const OptimizerBody& body) {
  std::string text = Quoted(body.name);
  for (const auto& [name, value] : body.parameters) {
    text += fmt::format(" {}={}", Quoted(name), value);
  }
  return text;
}

template <class Body>
std::optional<std::string> TextOf(std::string_view meta) {
  Body body;
  if (!Decode(meta, &body)) return std::nullopt;
  if constexpr (requires { body.num_workers, body.role; }) {
    return fmt::format("{} rank {} incarnation {:016x} at {}, told of {} workers and {} servers",
                       ToString(NodeId{body.role, -1}), body.rank, body.incarnation,
                       Quoted(body.address), body.num_workers, body.num_servers);
  } else if constexpr (requires { body.nodes; }) {
    std::string text = fmt::format(
        "you are rank {}; {} workers, {} servers, epoch {}, slices of {} bytes, cut above {}",
        body.rank, body.num_workers, body.num_servers, body.epoch, body.slice_bytes,
        body.cut_bytes);
    for (const NodeEntry& entry : body.nodes) {
      text += fmt::format("\n{} incarnation {:016x} at {}", ToString(entry.node), entry.incarnation,
                          Quoted(entry.address));
    }
    return text;
  } else if constexpr (requires { body.why; }) {
    return fmt::format("{} at {}: {}", ToString(body.node), Quoted(body.address), Quoted(body.why));
  } else if constexpr (requires { body.info; }) {
    return Text(body.info);
  } else if constexpr (requires { body.code; }) {
    return fmt::format("code {}: {}", static_cast<int>(body.code), Quoted(body.message));
  } else if constexpr (requires { body.acks; }) {
    std::vector<std::string> acks;
    for (const AcksBody::Ack& ack : body.acks) {
      acks.push_back(fmt::format("{} sequence {}", Text(ack.part), ack.sequence));
    }
    return fmt::format("{}", fmt::join(acks, "\n"));
  } else if constexpr (requires { body.missing; }) {
    std::string text = body.more ? "more to come" : "";
    for (const LeaveBody::Push& push : body.missing) {
      text += fmt::format("{}{}: a push of version {} does not come", text.empty() ? "" : "\n",
                          Text(push.part), push.version);
    }
    return text;
  } else if constexpr (requires { body.more; }) {
    std::string text = body.more ? "more to come" : "";
    for (const CloseStoreBody::Requests& requests : body.parts) {
      text += fmt::format("{}{} has {} requests", text.empty() ? "" : "\n", Text(requests.part),
                          requests.count);
    }
    return text;
  } else if constexpr (requires { body.type; }) {
    return Quoted(body.type);
  } else if constexpr (requires { body.parameters; }) {
    return Text(body);
  } else if constexpr (requires { body.options; }) {
    return fmt::format("{} threshold {}", Quoted(body.options.type), body.options.threshold);
  } else if constexpr (requires { body.head; }) {
    return fmt::format("head {} body {}", body.head, Quoted(body.body));
  } else if constexpr (requires { body.keys; }) {
    std::vector<std::string> keys;
    for (const Key& key : body.keys) keys.push_back(Text(key));
    return fmt::format("{} keys: {}", keys.size(), fmt::join(keys, ", "));
  } else if constexpr (requires { body.stalled; }) {
    return fmt::format("{} requests of {} bytes, {} rounds, {} waiting, {} stalled {}",
                       body.requests, body.bytes, body.rounds, body.waiting, body.stalled,
                       Quoted(body.stall));
  } else if constexpr (requires { body.bytes; }) {
    return fmt::format("{} bytes", body.bytes);
  } else if constexpr (requires { body.text; }) {
    return Quoted(body.text);
  } else {
    std::string text =
        fmt::format("states of {} parts, optimizer {}", body.parts.size(), Text(body.optimizer));
    for (const PartStates& states : body.parts) {
      text += fmt::format("\n{}: {}, {} updates, numbers [{}]", Text(states.part),
                          Text(states.info), states.updates, fmt::join(states.numbers, ", "));
      for (const PartStates::Array& array : states.arrays) {
        text += fmt::format(", {} {} {}", Quoted(array.name), array.elements, Name(array.dtype));
      }
    }
    return text;
  }
}

std::optional<std::string> TextOfPush(const Message& message) {
  if ((message.flags & kFlagFailed) != 0) return TextOf<ErrorBody>(message.meta);
  RatesBody body;
  if ((message.flags & kFlagRates) == 0 || !Decode(message.meta, &body)) return std::nullopt;
  return fmt::format("learning rate {}, weight decay {}", body.rates.learning_rate,
                     body.rates.weight_decay);
}

// Nothing: it cannot be read, or the kind has no body.
std::optional<std::string> TextOfBody(const Message& message) {
  const std::string_view meta = message.meta;
  switch (message.kind) {
    case Kind::kJoin:
      return TextOf<JoinBody>(meta);
    case Kind::kRoster:
      return TextOf<RosterBody>(meta);
    case Kind::kPeerDown:
    case Kind::kJobFailed:
      return TextOf<FailureBody>(meta);
    case Kind::kHeartbeat:
      return TextOf<StateBody>(meta);
    case Kind::kInit:
    case Kind::kReset:
    case Kind::kValue:  // of a kDescribe
      return TextOf<InitBody>(meta);
    case Kind::kPush:
    case Kind::kPushPull:
      return TextOfPush(message);
    case Kind::kRefused:
    case Kind::kError:
      return TextOf<ErrorBody>(meta);
    case Kind::kAcks:
      return TextOf<AcksBody>(meta);
    case Kind::kOpenStore:
      return TextOf<OpenStoreBody>(meta);
    case Kind::kSetOptimizer:
    case Kind::kSetParameters:
      return TextOf<OptimizerBody>(meta);
    case Kind::kSetCompression:
      return TextOf<CompressionBody>(meta);
    case Kind::kCommand:
      return TextOf<CommandBody>(meta);
    case Kind::kCloseStore:
      return TextOf<CloseStoreBody>(meta);
    case Kind::kKeys:
      return TextOf<KeysBody>(meta);
    case Kind::kLeave:
      return TextOf<LeaveBody>(meta);
    case Kind::kAsk:
      return TextOf<AskBody>(meta);
    case Kind::kStatusReply:
      return TextOf<TextBody>(meta);
    case Kind::kLoadStates:
      return TextOf<StatesBody>(meta);
    case Kind::kDone: {  // of kKeys or kSaveStates; the message does not say which
      auto text = TextOf<StatesBody>(meta);
      return text ? text : TextOf<KeysBody>(meta);
    }
    default:
      return std::nullopt;
  }
}

std::string Flags(std::uint8_t flags) {
  constexpr std::pair<std::uint8_t, const char*> kNames[] = {
      {kFlagRowSparse, "row_sparse"}, {kFlagCompressed, "compressed"}, {kFlagRates, "rates"},
      {kFlagFailed, "failed"},        {kFlagNoValue, "no_value"},      {kFlagLast, "last"}};
  std::vector<std::string> names;
  for (const auto& [bit, name] : kNames) {
    if ((flags & bit) != 0) names.emplace_back(name);
  }
  return names.empty() ? "" : fmt::format(" [{}]", fmt::join(names, " "));
}

std::string Indented(std::string_view lines) {
  std::string text = "\n           ";
  for (const char c : lines) {
    text += c;
    if (c == '\n') text += "           ";
  }
  return text;
}

}  // namespace

std::string DescribeRecord(const WireRecord& record) {
  const Message& message = record.message;
  std::string text = fmt::format("{:<12} {} rank {} inc {:016x} seq {} version {} priority {} {}{}",
                                 Name(message.kind), Text(message.part), message.rank,
                                 message.incarnation, message.sequence, message.version,
                                 message.priority, Name(message.dtype), Flags(message.flags));
  if (message.arrivals > 0) text += fmt::format(" arrivals {}", message.arrivals);
  if (!message.meta.empty()) {
    text += fmt::format(" meta {}", message.meta.size());
    const std::optional<std::string> body = TextOfBody(message);
    constexpr std::size_t kShown = 64;
    const std::string shown = body ? *body : Hex(std::string_view(message.meta).substr(0, kShown));
    if (!shown.empty()) text += Indented(shown);
  }
  if (record.payload_bytes > 0) {
    text += Indented(fmt::format("payload of {} bytes: {}{}", record.payload_bytes,
                                 Hex(record.payload_begin),
                                 record.payload_begin.size() < record.payload_bytes ? " ..." : ""));
  }
  return text;
}

}  // namespace heddle::tools
