#include "tests/kvstore/dist/random_bodies.h"

#include <heddle/dtype.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <span>
#include <utility>

#include "kvstore/dist/protocol/wire.h"

namespace heddle::kvstore::dist_test {
namespace {

using namespace dist;  // NOLINT(google-build-using-namespace)

double AnyDouble(Random& random) { return std::bit_cast<double>(random()); }  // NaNs too

template <class T>
std::vector<T> Some(Random& random, const std::function<T(Random&)>& make) {
  std::vector<T> items(Below(random, 4));
  for (T& item : items) item = make(random);
  return items;
}

NodeId RandomNode(Random& random) {
  return {static_cast<Role>(1 + Below(random, 3)), static_cast<std::int32_t>(random())};
}

PartId RandomPart(Random& random) {
  return {static_cast<std::uint32_t>(random()), static_cast<std::uint32_t>(random()), random()};
}

DType RandomDType(Random& random) { return kAllDTypes[Below(random, kAllDTypes.size())]; }

Key RandomKey(Random& random) {
  if (Below(random, 2) == 0) return static_cast<std::int64_t>(random());
  return RandomText(random);
}

PartInfo RandomInfo(Random& random) {
  PartInfo info;
  info.key = RandomKey(random);
  std::vector<std::int64_t> extents(Below(random, 7));
  for (std::int64_t& extent : extents) extent = static_cast<std::int64_t>(Below(random, 400));
  info.shape = Shape(extents);
  info.dtype = RandomDType(random);
  info.row_sparse = !extents.empty() && Below(random, 2) == 0;
  info.num_parts = static_cast<std::uint32_t>(2 + Below(random, 0xfffffffe));  // 1: all of it
  const std::int64_t places = info.row_sparse ? extents[0] : info.shape.size();
  info.end = static_cast<std::int64_t>(Below(random, static_cast<std::uint64_t>(places) + 1));
  info.begin = static_cast<std::int64_t>(Below(random, static_cast<std::uint64_t>(info.end) + 1));
  return info;
}

std::pair<std::string, double> RandomParameter(Random& random) {
  return {RandomText(random), AnyDouble(random)};
}

OptimizerBody RandomOptimizer(Random& random) {
  return {RandomText(random), Some<std::pair<std::string, double>>(random, RandomParameter)};
}

PartStates RandomStates(Random& random) {
  PartStates states;
  states.part = RandomPart(random);
  states.info = RandomInfo(random);
  states.updates = static_cast<std::int64_t>(random());
  states.numbers = Some<double>(random, AnyDouble);
  states.arrays = Some<PartStates::Array>(random, [](Random& r) {
    return PartStates::Array{RandomText(r), RandomDType(r), static_cast<std::int64_t>(r() >> 1)};
  });
  return states;
}

JoinBody MakeRandom(Random& random, JoinBody*) {
  const NodeId node = RandomNode(random);
  return {node.role,
          node.rank,
          random(),
          RandomText(random),
          static_cast<std::int32_t>(random()),
          static_cast<std::int32_t>(random())};
}
RosterBody MakeRandom(Random& random, RosterBody*) {
  RosterBody body;
  body.rank = static_cast<std::int32_t>(random());
  body.num_workers = static_cast<std::int32_t>(1 + Below(random, 1000));
  body.num_servers = static_cast<std::int32_t>(1 + Below(random, 1000));
  body.epoch = random();
  body.slice_bytes = static_cast<std::int64_t>(1 + Below(random, 1u << 30));
  body.cut_bytes = static_cast<std::int64_t>(Below(random, 1u << 30));
  body.nodes = Some<NodeEntry>(random, [](Random& r) {
    return NodeEntry{RandomNode(r), r(), RandomText(r)};
  });
  return body;
}
FailureBody MakeRandom(Random& random, FailureBody*) {
  return {RandomNode(random), RandomText(random), RandomText(random)};
}
StateBody MakeRandom(Random& random, StateBody*) {
  return {random(),          random(), random(), random(), static_cast<std::uint32_t>(random()),
          RandomText(random)};
}
InitBody MakeRandom(Random& random, InitBody*) { return {RandomInfo(random)}; }
RatesBody MakeRandom(Random& random, RatesBody*) {
  return {{AnyDouble(random), AnyDouble(random)}};
}
ErrorBody MakeRandom(Random& random, ErrorBody*) {
  return {static_cast<ErrorBody::Code>(Below(random, 11)), RandomText(random)};
}
AcksBody MakeRandom(Random& random, AcksBody*) {
  return {Some<AcksBody::Ack>(random, [](Random& r) { return AcksBody::Ack{RandomPart(r), r()}; })};
}
OpenStoreBody MakeRandom(Random& random, OpenStoreBody*) { return {RandomText(random)}; }
OptimizerBody MakeRandom(Random& random, OptimizerBody*) { return RandomOptimizer(random); }
CompressionBody MakeRandom(Random& random, CompressionBody*) {
  return {{RandomText(random), AnyDouble(random)}};
}
CommandBody MakeRandom(Random& random, CommandBody*) {
  return {static_cast<std::int32_t>(random()), RandomText(random)};
}
KeysBody MakeRandom(Random& random, KeysBody*) { return {Some<Key>(random, RandomKey)}; }
CloseStoreBody MakeRandom(Random& random, CloseStoreBody*) {
  using Requests = CloseStoreBody::Requests;
  return {Below(random, 2) == 0, Some<Requests>(random, [](Random& r) {
            return Requests{RandomPart(r), r()};
          })};
}
LeaveBody MakeRandom(Random& random, LeaveBody*) {
  return {Below(random, 2) == 0, Some<LeaveBody::Push>(random, [](Random& r) {
            return LeaveBody::Push{RandomPart(r), r()};
          })};
}
AskBody MakeRandom(Random& random, AskBody*) { return {random()}; }
TextBody MakeRandom(Random& random, TextBody*) { return {RandomText(random)}; }
SaveStatesBody MakeRandom(Random& random, SaveStatesBody*) { return {RandomPart(random)}; }
StatesBody MakeRandom(Random& random, StatesBody*) {
  return {RandomOptimizer(random), Some<PartStates>(random, RandomStates)};
}

template <class Body>
BodyType TypeOf(const char* name) {
  return {name,
          [](Random& random) { return Encode(MakeRandom(random, static_cast<Body*>(nullptr))); },
          [](std::string_view meta, std::string* again) {
            Body body;
            if (!Decode(meta, &body)) return false;
            *again = Encode(body);
            return true;
          }};
}

// Kinds, the flags that they may have, whether they may have a payload, and the body in their meta.
struct KindRow {
  Kind kind;
  std::uint8_t flags;
  bool payload;
  const char* body;  // null: any
};
constexpr KindRow kKindRows[] = {
    {Kind::kRefused, 0, false, "ErrorBody"},
    {Kind::kReceived, 0, false, nullptr},
    {Kind::kJoin, 0, false, "JoinBody"},
    {Kind::kRoster, 0, false, "RosterBody"},
    {Kind::kHeartbeat, 0, false, "StateBody"},
    {Kind::kPeerDown, 0, false, "FailureBody"},
    {Kind::kJobFailed, 0, false, "FailureBody"},
    {Kind::kBarrier, kFlagLast, false, nullptr},
    {Kind::kStatusReply, 0, false, "TextBody"},
    {Kind::kInit, kFlagRowSparse | kFlagNoValue, true, "InitBody"},
    {Kind::kPush, kFlagRowSparse | kFlagCompressed | kFlagRates | kFlagFailed, true, "RatesBody"},
    {Kind::kPushPull, kFlagRowSparse | kFlagCompressed | kFlagRates, true, "RatesBody"},
    {Kind::kPull, kFlagRowSparse, false, nullptr},
    {Kind::kRowPull, kFlagRowSparse, true, nullptr},
    {Kind::kReset, kFlagRowSparse, true, "InitBody"},
    {Kind::kDescribe, 0, false, nullptr},
    {Kind::kRemove, 0, false, nullptr},
    {Kind::kOpenStore, 0, false, "OpenStoreBody"},
    {Kind::kSetOptimizer, kFlagFailed, false, "OptimizerBody"},
    {Kind::kSetCompression, kFlagFailed, false, "CompressionBody"},
    {Kind::kCommand, 0, false, "CommandBody"},
    {Kind::kLoadStates, 0, true, "StatesBody"},
    {Kind::kCloseStore, 0, false, "CloseStoreBody"},
    {Kind::kKeys, 0, false, "KeysBody"},
    {Kind::kLeave, 0, false, "LeaveBody"},
    {Kind::kAcks, 0, false, "AcksBody"},
    {Kind::kValue, kFlagRowSparse, true, nullptr},
    {Kind::kDone, 0, true, "KeysBody"},
    {Kind::kError, 0, false, "ErrorBody"},
    {Kind::kAsk, 0, false, "AskBody"},
    {Kind::kBlockSums, kFlagFailed, true, nullptr},
};

}  // namespace

std::uint64_t TestSeed() {
  const char* const text = std::getenv("HEDDLE_TEST_SEED");
  const std::uint64_t seed =
      text != nullptr ? std::strtoull(text, nullptr, 10) : std::random_device{}();
  std::printf("HEDDLE_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

std::uint64_t Below(Random& random, std::uint64_t bound) {
  return std::uniform_int_distribution<std::uint64_t>(0, bound - 1)(random);
}

std::string RandomText(Random& random) {
  std::string text(Below(random, 3) == 0 ? 0 : Below(random, 20), '\0');
  for (char& c : text) c = static_cast<char>(Below(random, 256));
  return text;
}

Message RandomMessage(Random& random) {
  const KindRow& row = kKindRows[Below(random, std::size(kKindRows))];
  Message message;
  message.kind = row.kind;
  message.flags = static_cast<std::uint8_t>(random() & row.flags);
  message.dtype = RandomDType(random);
  message.rank = static_cast<std::int32_t>(random());
  message.priority = static_cast<std::int32_t>(random());
  message.incarnation = random();
  message.part = RandomPart(random);
  message.sequence = random();
  message.version = random();
  if (row.body == nullptr) {
    message.meta = RandomText(random);
  } else {
    for (const BodyType& type : BodyTypes()) {
      if (type.name == row.body) message.meta = type.random(random);
    }
  }
  if (row.payload && Below(random, 2) == 0) {
    auto bytes = std::make_shared<std::vector<std::byte>>(Below(random, 300));
    for (std::byte& byte : *bytes) byte = static_cast<std::byte>(random());
    const std::span<const std::byte> all(*bytes);
    const std::size_t half = all.size() / 2;
    message.payload = Payload(bytes, {all.first(half), all.subspan(half)});
  }
  return message;
}

const std::vector<BodyType>& BodyTypes() {
  static const std::vector<BodyType> types = {TypeOf<JoinBody>("JoinBody"),
                                              TypeOf<RosterBody>("RosterBody"),
                                              TypeOf<FailureBody>("FailureBody"),
                                              TypeOf<StateBody>("StateBody"),
                                              TypeOf<InitBody>("InitBody"),
                                              TypeOf<RatesBody>("RatesBody"),
                                              TypeOf<ErrorBody>("ErrorBody"),
                                              TypeOf<AcksBody>("AcksBody"),
                                              TypeOf<OpenStoreBody>("OpenStoreBody"),
                                              TypeOf<OptimizerBody>("OptimizerBody"),
                                              TypeOf<CompressionBody>("CompressionBody"),
                                              TypeOf<CommandBody>("CommandBody"),
                                              TypeOf<KeysBody>("KeysBody"),
                                              TypeOf<CloseStoreBody>("CloseStoreBody"),
                                              TypeOf<LeaveBody>("LeaveBody"),
                                              TypeOf<AskBody>("AskBody"),
                                              TypeOf<TextBody>("TextBody"),
                                              TypeOf<SaveStatesBody>("SaveStatesBody"),
                                              TypeOf<StatesBody>("StatesBody")};
  return types;
}

std::string EncodeMessage(const Message& message) {
  std::array<std::byte, kHeaderBytes> header;
  EncodeHeader(message, header);
  std::string bytes(reinterpret_cast<const char*>(header.data()), header.size());
  bytes += message.meta;
  for (const std::span<const std::byte> run : message.payload.runs()) {
    bytes.append(reinterpret_cast<const char*>(run.data()), run.size());
  }
  return bytes;
}

}  // namespace heddle::kvstore::dist_test
