// `heddle wire-dump`, and the stream reader under it.
#include <cstddef>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/protocol/wire.h"
#include "tests/kvstore/dist/random_bodies.h"
#include "tests/tools/child_process.h"
#include "tools/heddle/wire_stream.h"
#include "tools/testing/temp_folder.h"

namespace heddle::tools {
namespace {

using namespace kvstore::dist;       // NOLINT(google-build-using-namespace)
using namespace kvstore::dist_test;  // NOLINT(google-build-using-namespace)
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* kHeddle = HEDDLE_COMMAND;

std::string Preamble() {
  const auto preamble = EncodePreamble();
  return {reinterpret_cast<const char*>(preamble.data()), preamble.size()};
}

// Reads `bytes` in the given pieces.
struct Reading {
  explicit Reading(const std::string& bytes, const std::function<std::size_t()>& piece)
      : stream({}, 1 << 20, [this](const WireRecord& record) { records.push_back(record); }) {
    std::span<const std::byte> rest = std::as_bytes(std::span(bytes));
    while (!rest.empty()) {
      const std::size_t count = std::min(piece(), rest.size());
      good = stream.Feed(rest.first(count)) && good;
      rest = rest.subspan(count);
    }
  }
  std::vector<WireRecord> records;
  bool good = true;
  WireStream stream;
};

TEST(WireStream, PiecesOfAnySizeGiveTheSameMessages) {
  Random random(TestSeed());
  for (int round = 0; round < 200; ++round) {
    std::string bytes = Preamble();
    std::vector<Message> sent(Below(random, 6));
    std::vector<std::uint64_t> offsets;
    for (Message& message : sent) {
      message = RandomMessage(random);
      offsets.push_back(bytes.size());
      bytes += EncodeMessage(message);
    }
    const std::size_t most = 1 + Below(random, 100);
    const Reading reading(bytes, [&] { return 1 + Below(random, most); });
    ASSERT_TRUE(reading.good) << reading.stream.why();
    ASSERT_EQ(reading.stream.Missing(), "");
    ASSERT_EQ(reading.records.size(), sent.size());
    for (std::size_t i = 0; i < sent.size(); ++i) {
      const WireRecord& got = reading.records[i];
      ASSERT_EQ(got.offset, offsets[i]);
      ASSERT_EQ(got.message.kind, sent[i].kind);
      ASSERT_EQ(got.message.sequence, sent[i].sequence);
      ASSERT_EQ(got.message.meta, sent[i].meta);
      ASSERT_EQ(got.payload_bytes, sent[i].payload.bytes());
      Message plain = sent[i];
      plain.payload = {};
      ASSERT_EQ(plain.meta + got.payload_begin, EncodeMessage(sent[i]).substr(kHeaderBytes));
      ASSERT_NE(DescribeRecord(got), "");
    }
    if (bytes.size() == kPreambleBytes) continue;
    bytes.pop_back();
    const Reading cut(bytes, [] { return 4096; });
    ASSERT_TRUE(cut.good);
    ASSERT_THAT(cut.stream.Missing(), HasSubstr("ends at byte " + std::to_string(bytes.size())));
  }
}

TEST(WireStream, WhatIsWrongIsSaidWithItsPlace) {
  std::string bytes = Preamble() + EncodeMessage({.kind = Kind::kHeartbeat});
  bytes += std::string(kHeaderBytes, '\xff');
  const Reading reading(bytes, [] { return 7; });
  EXPECT_FALSE(reading.good);
  EXPECT_EQ(reading.records.size(), 1u);
  EXPECT_THAT(reading.stream.why(), AllOf(HasSubstr("at byte 80:"), HasSubstr("kind 255")));
  const Reading http("GET / HTTP/1.0\r\n", [] { return 1; });
  EXPECT_THAT(http.stream.why(), AllOf(HasSubstr("at byte 0:"), HasSubstr("HTTP")));
}

// A worker's words to a server: a join (as if), a push with rates and a payload, an error.
std::string Capture() {
  static const std::vector<float> kValues = {1.0F, 2.0F, 3.0F, 4.0F, 5.0F};
  Message init;
  init.kind = Kind::kInit;
  init.rank = 1;
  init.incarnation = 0xabcdef;
  init.part = {.store = 0, .part = 2, .key = 0x1234};
  InitBody body;
  body.info = {.key = std::string("conv'0"), .shape = {5}, .num_parts = 3, .begin = 0, .end = 5};
  init.meta = Encode(body);
  Message push = init;
  push.kind = Kind::kPush;
  push.flags = kFlagRates;
  push.sequence = 7;
  push.priority = -3;
  push.meta = Encode(RatesBody{{0.5, 0.25}});
  push.payload = Payload(nullptr, std::as_bytes(std::span(kValues)));
  Message error;
  error.kind = Kind::kError;
  error.meta = Encode(ErrorBody{ErrorBody::Code::kUnknownKey, "push key 'b': \x1b[31m no"});
  Message optimizer;
  optimizer.kind = Kind::kSetOptimizer;
  optimizer.part = ControlPart(4);
  optimizer.meta = Encode(OptimizerBody{"sgd", {{"momentum", 0.875}}});
  return Preamble() + EncodeMessage(init) + EncodeMessage(push) + EncodeMessage(error) +
         EncodeMessage(optimizer);
}

void Write(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

TEST(WireDumpCommand, PrintsWhatWasSaid) {
  const TempFolder folder;
  Write(folder / "capture", Capture());
  const ProgramResult result = RunProgram({kHeddle, "wire-dump", folder / "capture"});
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, AllOf(HasSubstr("16  init         store 0 key 0000000000001234 part 2 "
                                             "rank 1 inc 0000000000abcdef seq 0"),
                                   HasSubstr("key 'conv\\'0' (5,) of dense float32, elements 0 "
                                             "to 5, one of 3 parts")));
  EXPECT_THAT(result.output,
              AllOf(HasSubstr("push "), HasSubstr("seq 7"), HasSubstr("priority -3"),
                    HasSubstr("[rates]"), HasSubstr("learning rate 0.5, weight decay 0.25"),
                    HasSubstr("payload of 20 bytes: 00 00 80 3f 00 00 00 40 00 00 40 40 00 00 80 "
                              "40 ...")));
  EXPECT_THAT(result.output, AllOf(HasSubstr("code 3: 'push key \\'b\\': \\x1b[31m no'"),
                                   HasSubstr("store 4 control"), HasSubstr("'momentum'=0.875"),
                                   HasSubstr("4 messages")));
}

TEST(WireDumpCommand, ReadsStandardInputAndShowsAsMuchOfPayloadsAsIsAsked) {
  const TempFolder folder;
  Write(folder / "capture", Capture());
  const ProgramResult result = RunProgram(
      {"/bin/sh", "-c", "\"$0\" wire-dump --payload 20 - < \"$1\"", kHeddle, folder / "capture"});
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("80 40 00 00 a0 40\n"));
}

TEST(WireDumpCommand, ACutOrDamagedCaptureIsPrintedAsFarAsItGoes) {
  const TempFolder folder;
  std::string bytes = Capture();
  Write(folder / "cut", bytes.substr(0, bytes.size() - 1));
  const ProgramResult cut = RunProgram({kHeddle, "wire-dump", folder / "cut"});
  EXPECT_NE(cut.status, 0);
  EXPECT_THAT(cut.output, AllOf(HasSubstr("3 messages"), HasSubstr("meta of a set_optimizer")));
  bytes[kPreambleBytes] = '\0';
  Write(folder / "damaged", bytes);
  const ProgramResult damaged = RunProgram({kHeddle, "wire-dump", folder / "damaged"});
  EXPECT_NE(damaged.status, 0);
  EXPECT_THAT(damaged.output, HasSubstr("at byte 16: a message of unknown kind 0"));
}

// It used to be a capture that ends within its preamble.
TEST(WireDumpCommand, AFolderIsToldFromAnEmptyCapture) {
  const ProgramResult result = RunProgram({kHeddle, "wire-dump", "/"});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("/: cannot be read: Is a directory"));
}

TEST(WireDumpCommand, StandardInputThatCannotBeReadIsToldFromAnEmptyCapture) {
  const ProgramResult result = RunProgram({"/bin/sh", "-c", "\"$0\" wire-dump - < /", kHeddle});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("standard input: cannot be read: Is a directory"));
}

TEST(WireDumpCommand, AMissingFileIsNamed) {
  const ProgramResult result = RunProgram({kHeddle, "wire-dump", "/no/such/capture"});
  EXPECT_NE(result.status, 0);
  EXPECT_THAT(result.output, HasSubstr("/no/such/capture: cannot be opened"));
}

}  // namespace
}  // namespace heddle::tools
