// Bodies of messages. Random ones make the round trip; what strangers may send instead is refused,
// or is what an honest sender could have sent.
#include "kvstore/dist/protocol/bodies.h"

#include <heddle/error.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

#include <gtest/gtest.h>

#include "tests/kvstore/dist/random_bodies.h"

namespace heddle::kvstore::dist_test {
namespace {

using namespace dist;  // NOLINT(google-build-using-namespace)

constexpr int kRounds = 300;

TEST(Bodies, ARosterComesBackAsItWas) {
  RosterBody sent;
  sent.rank = 2;
  sent.num_workers = 3;
  sent.num_servers = 1;
  sent.epoch = 7;
  sent.slice_bytes = 65536;
  sent.cut_bytes = 5'000'000'000;
  sent.nodes = {{{Role::kServer, 0}, 0xfedcba9876543210, "127.0.0.1:9091"},
                {{Role::kWorker, 2}, 1, ""}};
  RosterBody got;
  ASSERT_TRUE(Decode(Encode(sent), &got));
  EXPECT_EQ(got.rank, 2);
  EXPECT_EQ(got.num_workers, 3);
  EXPECT_EQ(got.num_servers, 1);
  EXPECT_EQ(got.epoch, 7u);
  EXPECT_EQ(got.slice_bytes, 65536);
  EXPECT_EQ(got.cut_bytes, 5'000'000'000);
  EXPECT_EQ(got.nodes, sent.nodes);
}

TEST(Bodies, AnInitComesBackAsItWas) {
  InitBody sent;
  sent.info = {.key = std::string("conv0_weight"),
               .shape = {int64_t{1} << 40, 3},
               .dtype = DType::kBFloat16,
               .row_sparse = true,
               .num_parts = 5,
               .begin = 17,
               .end = int64_t{1} << 40};
  InitBody got;
  ASSERT_TRUE(Decode(Encode(sent), &got));
  EXPECT_EQ(got.info, sent.info);
}

TEST(Bodies, EveryFieldOfAJoinComesBack) {
  JoinBody got;
  ASSERT_TRUE(Decode(Encode(JoinBody{Role::kServer, -1, 99, "10.0.0.1:80", 4, 2}), &got));
  EXPECT_EQ(got.role, Role::kServer);
  EXPECT_EQ(got.rank, -1);
  EXPECT_EQ(got.incarnation, 99u);
  EXPECT_EQ(got.address, "10.0.0.1:80");
  EXPECT_EQ(got.num_workers, 4);
  EXPECT_EQ(got.num_servers, 2);
}

TEST(Bodies, WhatIsEncodedDecodesAndEncodesToTheSame) {
  Random random(TestSeed());
  for (const BodyType& type : BodyTypes()) {
    for (int round = 0; round < kRounds; ++round) {
      const std::string meta = type.random(random);
      std::string again;
      ASSERT_TRUE(type.recode(meta, &again)) << type.name;
      ASSERT_EQ(again, meta) << type.name;
    }
  }
}

TEST(Bodies, AnythingMissingOrTooMuchIsRefused) {
  Random random(TestSeed());
  for (const BodyType& type : BodyTypes()) {
    for (int round = 0; round < kRounds; ++round) {
      const std::string meta = type.random(random);
      std::string again;
      for (std::size_t size = 0; size < meta.size(); ++size) {
        ASSERT_FALSE(type.recode(std::string_view(meta).substr(0, size), &again)) << type.name;
      }
      ASSERT_FALSE(type.recode(meta + '\0', &again)) << type.name;
    }
  }
}

TEST(Bodies, DamagedOnesAreRefusedOrMeanSomethingElseThatCanBeSent) {
  Random random(TestSeed());
  int refused = 0;
  for (const BodyType& type : BodyTypes()) {
    for (int round = 0; round < 10 * kRounds; ++round) {
      std::string meta = type.random(random);
      if (meta.empty()) continue;
      const std::size_t changes = 1 + Below(random, 3);
      for (std::size_t i = 0; i < changes; ++i) {
        meta[Below(random, meta.size())] = static_cast<char>(random());
      }
      std::string again;
      if (type.recode(meta, &again)) {
        ASSERT_EQ(again, meta) << type.name;
      } else {
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 0);
}

// A list says how long it is before it comes: 2^32 - 1 entries in a few bytes must cost nothing.
TEST(Bodies, CountsBeyondTheBytesAreRefusedBeforeAnyRoomIsMade) {
  std::string meta(40, '\0');
  std::memset(meta.data(), 0xff, 4);
  AcksBody acks;
  KeysBody keys;
  TextBody text;
  EXPECT_FALSE(Decode(meta, &acks));
  EXPECT_FALSE(Decode(meta, &keys));
  EXPECT_FALSE(Decode(meta, &text));
  EXPECT_EQ(acks.acks.capacity(), 0u);
  EXPECT_EQ(keys.keys.capacity(), 0u);
  EXPECT_TRUE(text.text.empty());
}

TEST(Bodies, PartsThatCannotBeAreRefused) {
  const PartInfo good = {.key = 7, .shape = {10, 3}, .num_parts = 2, .begin = 4, .end = 30};
  const auto decodes = [](const PartInfo& info) {
    InitBody got;
    return Decode(Encode(InitBody{info}), &got);
  };
  EXPECT_TRUE(decodes(good));
  PartInfo bad = good;
  bad.end = 31;  // elements
  EXPECT_FALSE(decodes(bad));
  bad = good;
  bad.row_sparse = true;  // 30 rows of 10
  EXPECT_FALSE(decodes(bad));
  bad.end = 10;
  EXPECT_TRUE(decodes(bad));
  bad.shape = {};
  bad.begin = bad.end = 0;
  EXPECT_FALSE(decodes(bad));  // no rows without a first dimension
  bad = good;
  bad.begin = -1;
  EXPECT_FALSE(decodes(bad));
  bad = good;
  bad.begin = 20;
  bad.end = 19;
  EXPECT_FALSE(decodes(bad));
  bad = good;
  bad.num_parts = 0;
  EXPECT_FALSE(decodes(bad));
  bad.num_parts = 1;  // and not all of it
  EXPECT_FALSE(decodes(bad));
  bad.begin = 0;
  EXPECT_TRUE(decodes(bad));
}

TEST(Bodies, PartsWhoseBytesCannotBeCountedAreRefused) {
  constexpr std::int64_t kOne = 1;
  const auto decodes = [](const Shape& shape, DType dtype, bool row_sparse) {
    InitBody got;
    return Decode(Encode(InitBody{{.key = 7,
                                   .shape = shape,
                                   .dtype = dtype,
                                   .row_sparse = row_sparse,
                                   .num_parts = 2,
                                   .begin = 0,
                                   .end = std::min<std::int64_t>(shape[0], 1)}}),
                  &got);
  };
  for (const bool row_sparse : {false, true}) {
    // With its id such a row has no bytes, modulo 2^64.
    EXPECT_FALSE(decodes({1, (kOne << 61) - 1}, DType::kFloat64, row_sparse));
    EXPECT_FALSE(decodes({1, (kOne << 62) - 2}, DType::kFloat32, row_sparse));
    EXPECT_FALSE(decodes({1, (kOne << 60) - 1}, DType::kFloat64, row_sparse));
    EXPECT_TRUE(decodes({1, (kOne << 60) - 2}, DType::kFloat64, row_sparse));
    EXPECT_FALSE(decodes({kOne << 61, 1}, DType::kFloat32, row_sparse));
    EXPECT_TRUE(decodes({(kOne << 61) - 1, 1}, DType::kFloat32, row_sparse));
    EXPECT_FALSE(decodes({0, kOne << 40, kOne << 40}, DType::kFloat32, row_sparse));
    EXPECT_TRUE(decodes({0, kOne << 40, 2}, DType::kFloat32, row_sparse));
  }
}

TEST(Bodies, RostersThatCannotBeAreRefused) {
  const RosterBody good{.rank = 0,
                        .num_workers = 1,
                        .num_servers = 1,
                        .epoch = 0,
                        .slice_bytes = 1,
                        .cut_bytes = 0,
                        .nodes = {}};
  const auto decodes = [](const RosterBody& roster) {
    RosterBody got;
    return Decode(Encode(roster), &got);
  };
  EXPECT_TRUE(decodes(good));
  RosterBody bad = good;
  bad.num_workers = 0;
  EXPECT_FALSE(decodes(bad));
  bad = good;
  bad.num_servers = -1;
  EXPECT_FALSE(decodes(bad));
  bad = good;
  bad.slice_bytes = 0;
  EXPECT_FALSE(decodes(bad));
  bad = good;
  bad.cut_bytes = -1;
  EXPECT_FALSE(decodes(bad));
}

template <class E>
void ExpectBecomes(ErrorBody::Code code) {
  const std::exception_ptr error = ToException({code, "push key 'a': no"});
  try {
    std::rethrow_exception(error);
  } catch (const E& e) {
    EXPECT_EQ(typeid(e), typeid(E));
    EXPECT_STREQ(e.what(), "push key 'a': no");
  } catch (...) {
    ADD_FAILURE() << "code " << static_cast<int>(code) << " became another exception";
  }
}

TEST(Errors, EveryCodeBecomesItsException) {
  using Code = ErrorBody::Code;
  ExpectBecomes<Error>(Code::kOther);
  ExpectBecomes<InvalidArgument>(Code::kInvalidArgument);
  ExpectBecomes<InvalidState>(Code::kInvalidState);
  ExpectBecomes<UnknownKey>(Code::kUnknownKey);
  ExpectBecomes<InputFailed>(Code::kInputFailed);
  ExpectBecomes<OpError>(Code::kUpdateFailed);
  ExpectBecomes<NetworkError>(Code::kNetwork);
  ExpectBecomes<TimeoutError>(Code::kTimeout);
  ExpectBecomes<OutOfMemory>(Code::kOutOfMemory);
  ExpectBecomes<IoError>(Code::kIo);
  ExpectBecomes<OpError>(Code::kOp);
}

template <class E>
ErrorBody BodyOf(const E& error) {
  return ToErrorBody(std::make_exception_ptr(error));
}

TEST(Errors, ExceptionsKeepTypeAndTextOverTheWire) {
  using Code = ErrorBody::Code;
  EXPECT_EQ(BodyOf(InvalidArgument("a")).code, Code::kInvalidArgument);
  EXPECT_EQ(BodyOf(UnknownKey("a")).code, Code::kUnknownKey);
  EXPECT_EQ(BodyOf(InvalidState("a")).code, Code::kInvalidState);
  EXPECT_EQ(BodyOf(NetworkError("a")).code, Code::kNetwork);
  EXPECT_EQ(BodyOf(TimeoutError("a")).code, Code::kTimeout);
  EXPECT_EQ(BodyOf(OutOfMemory("a")).code, Code::kOutOfMemory);
  EXPECT_EQ(BodyOf(std::bad_alloc()).code, Code::kOutOfMemory);
  EXPECT_EQ(BodyOf(IoError("a")).code, Code::kIo);
  EXPECT_EQ(BodyOf(OpError("a")).code, Code::kOp);
  EXPECT_EQ(BodyOf(InputFailed("a")).code, Code::kInputFailed);
  EXPECT_EQ(BodyOf(std::domain_error("too big")).code, Code::kOther);
  EXPECT_EQ(BodyOf(std::domain_error("too big")).message, "too big");
  EXPECT_EQ(BodyOf(3).code, Code::kOther);
  EXPECT_NE(BodyOf(3).message, "");
}

TEST(Errors, ANetworkErrorIsAHeddleError) {
  EXPECT_THROW(throw NetworkError("server 1 at 127.0.0.1:9091: connection reset"), Error);
}

}  // namespace
}  // namespace heddle::kvstore::dist_test
