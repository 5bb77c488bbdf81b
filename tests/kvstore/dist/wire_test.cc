// The fixed parts of the wire format.
#include "kvstore/dist/protocol/wire.h"

#include <array>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvstore/dist/protocol/bodies.h"
#include "tests/kvstore/dist/random_bodies.h"

namespace heddle::kvstore::dist_test {
namespace {

using namespace dist;  // NOLINT(google-build-using-namespace)
using testing::HasSubstr;

using Header = std::array<std::byte, kHeaderBytes>;

std::span<const std::byte> Bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

Message Ping() {
  Message message;
  message.kind = Kind::kHeartbeat;
  return message;
}

std::string Check(const Header& header, const WireLimits& limits = {}) {
  Message message;
  std::uint32_t meta_bytes = 0;
  std::uint64_t payload_bytes = 0;
  return DecodeHeader(header, limits, &message, &meta_bytes, &payload_bytes);
}

Header HeaderOf(const Message& message) {
  Header header;
  EncodeHeader(message, header);
  return header;
}

TEST(WireHeader, EveryFieldIsWhereItIsDocumented) {
  Message message;
  message.kind = Kind::kPush;
  message.flags = kFlagRates;
  message.dtype = DType::kBFloat16;
  message.rank = 0x01020304;
  message.priority = -2;
  message.incarnation = 0x1112131415161718;
  message.part = {.store = 0x21222324, .part = 0x31323334, .key = 0x4142434445464748};
  message.sequence = 0x5152535455565758;
  message.version = 0x6162636465666768;
  message.arrivals = 0x72;
  message.meta = std::string(0x0205, 'm');
  static const std::array<std::byte, 0x0309> kBytes{};
  message.payload = Payload(nullptr, std::span<const std::byte>(kBytes));
  const unsigned char expected[kHeaderBytes] = {
      31,   4,    3,    0x72, 0x05, 0x02, 0,    0,     // kind, flags, dtype, arrivals, meta
      0x09, 0x03, 0,    0,    0,    0,    0,    0,     // payload
      0x04, 0x03, 0x02, 0x01, 0xfe, 0xff, 0xff, 0xff,  // rank, priority
      0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11,  // incarnation
      0x48, 0x47, 0x46, 0x45, 0x44, 0x43, 0x42, 0x41,  // key
      0x34, 0x33, 0x32, 0x31, 0x24, 0x23, 0x22, 0x21,  // part, store
      0x58, 0x57, 0x56, 0x55, 0x54, 0x53, 0x52, 0x51,  // sequence
      0x68, 0x67, 0x66, 0x65, 0x64, 0x63, 0x62, 0x61,  // version
  };
  const Header header = HeaderOf(message);
  EXPECT_EQ(std::memcmp(header.data(), expected, kHeaderBytes), 0);
}

TEST(WireHeader, RandomOnesComeBackAsTheyWere) {
  Random random(TestSeed());
  for (int round = 0; round < 2000; ++round) {
    const Message sent = RandomMessage(random);
    Message got;
    std::uint32_t meta_bytes = 0;
    std::uint64_t payload_bytes = 0;
    ASSERT_EQ(DecodeHeader(HeaderOf(sent), {}, &got, &meta_bytes, &payload_bytes), "");
    ASSERT_EQ(got.kind, sent.kind);
    ASSERT_EQ(got.flags, sent.flags);
    ASSERT_EQ(got.dtype, sent.dtype);
    ASSERT_EQ(got.rank, sent.rank);
    ASSERT_EQ(got.priority, sent.priority);
    ASSERT_EQ(got.incarnation, sent.incarnation);
    ASSERT_EQ(got.part, sent.part);
    ASSERT_EQ(got.sequence, sent.sequence);
    ASSERT_EQ(got.version, sent.version);
    ASSERT_EQ(meta_bytes, sent.meta.size());
    ASSERT_EQ(payload_bytes, sent.payload.bytes());
  }
}

TEST(WireHeader, UnknownKindsAreRefusedByNumber) {
  Header header = HeaderOf(Ping());
  int known = 0;
  for (int kind = 0; kind < 256; ++kind) {
    header[0] = static_cast<std::byte>(kind);
    const std::string why = Check(header);
    if (why.empty()) {
      ++known;
    } else {
      EXPECT_THAT(why, HasSubstr("unknown kind " + std::to_string(kind)));
    }
  }
  EXPECT_EQ(known, 44);
}

TEST(WireHeader, FlagsThatTheKindDoesNotHaveAreRefused) {
  Message message = Ping();
  message.flags = kFlagRowSparse;
  EXPECT_THAT(Check(HeaderOf(message)), HasSubstr("heartbeat with flags 0x01"));
  message.kind = Kind::kPush;
  message.flags = kFlagRowSparse | kFlagCompressed | kFlagRates | kFlagFailed;
  EXPECT_EQ(Check(HeaderOf(message)), "");
  message.flags = kFlagNoValue;
  EXPECT_THAT(Check(HeaderOf(message)), HasSubstr("push with flags 0x10"));
  message.flags = 0x80;
  EXPECT_THAT(Check(HeaderOf(message)), HasSubstr("push with flags 0x80"));
  message.kind = Kind::kInit;
  message.flags = kFlagNoValue;
  EXPECT_EQ(Check(HeaderOf(message)), "");
}

TEST(WireHeader, UnknownDTypesAreRefused) {
  Header header = HeaderOf(Ping());
  header[2] = std::byte{9};
  EXPECT_THAT(Check(header), HasSubstr("unknown dtype 9"));
  header[2] = std::byte{8};
  EXPECT_EQ(Check(header), "");
}

TEST(WireHeader, SizesAboveTheLimitsAreRefusedNamingBoth) {
  Message push;
  push.kind = Kind::kPush;
  Header header = HeaderOf(push);
  header[15] = std::byte{0x80};  // 2^63 bytes of payload
  EXPECT_THAT(Check(header), HasSubstr("9223372036854775808"));
  header = HeaderOf(push);
  header[8] = std::byte{101};
  EXPECT_EQ(Check(header, {.payload_bytes_max = 101}), "");
  EXPECT_THAT(Check(header, {.payload_bytes_max = 100}),
              testing::AllOf(HasSubstr("101"), HasSubstr("100")));
  header = HeaderOf(push);
  header[7] = std::byte{0xff};
  EXPECT_THAT(Check(header), HasSubstr("bytes of meta: expected at most 1048576"));
}

TEST(WireHeader, KindsWithoutAPayloadMayNotHaveOne) {
  Header header = HeaderOf(Ping());
  header[8] = std::byte{1};
  EXPECT_THAT(Check(header), HasSubstr("heartbeat with 1 bytes of payload: expected at most 0"));
}

TEST(Preamble, OursIsAccepted) {
  const auto preamble = EncodePreamble();
  for (std::size_t size = 0; size <= kPreambleBytes; ++size) {
    EXPECT_EQ(CheckPreamble(std::span(preamble).first(size)), "") << size;
  }
  EXPECT_EQ(std::memcmp(preamble.data(), "HEDL\x01\0\x40\0\0\0\0\0\0\0\0\0", kPreambleBytes), 0);
}

TEST(Preamble, AnotherVersionIsNamed) {
  auto preamble = EncodePreamble();
  preamble[4] = std::byte{7};
  EXPECT_EQ(CheckPreamble(preamble),
            "expected version 1 of heddle's protocol, it speaks version 7");
}

TEST(Preamble, EveryChangedByteIsNoticedAtOnce) {
  for (std::size_t i = 0; i < kPreambleBytes; ++i) {
    auto preamble = EncodePreamble();
    preamble[i] ^= std::byte{0x20};
    EXPECT_EQ(CheckPreamble(std::span(preamble).first(i)), "") << i;
    // The version has two bytes; all else is told by the first wrong one.
    EXPECT_NE(CheckPreamble(std::span(preamble).first(i == 4 ? 6 : i + 1)), "") << i;
  }
}

TEST(Preamble, StrangersAreToldApart) {
  EXPECT_THAT(CheckPreamble(Bytes("GET / HTTP/1.1\r\n")), HasSubstr("HTTP"));
  EXPECT_THAT(CheckPreamble(Bytes("HEAD /")), HasSubstr("HTTP"));
  EXPECT_THAT(CheckPreamble(Bytes("\x16\x03\x01\x02")), HasSubstr("TLS"));
  EXPECT_THAT(CheckPreamble(Bytes("SSH-2.0-OpenSSH_9.2")), HasSubstr("does not speak heddle"));
}

TEST(Preamble, ABrowserGetsAPage) {
  const auto first = Bytes("GET / HTTP/1.1\r\n");
  const std::string answer = AnswerToStranger(first, CheckPreamble(first));
  EXPECT_TRUE(answer.starts_with("HTTP/1.1 400 "));
  const std::size_t end = answer.find("\r\n\r\n");
  ASSERT_NE(end, std::string::npos);
  EXPECT_THAT(answer, HasSubstr("Content-Length: " + std::to_string(answer.size() - end - 4)));
}

TEST(Preamble, AnotherVersionIsToldWhy) {
  auto preamble = EncodePreamble();
  preamble[4] = std::byte{2};
  const std::string why = CheckPreamble(preamble);
  const std::string answer = AnswerToStranger(preamble, why);
  ASSERT_GT(answer.size(), kPreambleBytes + kHeaderBytes);
  EXPECT_EQ(CheckPreamble(Bytes(answer).first(kPreambleBytes)), "");
  Message message;
  std::uint32_t meta_bytes = 0;
  std::uint64_t payload_bytes = 0;
  ASSERT_EQ(DecodeHeader(Bytes(answer).subspan<kPreambleBytes, kHeaderBytes>(), kStrangerLimits,
                         &message, &meta_bytes, &payload_bytes),
            "");
  EXPECT_EQ(message.kind, Kind::kRefused);
  EXPECT_EQ(payload_bytes, 0u);
  const std::string_view meta = std::string_view(answer).substr(kPreambleBytes + kHeaderBytes);
  ASSERT_EQ(meta.size(), meta_bytes);
  ErrorBody error;
  ASSERT_TRUE(Decode(meta, &error));
  EXPECT_EQ(error.code, ErrorBody::Code::kNetwork);
  EXPECT_EQ(error.message, why);
}

TEST(Nodes, AreNamedAsPeopleSpeakOfThem) {
  EXPECT_EQ(ToString(NodeId{Role::kScheduler, 0}), "the scheduler");
  EXPECT_EQ(ToString(NodeId{Role::kServer, 3}), "server 3");
  EXPECT_EQ(ToString(NodeId{Role::kWorker, 11}), "worker 11");
  EXPECT_EQ(ToString(NodeId{Role::kWorker, -7}), "a worker");
}

}  // namespace
}  // namespace heddle::kvstore::dist_test
