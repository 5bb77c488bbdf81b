// docs/wire.md says what the code does: its tables are compared with it, its examples are parsed.
#include <heddle/dtype.h>

#include <array>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/protocol/placement.h"
#include "kvstore/dist/protocol/wire.h"
#include "kvstore/dist/transport/tcp/handshake.h"

namespace heddle::kvstore::dist_test {
namespace {

using namespace dist;  // NOLINT(google-build-using-namespace)

using Row = std::vector<std::string>;

std::string Trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" `");
  if (begin == std::string_view::npos) return {};
  return std::string(text.substr(begin, text.find_last_not_of(" `") - begin + 1));
}

class WireDoc : public testing::Test {
 protected:
  WireDoc() {
    std::ifstream file(HEDDLE_WIRE_PAGE);
    std::string line, block;
    bool in_block = false;
    std::vector<Row>* table = nullptr;
    while (std::getline(file, line)) {
      if (line.starts_with("```")) {
        in_block = !in_block;
        if (in_block) block = Trimmed(line.substr(line.find(' ') + 1));
      } else if (in_block) {
        AddHex(line.substr(0, line.find('#')), &blocks_[block]);
      } else if (line.starts_with("|")) {
        Row row;
        std::istringstream cells(line.substr(1));
        for (std::string cell; std::getline(cells, cell, '|');) row.push_back(Trimmed(cell));
        if (table == nullptr) {  // a table is known by its heads
          std::string name;
          for (const std::string& head : row) name += (name.empty() ? "" : ", ") + head;
          table = &tables_[name];
        } else if (row[0] != "---") {
          table->push_back(row);
        }
      }
      if (!line.starts_with("|")) table = nullptr;
    }
  }

  static void AddHex(const std::string& text, std::string* bytes) {
    std::istringstream words(text);
    for (std::string word; words >> word;) {
      *bytes += static_cast<char>(std::stoi(word, nullptr, 16));
    }
  }

  // The example, its header decoded; its meta is read into `body`.
  template <class Body>
  Message Example(const std::string& name, Body* body) {
    const std::string& bytes = blocks_[name];
    Message message;
    if (bytes.size() < kHeaderBytes) {
      ADD_FAILURE() << "no example " << name;
      return message;
    }
    std::uint32_t meta_bytes = 0;
    std::uint64_t payload_bytes = 0;
    const std::span<const std::byte, kHeaderBytes> header(
        reinterpret_cast<const std::byte*>(bytes.data()), kHeaderBytes);
    EXPECT_EQ(DecodeHeader(header, {}, &message, &meta_bytes, &payload_bytes), "");
    EXPECT_EQ(bytes.size(), kHeaderBytes + meta_bytes + payload_bytes);
    message.meta = bytes.substr(kHeaderBytes, meta_bytes);
    payload_ = bytes.substr(kHeaderBytes + meta_bytes);
    message.payload = Payload(nullptr, std::as_bytes(std::span(payload_)));
    EXPECT_TRUE(Decode(message.meta, body));
    EXPECT_EQ(Encode(*body), message.meta);
    // The fields that the text does not name are as a sender leaves them.
    std::array<std::byte, kHeaderBytes> again;
    EncodeHeader(message, again);
    EXPECT_EQ(std::memcmp(again.data(), bytes.data(), kHeaderBytes), 0);
    examples_.insert(name);
    return message;
  }

  std::map<std::string, std::string> blocks_;
  std::map<std::string, std::vector<Row>> tables_;
  std::string payload_;
  std::set<std::string> examples_;
};

constexpr Incarnation kIncarnation = 0x1122334455667788;

TEST_F(WireDoc, ThePreambleIsTheOneThatIsSent) {
  const auto preamble = EncodePreamble();
  ASSERT_EQ(blocks_["preamble"].size(), kPreambleBytes);
  EXPECT_EQ(std::memcmp(blocks_["preamble"].data(), preamble.data(), kPreambleBytes), 0);
}

TEST_F(WireDoc, TheHelloHasAllItsFields) {
  const std::vector<Row>& rows = tables_["offset, bytes, hello, challenge"];
  std::size_t end = 0;
  for (const Row& row : rows) {
    EXPECT_EQ(std::stoul(row[0]), end) << row[2];
    end += std::stoul(row[1]);
  }
  EXPECT_EQ(Encode(HelloBody{.node = {Role::kWorker, 0}}).size(), end);
}

