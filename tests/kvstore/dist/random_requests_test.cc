// Requests that no worker of ours makes: whatever its peers say, a server with arrays goes on, and
// serves who keeps to the protocol.
#include <heddle/engine.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/protocol/placement.h"
#include "kvstore/dist/protocol/server.h"
#include "kvstore/dist/server/array_parts.h"
#include "kvstore/dist/server/server_control.h"
#include "tests/kvstore/dist/random_bodies.h"
#include "tests/sanitized.h"

namespace heddle::kvstore::dist_test {
namespace {

using namespace dist;  // NOLINT(google-build-using-namespace)

constexpr int kRequestingRanks = 3;
constexpr std::uint32_t kWildStore = 0, kHonestStore = 1;
constexpr PlacementOptions kCutting{.num_servers = 2, .cut_bytes = 20'000, .slice_bytes = 16'384};

Payload PayloadOf(std::vector<std::byte> bytes, bool owned_alone) {
  const auto owner = std::make_shared<std::vector<std::byte>>(std::move(bytes));
  Payload payload(owner, std::span<const std::byte>(*owner));
  if (owned_alone) payload.set_owned_alone();
  return payload;
}

template <class T>
std::vector<std::byte> BytesOfAll(const std::vector<T>& items) {
  const auto bytes = std::as_bytes(std::span<const T>(items));
  return {bytes.begin(), bytes.end()};
}

// Server 0 of two, with its arrays.
class LoneServer {
 public:
  LoneServer(const std::string& engine, const ServerOptions& options)
      : engine_(OptionsOf(engine)), machine_(options, parts_, control_) {
    RosterBody roster{.rank = 0,
                      .num_workers = kRequestingRanks,
                      .num_servers = kCutting.num_servers,
                      .slice_bytes = kCutting.slice_bytes,
                      .cut_bytes = kCutting.cut_bytes};
    for (std::int32_t rank = 0; rank < kRequestingRanks; ++rank) {
      roster.nodes.push_back({{Role::kWorker, rank}, IncarnationOf(rank), "worker"});
    }
    for (std::int32_t rank = 0; rank < kCutting.num_servers; ++rank) {
      roster.nodes.push_back({{Role::kServer, rank}, kServerIncarnation, "server"});
    }
    parts_.SetPlacement(kCutting, /*self=*/0);
    Outputs out;
    machine_.OnRoster(now_, roster, out);
  }

  static Incarnation IncarnationOf(std::int32_t rank) {
    return 100 + static_cast<Incarnation>(rank);
  }
  static constexpr Incarnation kServerIncarnation = 200;

  // What is sent meanwhile.
  std::vector<Outgoing> Take(NodeId from, Message&& message) {
    Outputs out;
    machine_.OnMessage(now_, from, std::move(message), out);
    engine_.WaitForAll();
    return std::move(out.messages);
  }
  void Pass(Time time) {
    now_ += time;
    Outputs out;
    machine_.OnTime(now_, out);
    machine_.EndTurn(out);
    machine_.DescribeState(now_);
  }

 private:
  static EngineOptions OptionsOf(const std::string& engine) {
    EngineOptions options;
    options.type = engine;
    return options;
  }

