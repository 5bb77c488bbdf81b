// Headers of safetensors files: what is written can be read, and everything else is refused with
// its reason.
#include "storage/safetensors.h"

#include <heddle/error.h>

#include <string>

#include <gtest/gtest.h>

#include "tests/engine/support.h"
#include "tests/message_of.h"

namespace heddle::storage {
namespace {

using engine_test::Contains;

TensorHeader Parse(const std::string& json, std::int64_t data_bytes) {
  return ParseHeader(json, data_bytes, "model.bin");
}

void ExpectRefused(const std::string& json, std::int64_t data_bytes, const std::string& part) {
  const std::string message = MessageOf<IoError>([&] { Parse(json, data_bytes); });
  EXPECT_TRUE(Contains(message, "model.bin")) << message;
  EXPECT_TRUE(Contains(message, part)) << message << "\n for " << json;
}

const std::string kOne = R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";

TEST(SafetensorsHeader, IsEncodedByteForByte) {
  TensorHeader header;
  header.tensors.push_back({"w", DType::kFloat32, Shape{2}, 0, 8});
  const std::string encoded = EncodeHeader(header);
  EXPECT_EQ(encoded.size() % 8, 0u);
  EXPECT_EQ(encoded.substr(0, 8), std::string("\x38\0\0\0\0\0\0\0", 8));  // 56
  EXPECT_EQ(encoded.substr(8), kOne + "  ");
}

TEST(SafetensorsHeader, ComesBackAsItWas) {
  TensorHeader header;
  std::int64_t end = 0;
  for (const DType dtype : kAllDTypes) {
    const auto bytes = static_cast<std::int64_t>(6 * SizeOf(dtype));
    header.tensors.push_back(
        {"\"\\\n\u00e9 " + std::string(Name(dtype)), dtype, Shape{2, 1, 3}, end, end + bytes});
    end += bytes;
  }
  header.tensors.push_back({"scalar", DType::kInt64, Shape{}, end, end + 8});
  header.tensors.push_back({"", DType::kInt64, Shape{0, 5}, end + 8, end + 8});
  header.metadata = {{"a", "b"}, {"", "c\n"}};
  const TensorHeader parsed = Parse(EncodeHeader(header).substr(8), end + 8);
  EXPECT_EQ(parsed.metadata, header.metadata);
  ASSERT_EQ(parsed.tensors.size(), header.tensors.size());
  for (std::size_t i = 0; i < parsed.tensors.size(); ++i) {
    EXPECT_EQ(parsed.tensors[i].name, header.tensors[i].name);
    EXPECT_EQ(parsed.tensors[i].dtype, header.tensors[i].dtype);
    EXPECT_EQ(parsed.tensors[i].shape, header.tensors[i].shape);
    EXPECT_EQ(parsed.tensors[i].begin, header.tensors[i].begin);
    EXPECT_EQ(parsed.tensors[i].end, header.tensors[i].end);
  }
}

TEST(SafetensorsHeader, TakesFieldsInAnyOrderAndSpace) {
  const TensorHeader header =
      Parse("{ \"w\" : {\"data_offsets\":[0, 8],\n\"shape\":[ 2 ], \"dtype\":\"F32\"} }   ", 8);
  ASSERT_EQ(header.tensors.size(), 1u);
  EXPECT_EQ(header.tensors[0].shape, Shape{2});
  EXPECT_TRUE(Parse("{}", 0).tensors.empty());
}

TEST(SafetensorsHeader, CutsLongNamesBetweenLetters) {
  std::string shown = "a";
  for (int i = 0; i < 39; ++i) shown += "\u00e9";  // 79 bytes: of the next only one would have room
  ExpectRefused("{\"" + shown + "\u00e9\":{\"dtype\":\"F8\"}}", 0, "array '" + shown + "...'");
}

TEST(SafetensorsHeader, RefusesWhatIsNotAHeader) {
  ExpectRefused("", 0, "expected a safetensors header");
  ExpectRefused("[]", 0, "expected a safetensors header");
  ExpectRefused("{", 0, "expected JSON");
  ExpectRefused("{} {}", 0, "expected JSON");
  ExpectRefused(kOne + std::string(1, '\0'), 8, "expected JSON");
  ExpectRefused("{\"\xff\":{}}", 0, "expected JSON");
  ExpectRefused(R"({"w":3})", 0, "expected an object");
  ExpectRefused(R"({"w":[]})", 0, "expected an object");
  ExpectRefused(R"({"w":{}})", 0, "expected a dtype");
  ExpectRefused(R"({"w":{"dtype":"F32","data_offsets":[0,0]}})", 0, "expected a shape");
  ExpectRefused(R"({"w":{"dtype":"F32","shape":[0]}})", 0, "expected data_offsets");
  ExpectRefused(R"({"w":{"stride":[1]}})", 0, "'stride'");
  ExpectRefused(R"({"w":{"dtype":"F32","dtype":"F32"}})", 0, "each once");
  ExpectRefused(R"({"w":{"dtype":"C64"}})", 0, "'C64'");
  ExpectRefused(R"({"w":{"dtype":7}})", 0, "expected text as dtype");
  ExpectRefused(R"({"w":{"dtype":{}}})", 0, "expected text as dtype");
  ExpectRefused(R"({"w":{"shape":[-1]}})", 0, "number -1");
  ExpectRefused(R"({"w":{"shape":[1.0]}})", 0, "number '1.0'");
  ExpectRefused(R"({"w":{"shape":[[1]]}})", 0, "a list");
  ExpectRefused(R"({"w":{"shape":[null]}})", 0, "null");
  ExpectRefused(R"({"w":{"shape":"2"}})", 0, "text '2'");
  ExpectRefused(R"({"w":{"shape":[9223372036854775808]}})", 0, "below 2^63");
  ExpectRefused(R"({"w":{"shape":[18446744073709551616]}})", 0, "18446744073709551616");
  ExpectRefused(R"({"w":{"data_offsets":[0]}})", 0, "two data_offsets");
  ExpectRefused(R"({"w":{"data_offsets":[0,1,2]}})", 0, "two offsets");
  ExpectRefused(R"({"w":{"data_offsets":true}})", 0, "a boolean");
  ExpectRefused(R"({"__metadata__":{"a":1}})", 0, "text in the metadata");
  ExpectRefused(R"({"__metadata__":{"a":"1","a":"2"}})", 0, "twice");
  ExpectRefused(R"({"__metadata__":{},"__metadata__":{}})", 0, "twice");
  ExpectRefused(R"({"__metadata__":[]})", 0, "expected an object");
  ExpectRefused(R"({"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},)"
                R"("w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}})",
                0, "'w' twice");
}