TEST_F(WireDoc, TheHeaderHasEachFieldAtItsPlace) {
  const std::vector<Row>& rows = tables_["offset, bytes, field, meaning"];
  ASSERT_EQ(rows.size(), 14u);
  Message message{.kind = Kind::kPush};
  std::array<std::byte, kHeaderBytes> plain;
  std::size_t end = 0;
  EncodeHeader(message, plain);
  for (const Row& row : rows) {
    SCOPED_TRACE(row[2]);
    const std::size_t offset = std::stoul(row[0]);
    const std::size_t size = std::stoul(row[1]);
    EXPECT_EQ(offset, end);
    end = offset + size;
    Message changed = message;
    const std::string& field = row[2];
    const std::array<std::byte, 1> byte{};
    if (field == "kind") changed.kind = Kind::kReset;
    if (field == "flags") changed.flags = 0xff;
    if (field == "dtype") changed.dtype = DType::kBool;
    if (field == "meta bytes") changed.meta = "x";
    if (field == "payload bytes") changed.payload = Payload(nullptr, std::span(byte));
    if (field == "arrivals") changed.arrivals = 0xff;
    if (field == "rank") changed.rank = -1;
    if (field == "priority") changed.priority = -1;
    if (field == "incarnation") changed.incarnation = ~Incarnation{0};
    if (field == "key") changed.part.key = ~std::uint64_t{0};
    if (field == "part") changed.part.part = ~std::uint32_t{0};
    if (field == "store") changed.part.store = ~std::uint32_t{0};
    if (field == "sequence") changed.sequence = ~std::uint64_t{0};
    if (field == "version") changed.version = ~std::uint64_t{0};
    std::array<std::byte, kHeaderBytes> header;
    EncodeHeader(changed, header);
    for (std::size_t i = 0; i < kHeaderBytes; ++i) {
      const bool inside = i >= offset && i < end;
      const bool all_of_it = size > 1 && field.find("bytes") == std::string::npos;
      if (!inside) {
        EXPECT_EQ(header[i], plain[i]) << i;
      } else if (all_of_it) {
        EXPECT_NE(header[i], plain[i]) << i;
      }
    }
    EXPECT_NE(header[offset], plain[offset]);
  }
  EXPECT_EQ(end, kHeaderBytes);
}

TEST_F(WireDoc, KindsHaveTheirNumbersNamesFlagsAndPayloads) {
  std::set<int> kinds;
  for (const Row& row : tables_["kind, name, flags, payload, meta, from, to: meaning"]) {
    const int number = std::stoi(row[0]);
    SCOPED_TRACE(row[1]);
    kinds.insert(number);
    EXPECT_EQ(Name(static_cast<Kind>(number)), row[1]);
    const auto refused = [&](std::uint8_t flags, std::byte payload) {
      Message message{.kind = static_cast<Kind>(number), .flags = flags};
      std::array<std::byte, kHeaderBytes> header;
      EncodeHeader(message, header);
      header[8] = payload;
      std::uint32_t meta_bytes = 0;
      std::uint64_t payload_bytes = 0;
      return !DecodeHeader(header, {}, &message, &meta_bytes, &payload_bytes).empty();
    };
    const auto flags = static_cast<std::uint8_t>(std::stoi(row[2]));
    for (int flag = 1; flag < 256; flag *= 2) {
      EXPECT_EQ(refused(static_cast<std::uint8_t>(flag), {}), (flags & flag) == 0) << flag;
    }
    EXPECT_EQ(refused(0, std::byte{1}), row[3] == "no");
  }
  for (int number = 0; number < 256; ++number) {
    EXPECT_EQ(Name(static_cast<Kind>(number)).empty(), !kinds.contains(number)) << number;
  }
}

