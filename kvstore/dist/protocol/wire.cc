#include "kvstore/dist/protocol/wire.h"

#include <heddle/dtype.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string_view>

#include <fmt/format.h>

#include "base/check.h"
#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/protocol/codec.h"

namespace heddle::kvstore::dist {
namespace {

constexpr std::string_view kMagic = "HEDL";

// Where the fields of a header are.
constexpr std::size_t kKindAt = 0;
constexpr std::size_t kFlagsAt = 1;
constexpr std::size_t kDTypeAt = 2;
constexpr std::size_t kArrivalsAt = 3;
constexpr std::size_t kMetaBytesAt = 4;
constexpr std::size_t kPayloadBytesAt = 8;
constexpr std::size_t kRankAt = 16;
constexpr std::size_t kPriorityAt = 20;
constexpr std::size_t kIncarnationAt = 24;
constexpr std::size_t kKeyAt = 32;
constexpr std::size_t kPartAt = 40;
constexpr std::size_t kStoreAt = 44;
constexpr std::size_t kSequenceAt = 48;
constexpr std::size_t kVersionAt = 56;
static_assert(kVersionAt + sizeof(Message::version) == kHeaderBytes);

// The flags that messages of a kind may have.
std::uint8_t FlagsOf(Kind kind) {
  switch (kind) {
    case Kind::kBarrier:
      return kFlagLast;
    case Kind::kInit:
      return kFlagRowSparse | kFlagNoValue;
    case Kind::kPush:
    case Kind::kPushPull:
      return kFlagRowSparse | kFlagCompressed | kFlagRates | kFlagFailed;
    case Kind::kPull:
    case Kind::kRowPull:
    case Kind::kReset:
    case Kind::kValue:
      return kFlagRowSparse;
    case Kind::kSetOptimizer:
    case Kind::kSetCompression:
    case Kind::kBlockSums:
      return kFlagFailed;
    default:
      return 0;
  }
}

bool MayHavePayload(Kind kind) {
  switch (kind) {
    case Kind::kInit:
    case Kind::kPush:
    case Kind::kPushPull:
    case Kind::kRowPull:
    case Kind::kReset:
    case Kind::kLoadStates:
    case Kind::kValue:
    case Kind::kDone:  // the arrays of kSaveStates
    case Kind::kBlockSums:
      return true;
    default:
      return false;
  }
}

std::string_view AsText(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

bool IsHttp(std::string_view first) {
  for (const std::string_view method :
       {"GET ", "HEAD ", "POST ", "PUT ", "DELETE ", "OPTIONS ", "CONNECT ", "PRI * HTTP/"}) {
    if (!first.empty() && method.starts_with(first.substr(0, method.size()))) return true;
  }
  return false;
}

}  // namespace

std::array<std::byte, kPreambleBytes> EncodePreamble() {
  std::array<std::byte, kPreambleBytes> preamble{};
  std::memcpy(preamble.data(), kMagic.data(), kMagic.size());
  StoreLittleEndian(kWireVersion, &preamble[4]);
  StoreLittleEndian(static_cast<std::uint16_t>(kHeaderBytes), &preamble[6]);
  return preamble;  // the rest is reserved
}

std::string CheckPreamble(std::span<const std::byte> first) {
  const auto expected = EncodePreamble();
  const std::string_view given = AsText(first.first(std::min(first.size(), kPreambleBytes)));
  if (given == AsText(expected).substr(0, given.size())) return {};
  if (IsHttp(given)) return "it speaks HTTP; this port is for processes of a heddle job";
  if (given.starts_with("\x16\x03")) {
    return "expected no TLS, given TLS (HEDDLE_TLS_CERTIFICATE)";
  }
  if (!given.starts_with(kMagic)) {
    return fmt::format("it does not speak heddle's protocol: expected it to begin with '{}'",
                       kMagic);
  }
  if (given.size() < 6) return {};  // the second byte of the version will tell
  const auto version = LoadLittleEndian<std::uint16_t>(given.data() + 4);
  if (version != kWireVersion) {
    return fmt::format("expected version {} of heddle's protocol, it speaks version {}",
                       kWireVersion, version);
  }
  return "its preamble is damaged";
}

std::string AnswerToStranger(std::span<const std::byte> first, const std::string& why) {
  if (IsHttp(AsText(first))) {
    const std::string page = "This port is for processes of a heddle job.\n";
    return fmt::format(
        "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n"
        "Connection: close\r\n\r\n{}",
        page.size(), page);
  }
  Message refusal{.kind = Kind::kRefused};
  refusal.meta = Encode(ErrorBody{.code = ErrorBody::Code::kNetwork, .message = why});
  std::array<std::byte, kHeaderBytes> header;
  EncodeHeader(refusal, header);
  const auto preamble = EncodePreamble();
  return fmt::format("{}{}{}", AsText(preamble), AsText(header), refusal.meta);
}

void EncodeHeader(const Message& message, std::span<std::byte, kHeaderBytes> header) {
  CHECK(message.meta.size() <= std::numeric_limits<std::uint32_t>::max());
  std::byte* const to = header.data();
  StoreLittleEndian(message.kind, to + kKindAt);
  StoreLittleEndian(message.flags, to + kFlagsAt);
  StoreLittleEndian(message.dtype, to + kDTypeAt);
  StoreLittleEndian(message.arrivals, to + kArrivalsAt);
  StoreLittleEndian(static_cast<std::uint32_t>(message.meta.size()), to + kMetaBytesAt);
  StoreLittleEndian(message.payload.bytes(), to + kPayloadBytesAt);
  StoreLittleEndian(message.rank, to + kRankAt);
  StoreLittleEndian(message.priority, to + kPriorityAt);
  StoreLittleEndian(message.incarnation, to + kIncarnationAt);
  StoreLittleEndian(message.part.key, to + kKeyAt);
  StoreLittleEndian(message.part.part, to + kPartAt);
  StoreLittleEndian(message.part.store, to + kStoreAt);
  StoreLittleEndian(message.sequence, to + kSequenceAt);
  StoreLittleEndian(message.version, to + kVersionAt);
}

void SetArrivals(std::uint8_t arrivals, std::span<std::byte, kHeaderBytes> header) {
  StoreLittleEndian(arrivals, header.data() + kArrivalsAt);
}

std::string DecodeHeader(std::span<const std::byte, kHeaderBytes> header, const WireLimits& limits,
                         Message* message, std::uint32_t* meta_bytes,
                         std::uint64_t* payload_bytes) {
  const std::byte* const from = header.data();
  message->kind = LoadLittleEndian<Kind>(from + kKindAt);
  message->flags = LoadLittleEndian<std::uint8_t>(from + kFlagsAt);
  message->dtype = LoadLittleEndian<DType>(from + kDTypeAt);
  message->arrivals = LoadLittleEndian<std::uint8_t>(from + kArrivalsAt);
  *meta_bytes = LoadLittleEndian<std::uint32_t>(from + kMetaBytesAt);
  *payload_bytes = LoadLittleEndian<std::uint64_t>(from + kPayloadBytesAt);
  message->rank = LoadLittleEndian<std::int32_t>(from + kRankAt);
  message->priority = LoadLittleEndian<std::int32_t>(from + kPriorityAt);
  message->incarnation = LoadLittleEndian<Incarnation>(from + kIncarnationAt);
  message->part.key = LoadLittleEndian<std::uint64_t>(from + kKeyAt);
  message->part.part = LoadLittleEndian<std::uint32_t>(from + kPartAt);
  message->part.store = LoadLittleEndian<std::uint32_t>(from + kStoreAt);
  message->sequence = LoadLittleEndian<std::uint64_t>(from + kSequenceAt);
  message->version = LoadLittleEndian<std::uint64_t>(from + kVersionAt);

  const std::string_view name = Name(message->kind);
  if (name.empty()) {
    return fmt::format("a message of unknown kind {}", static_cast<int>(message->kind));
  }
  if ((message->flags & ~FlagsOf(message->kind)) != 0) {
    return fmt::format("a {} with flags {:#04x}: expected none but {:#04x}", name, message->flags,
                       FlagsOf(message->kind));
  }
  if (static_cast<std::size_t>(message->dtype) >= kAllDTypes.size()) {
    return fmt::format("a {} of unknown dtype {}", name, static_cast<int>(message->dtype));
  }
  if (*meta_bytes > limits.meta_bytes_max) {
    return fmt::format("a {} with {} bytes of meta: expected at most {}", name, *meta_bytes,
                       limits.meta_bytes_max);
  }
  const std::uint64_t payload_bytes_max =
      MayHavePayload(message->kind) ? limits.payload_bytes_max : 0;
  if (*payload_bytes > payload_bytes_max) {
    return fmt::format("a {} with {} bytes of payload: expected at most {}", name, *payload_bytes,
                       payload_bytes_max);
  }
  return {};
}

}  // namespace heddle::kvstore::dist