  Time now_{std::chrono::seconds(1)};
  Engine engine_;
  ArrayParts parts_{engine_,
                    [this](const PartId& id, const std::exception_ptr& error) {
                      Outputs out;
                      machine_.OnUpdated(now_, id, error, out);
                    },
                    [this](const PartId& id, PassResult result) {
                      Outputs out;
                      machine_.OnPassed(now_, id, std::move(result), out);
                    }};
  ArrayControl control_{engine_, parts_, ServerProgram{.controller = [](int, std::string_view) {}},
                        [](const std::function<void()>& body) { body(); },
                        [this](const ControlId& id, ControlResult result) {
                          Outputs out;
                          machine_.OnControlDone(now_, id, std::move(result), out);
                        }};
  ServerMachine machine_;
};

// Of workers and of the other server: mostly possible one by one, together hardly ever.
class WildRequests {
 public:
  WildRequests(Random& random, std::string store_type)
      : random_(random), store_type_(std::move(store_type)) {
    const DType dtype = OneIn(4) ? DType::kFloat16 : DType::kFloat32;
    for (const auto& [name, shape, row_sparse] :
         {std::tuple{"dense", Shape{3}, false}, std::tuple{"rows", Shape{10, 2}, true},
          std::tuple{"cut", Shape{20'000}, false}, std::tuple{"none", Shape{0}, false}}) {
      const std::uint64_t id = KeyId(KeyRef(name), /*removals=*/0);
      keys_.push_back({id,
                       {Key(name), shape, dtype, row_sparse, 1, 0, 0},
                       PlaceKey(id, shape, dtype, row_sparse, kCutting)});
    }
  }

  Message OpenStore(std::int32_t rank) {
    Message request{.kind = Kind::kOpenStore, .part = ControlPart(kWildStore)};
    request.meta = Encode(OpenStoreBody{store_type_});
    return Numbered(rank, std::move(request), /*in_order=*/true);
  }
  Message OfWorker(std::int32_t rank, bool init) {
    Message request = OneIn(3) && !init ? AboutTheServer(rank) : AboutAPart(rank, init);
    if (OneIn(60)) request.meta = RandomText(random_);
    return Numbered(rank, std::move(request), !OneIn(30));
  }
  // To what worker `rank` has asked or will.
  Message Question(std::int32_t rank) {
    const Chosen chosen = Choose();
    Message question{.kind = OneIn(2) ? Kind::kAsk : Kind::kStatus, .part = chosen.id};
    question.meta = Encode(AskBody{Draw(200)});
    question.rank = rank;
    question.incarnation = LoneServer::IncarnationOf(rank);
    question.sequence = next_[{rank, chosen.id.key, chosen.id.part}] + Draw(2);
    return question;
  }
  Message OfServer() {
    const KeyForm& key = keys_[Draw(keys_.size())];
    Message sums{.kind = Kind::kBlockSums, .dtype = DType::kFloat64, .rank = 1};
    sums.incarnation = LoneServer::kServerIncarnation;
    sums.part = {kWildStore, 0, key.id};
    sums.sequence = Draw(6);
    sums.version = Draw(5);
    if (OneIn(6)) sums.flags = kFlagFailed;
    if (OneIn(2)) sums.meta = Encode(ErrorBody{ErrorBody::Code::kUpdateFailed, "theirs"});
    constexpr std::int64_t kBlock = 4096;
    std::size_t blocks = 0;
    for (const PlacedPart& part : key.parts) {
      if (part.server == 1)
        blocks += static_cast<std::size_t>((part.end - part.begin + kBlock - 1) / kBlock);
    }
    sums.payload = Bytes(OneIn(4) ? Draw(100) : blocks * 3 * sizeof(double));
    return sums;
  }

 private:
  struct KeyForm {
    std::uint64_t id;
    PartInfo whole;
    std::vector<PlacedPart> parts;
  };
  struct Chosen {
    const KeyForm& key;
    const PlacedPart& part;
    PartId id;
  };

  std::uint64_t Draw(std::uint64_t bound) { return Below(random_, bound); }
  bool OneIn(std::uint64_t count) { return Draw(count) == 0; }
  template <class T>
  const T& OneOf(std::span<const T> items) {
    return items[Draw(items.size())];
  }
  Payload Bytes(std::size_t count) {
    std::vector<std::byte> bytes(count);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(OneIn(4) ? Draw(256) : 0);
    return PayloadOf(std::move(bytes), OneIn(2));
  }
  Chosen Choose() {
    const KeyForm& key = keys_[Draw(keys_.size())];
    const PlacedPart& part = key.parts[Draw(key.parts.size())];
    return {key, part, {kWildStore, part.part, key.id}};
  }
  PartInfo InfoOf(const Chosen& chosen) const {
    PartInfo info = chosen.key.whole;
    info.num_parts = static_cast<std::uint32_t>(chosen.key.parts.size());
    info.begin = chosen.part.begin;
    info.end = chosen.part.end;
    return info;
  }
  std::uint64_t SomeVersion() { return OneIn(2) ? 0 : (Draw(4) << 32 | Draw(3)); }

  Message Numbered(std::int32_t rank, Message&& request, bool in_order) {
    request.rank = rank;
    request.incarnation = LoneServer::IncarnationOf(rank);
    std::uint64_t& next = next_[{rank, request.part.key, request.part.part}];
    request.sequence = in_order ? next++ : next + Draw(5) - std::min<std::uint64_t>(next, 2);
    return std::move(request);
  }

  Message AboutAPart(std::int32_t rank, bool init) {
    static constexpr Kind kKinds[] = {Kind::kInit,     Kind::kPush,     Kind::kPush, Kind::kPush,
                                      Kind::kPushPull, Kind::kPushPull, Kind::kPull, Kind::kRowPull,
                                      Kind::kReset,    Kind::kDescribe};
    const Chosen chosen = Choose();
    Message request{.kind = init ? Kind::kInit : OneIn(100) ? Kind::kRemove : OneOf<Kind>(kKinds)};
    request.part = chosen.id;
    request.priority = static_cast<std::int32_t>(Draw(3));
    request.version = SomeVersion();
    request.dtype = OneIn(6) ? kAllDTypes[Draw(kAllDTypes.size())] : chosen.key.whole.dtype;
    bool rows = chosen.key.whole.row_sparse || OneIn(5);
    if (request.kind == Kind::kInit || request.kind == Kind::kReset) {
      PartInfo info = InfoOf(chosen);
      if (OneIn(10)) info.begin += 4096;
      if (OneIn(10)) ++info.num_parts;
      if (OneIn(12)) info.shape = Shape{5};
      request.meta = Encode(InitBody{info});
      rows = chosen.key.whole.row_sparse;
      if (request.kind == Kind::kInit && rank != 0) {
        request.flags = kFlagNoValue;
        return request;
      }
    }
    switch (request.kind) {
      case Kind::kDescribe:
      case Kind::kRemove:
        break;
      case Kind::kPull:
        if (rows) request.flags = kFlagRowSparse;
        break;
      case Kind::kRowPull: {
        std::vector<std::int64_t> ids = {chosen.part.begin};
        if (OneIn(2)) ids.push_back(chosen.part.begin + 1);
        if (OneIn(10)) ids.push_back(static_cast<std::int64_t>(Draw(50)));
        request.payload = PayloadOf(BytesOfAll(ids), /*owned_alone=*/false);
        break;
      }
      default:
        GiveValue(chosen, rows, &request);
    }
    return request;
  }
  void GiveValue(const Chosen& chosen, bool rows, Message* request) {
    const auto extent = static_cast<std::size_t>(chosen.part.end - chosen.part.begin);
    if (rows) {
      request->flags |= kFlagRowSparse;
      const std::size_t row_bytes = (chosen.key.whole.row_sparse ? 2 : 1) * SizeOf(request->dtype);
      std::vector<std::int64_t> ids(Draw(3));
      for (std::size_t i = 0; i < ids.size(); ++i) {
        ids[i] = chosen.part.begin + static_cast<std::int64_t>(i * (OneIn(9) ? 3 : 1));
      }
      std::vector<std::byte> bytes = BytesOfAll(ids);
      bytes.resize(bytes.size() + ids.size() * row_bytes);
      request->payload = PayloadOf(std::move(bytes), OneIn(2));
    } else if (IsPush(request->kind) && OneIn(4)) {
      request->flags |= kFlagCompressed;
      request->payload = Bytes(OneIn(2) ? (extent + 15) / 16 * 4 : (extent + 31) / 32 * 4);
    } else {
      request->payload = Bytes(OneIn(12) ? Draw(100) : extent * SizeOf(request->dtype));
    }
    if (!IsPush(request->kind)) return;
    if (OneIn(10)) {
      request->flags = kFlagFailed;
      request->payload = {};
      request->meta = Encode(ErrorBody{ErrorBody::Code::kOther, "backward failed"});
    } else if (OneIn(3)) {
      request->flags |= kFlagRates;
      request->meta = Encode(RatesBody{{.learning_rate = 0.1, .weight_decay = 0}});
    }
  }

  Message AboutTheServer(std::int32_t rank) {
    static constexpr Kind kKinds[] = {
        Kind::kSetOptimizer, Kind::kSetOptimizer, Kind::kSetParameters, Kind::kSetCompression,
        Kind::kCommand,      Kind::kSaveStates,   Kind::kLoadStates,    Kind::kKeys};
    Message request{.kind = OneOf<Kind>(kKinds)};
    if (rank != 0 && OneIn(100)) request.kind = OneIn(2) ? Kind::kLeave : Kind::kCloseStore;
    request.part = ControlPart(OneIn(30) ? 7 : kWildStore);
    const Chosen chosen = Choose();
    switch (request.kind) {
      case Kind::kSetOptimizer:
      case Kind::kSetParameters:
        request.version = (1 + Draw(4)) << 32;
        if (request.kind == Kind::kSetParameters) request.version |= Draw(4);
        if (OneIn(4)) request.flags = kFlagFailed;
        request.meta = Encode(SomeOptimizer());
        break;
      case Kind::kSetCompression:
        if (OneIn(3)) request.flags = kFlagFailed;
        request.meta = Encode(CompressionBody{{.type = OneIn(8)   ? "none such"
                                                       : OneIn(2) ? "2bit"
                                                                  : "1bit",
                                               .threshold = 0.5}});
        break;
      case Kind::kCommand:
        request.meta = Encode(CommandBody{static_cast<std::int32_t>(Draw(3)), "body"});
        break;
      case Kind::kSaveStates:
        if (OneIn(2)) request.meta = Encode(SaveStatesBody{chosen.id});
        break;
      case Kind::kLoadStates: {
        const std::size_t bytes = static_cast<std::size_t>(chosen.part.end - chosen.part.begin) * 4;
        request.meta = Encode(SomeStates(chosen));
        request.payload = Bytes(OneIn(2) ? 2 * bytes : Draw(300));
        break;
      }
      case Kind::kKeys:
        if (OneIn(2)) request.meta = Encode(KeysBody{{Key("none")}});
        break;
      case Kind::kLeave: {
        LeaveBody body{.more = OneIn(2), .missing = {}};
        for (std::uint64_t i = Draw(4); i > 0; --i) {
          body.missing.push_back({Choose().id, Draw(3) << 32});
        }
        request.meta = Encode(body);
        break;
      }
      default: {
        CloseStoreBody body{.more = OneIn(4), .parts = {}};
        for (std::uint64_t i = Draw(4); i > 0; --i) body.parts.push_back({Choose().id, Draw(60)});
        request.meta = Encode(body);
      }
    }
    return request;
  }
  OptimizerBody SomeOptimizer() {
    static constexpr const char* kNames[] = {"sgd",          "adam", "lamb",   "lars",
                                             "groupadagrad", "ftrl", "signum", "none such"};
    OptimizerBody body{OneOf<const char*>(kNames), {}};
    if (OneIn(3)) body.parameters.emplace_back("momentum", static_cast<double>(Draw(3)) / 2);
    if (OneIn(20)) body.parameters.emplace_back("none such", 1);
    return body;
  }
  StatesBody SomeStates(const Chosen& chosen) {
    StatesBody body{SomeOptimizer(), {}};
    for (std::uint64_t i = Draw(3); i > 0; --i) {
      PartStates& part = body.parts.emplace_back();
      part.part = chosen.id;
      part.info = InfoOf(chosen);
      part.updates = static_cast<std::int64_t>(Draw(9));
      part.numbers.resize(OneIn(4) ? Draw(9) : 2);
      for (std::uint64_t array = Draw(3); array > 0; --array) {
        const std::int64_t extent = chosen.part.end - chosen.part.begin;
        part.arrays.push_back({OneIn(5) ? "master" : std::to_string(array - 1),
                               OneIn(5) ? kAllDTypes[Draw(kAllDTypes.size())] : DType::kFloat32,
                               OneIn(3) ? static_cast<std::int64_t>(Draw(50)) : extent});
      }
    }
    return body;
  }

  Random& random_;
  const std::string store_type_;
  std::vector<KeyForm> keys_;
  // By rank, key and part.
  std::map<std::tuple<std::int32_t, std::uint64_t, std::uint32_t>, std::uint64_t> next_;
};

// Worker 0 about a store of its own.
class HonestWorker {
 public:
  explicit HonestWorker(LoneServer& server) : server_(server) {
    Message open{.kind = Kind::kOpenStore, .part = ControlPart(kHonestStore)};
    open.meta = Encode(OpenStoreBody{"dist_async"});
    EXPECT_EQ(Ask(std::move(open), /*sequence=*/0).kind, Kind::kDone);
    const std::vector<PlacedPart> parts =
        PlaceKey(id_.key, Shape{3}, DType::kFloat32, /*row_sparse=*/false, kCutting);
    id_.part = parts[0].part;
    Message init{.kind = Kind::kInit, .part = id_};
    init.meta = Encode(InitBody{{Key(name_), Shape{3}, DType::kFloat32, false, 1, 0, 3}});
    init.payload = PayloadOf(BytesOfAll(std::vector<float>{0, 0, 0}), /*owned_alone=*/true);
    EXPECT_EQ(Ask(std::move(init), next_++).kind, Kind::kDone);
  }

  void ExpectServed(float value) {
    const std::vector<float> values = {value, value + 1, value + 2};
    Message push{.kind = Kind::kPush, .part = id_};
    push.payload = PayloadOf(BytesOfAll(values), /*owned_alone=*/true);
    Ask(std::move(push), next_++);  // acknowledged later, with others
    const Message pulled = Ask({.kind = Kind::kPull, .part = id_}, next_++);
    ASSERT_EQ(pulled.kind, Kind::kValue);
    ASSERT_EQ(pulled.payload.bytes(), 3 * sizeof(float));
    std::vector<float> got(3);
    std::memcpy(got.data(), pulled.payload.runs()[0].data(), pulled.payload.bytes());
    EXPECT_EQ(got, values);
  }

 private:
  // The last one that is the answer; none: an empty message.
  Message Ask(Message&& request, std::uint64_t sequence) {
    request.rank = 0;
    request.incarnation = LoneServer::IncarnationOf(0);
    request.sequence = sequence;
    const PartId part = request.part;
    Message answer;
    for (Outgoing& outgoing : server_.Take({Role::kWorker, 0}, std::move(request))) {
      if (outgoing.message.part == part) answer = std::move(outgoing.message);
    }
    return answer;
  }

  // One that lies on server 0.
  static std::string NameOnServerZero() {
    for (int i = 0;; ++i) {
      std::string name = "honest" + std::to_string(i);
      const std::uint64_t id = KeyId(KeyRef(std::string_view(name)), /*removals=*/0);
      if (PlaceKey(id, Shape{3}, DType::kFloat32, false, kCutting)[0].server == 0) return name;
    }
  }

  LoneServer& server_;
  const std::string name_ = NameOnServerZero();
  PartId id_{kHonestStore, 0, KeyId(KeyRef(std::string_view(name_)), /*removals=*/0)};
  std::uint64_t next_ = 0;
};

TEST(RandomRequests, AServerGoesOnAndServesWhoKeepsToTheProtocol) {
  const std::uint64_t first_seed = TestSeed();
  constexpr int kPrograms = Scaled(1000), kSteps = 400;
  for (int program = 0; program < kPrograms; ++program) {
    const std::uint64_t seed = first_seed + static_cast<std::uint64_t>(program);
    SCOPED_TRACE("HEDDLE_TEST_SEED=" + std::to_string(seed));
    Random random(seed);
    LoneServer server(Below(random, 2) == 0 ? "serial" : "seeded",
                      {.unfinished_bytes_max = Below(random, 2) == 0 ? 100u : 1u << 30,
                       .answers_kept = Below(random, 3)});
    HonestWorker honest(server);
    WildRequests wild(random, Below(random, 2) == 0 ? "dist_sync" : "dist_async");
    for (std::int32_t rank = 0; rank < kRequestingRanks; ++rank) {
      server.Take({Role::kWorker, rank}, wild.OpenStore(rank));
    }
    for (int step = 0; step < kSteps; ++step) {
      const auto rank = static_cast<std::int32_t>(Below(random, kRequestingRanks));
      if (Below(random, 12) == 0) {
        server.Take({Role::kServer, 1}, wild.OfServer());
      } else if (Below(random, 40) == 0) {
        server.Take({Role::kWorker, rank}, wild.Question(rank));
      } else {
        server.Take({Role::kWorker, rank}, wild.OfWorker(rank, /*init=*/step < 40));
      }
      if (Below(random, 20) == 0) server.Pass(std::chrono::milliseconds(Below(random, 30'000)));
      if (step % 50 != 49) continue;
      ASSERT_NO_FATAL_FAILURE(honest.ExpectServed(static_cast<float>(step)));
    }
  }
}

}  // namespace
}  // namespace heddle::kvstore::dist_test