TEST_F(WireDoc, DTypesFlagsAndCodesHaveTheirNumbers) {
  const std::vector<Row>& dtypes = tables_["dtype, name"];
  ASSERT_EQ(dtypes.size(), kAllDTypes.size());
  for (const Row& row : dtypes) {
    EXPECT_EQ(Name(static_cast<DType>(std::stoi(row[0]))), row[1]);
  }
  std::map<std::string, int> flags;
  for (const Row& row : tables_["flag, name, meaning"]) flags[row[1]] = std::stoi(row[0]);
  const std::map<std::string, int> expected = {
      {"row_sparse", kFlagRowSparse}, {"compressed", kFlagCompressed}, {"rates", kFlagRates},
      {"failed", kFlagFailed},        {"no_value", kFlagNoValue},      {"last", kFlagLast}};
  EXPECT_EQ(flags, expected);
  using Code = ErrorBody::Code;
  const std::map<Code, std::string> becomes = {{Code::kOther, "Error"},
                                               {Code::kInvalidArgument, "InvalidArgument"},
                                               {Code::kInvalidState, "InvalidState"},
                                               {Code::kUnknownKey, "UnknownKey"},
                                               {Code::kInputFailed, "OpError"},
                                               {Code::kUpdateFailed, "OpError"},
                                               {Code::kNetwork, "NetworkError"},
                                               {Code::kTimeout, "TimeoutError"},
                                               {Code::kOutOfMemory, "OutOfMemory"},
                                               {Code::kIo, "IoError"},
                                               {Code::kOp, "OpError"}};
  std::map<Code, std::string> codes;
  for (const Row& row : tables_["code, becomes"]) {
    codes[static_cast<Code>(std::stoi(row[0]))] = row[1].substr(0, row[1].find(':'));
  }
  EXPECT_EQ(codes, becomes);
}

TEST_F(WireDoc, TheExamplesSayWhatTheTextAboveThemSays) {
  RatesBody rates;
  const Message push = Example("push", &rates);
  EXPECT_EQ(push.kind, Kind::kPush);
  EXPECT_EQ(push.flags, kFlagRates);
  EXPECT_EQ(push.rank, 1);
  EXPECT_EQ(push.priority, -2);
  EXPECT_EQ(push.incarnation, kIncarnation);
  EXPECT_EQ(push.part, (PartId{.store = 0, .part = 2, .key = KeyId("weight")}));
  EXPECT_EQ(push.sequence, 7u);
  EXPECT_EQ(push.version, (std::uint64_t{1} << 32) | 3);
  EXPECT_EQ(rates.rates.learning_rate, 0.1);
  EXPECT_EQ(rates.rates.weight_decay, 0.0001);
  const std::array<float, 4> values = {1, 2, 3, 4};
  ASSERT_EQ(payload_.size(), sizeof(values));
  EXPECT_EQ(std::memcmp(payload_.data(), values.data(), sizeof(values)), 0);

  InitBody init;
  EXPECT_EQ(Example("init", &init).flags, kFlagNoValue);
  EXPECT_EQ(init.info, (PartInfo{.key = std::string("weight"),
                                 .shape = {300, 5},
                                 .dtype = DType::kFloat32,
                                 .row_sparse = false,
                                 .num_parts = 1,
                                 .begin = 0,
                                 .end = 1500}));

  ErrorBody error;
  EXPECT_EQ(Example("error", &error).kind, Kind::kError);
  EXPECT_EQ(error.code, ErrorBody::Code::kUnknownKey);
  EXPECT_EQ(error.message, "push key 'b': it was never initialised");

  AcksBody acks;
  EXPECT_EQ(Example("acks", &acks).kind, Kind::kAcks);
  ASSERT_EQ(acks.acks.size(), 1u);
  EXPECT_EQ(acks.acks[0].part, push.part);
  EXPECT_EQ(acks.acks[0].sequence, push.sequence);

  JoinBody join;
  EXPECT_EQ(Example("join", &join).kind, Kind::kJoin);
  EXPECT_EQ(join.role, Role::kWorker);
  EXPECT_EQ(join.rank, -1);
  EXPECT_EQ(join.incarnation, kIncarnation);
  EXPECT_EQ(join.address, "10.0.0.7:40112");
  EXPECT_EQ(join.num_workers, 3);
  EXPECT_EQ(join.num_servers, 2);

  RosterBody roster;
  EXPECT_EQ(Example("roster", &roster).kind, Kind::kRoster);
  EXPECT_EQ(roster.slice_bytes, 1 << 20);
  EXPECT_EQ(roster.cut_bytes, 4'000'000);
  ASSERT_EQ(roster.nodes.size(), 2u);
  EXPECT_EQ(roster.nodes[0], (NodeEntry{{Role::kServer, 0}, 0xaabb, "10.0.0.5:9200"}));
  EXPECT_EQ(roster.nodes[1], (NodeEntry{{Role::kWorker, 0}, kIncarnation, ""}));

  EXPECT_EQ(examples_.size() + 1, blocks_.size()) << "an example that nothing reads";
}

}  // namespace
}  // namespace heddle::kvstore::dist_test