TEST(SafetensorsHeader, RefusesPlacesThatDoNotFillTheData) {
  EXPECT_EQ(Parse(kOne, 8).tensors.size(), 1u);
  ExpectRefused(kOne, 7, "within 7 bytes");
  ExpectRefused(kOne, 9, "expected 8 bytes of data, found 9");
  ExpectRefused("{}", 1, "expected 0 bytes of data, found 1");
  const auto with = [](const std::string& shape, const std::string& offsets) {
    return R"({"w":{"dtype":"F32","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
  };
  ExpectRefused(with("[3]", "[0,8]"), 8, "expected 3 elements of 4 bytes");
  ExpectRefused(with("[2]", "[8,0]"), 8, "found [8, 0)");
  ExpectRefused(with("[2]", "[1,9]"), 9, "expected its data at 0");
  ExpectRefused(with("[4611686018427387904,4]", "[0,8]"), 8, "a possible shape");
  ExpectRefused(with("[4611686018427387905]", "[0,4]"), 4, "within 4 bytes");  // overflows to 4
  const auto two = [](const std::string& a, const std::string& b) {
    return R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + a +
           R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + b + "}}";
  };
  EXPECT_EQ(Parse(two("[4,8]", "[0,4]"), 8).tensors.size(), 2u);
  ExpectRefused(two("[0,4]", "[2,6]"), 6, "expected its data at 4");  // overlap
  ExpectRefused(two("[0,4]", "[0,4]"), 4, "expected its data at 4");
  ExpectRefused(two("[0,4]", "[5,9]"), 9, "expected its data at 4");  // gap
}

// A document tree of this would take gigabytes.
TEST(SafetensorsHeader, RefusesDeepNestingEarly) {
  ExpectRefused("{\"w\":" + std::string(10'000'000, '['), 0, "expected an object");
}

TEST(SafetensorsHeader, CutsLongNamesInMessages) {
  const std::string message =
      MessageOf<IoError>([] { Parse("{\"" + std::string(1'000'000, 'x') + "\":{}}", 0); });
  EXPECT_LT(message.size(), 300u);
}

// One of a file of 100 MB was as long as the file.
TEST(SafetensorsHeader, CutsLongShapesInMessages) {
  std::string shape = "[2";
  for (int i = 0; i < 100'000; ++i) shape += ",2";
  const std::string message = MessageOf<IoError>(
      [&] { Parse(R"({"w":{"dtype":"F32","shape":)" + shape + R"(],"data_offsets":[0,8]}})", 8); });
  EXPECT_TRUE(Contains(message, "expected a possible shape, found shape (2, 2, 2")) << message;
  EXPECT_LT(message.size(), 300u);
}

TEST(SafetensorsHeader, IsNotEncodedWithTextThatIsNotUtf8) {
  TensorHeader header;
  header.tensors.push_back({"\xff", DType::kFloat32, Shape{0}, 0, 0});
  EXPECT_THROW(EncodeHeader(header), InvalidArgument);
  EXPECT_THROW(EncodeHeader({{}, {{"key", "\xc3"}}}), InvalidArgument);
}

}  // namespace
}  // namespace heddle::storage
