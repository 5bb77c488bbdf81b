// Saving and loading arrays: the values, the order against other ops, and every way a file can be
// bad.
#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/files.h>
#include <heddle/memory.h>
#include <heddle/row_sparse.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "tests/engine/support.h"
#include "tests/message_of.h"
#include "tools/testing/temp_folder.h"

namespace heddle {
namespace {

using engine_test::Contains;
using engine_test::Hold;
using Floats = std::vector<float>;

std::string BytesOf(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void WriteBytes(const std::string& file, const std::string& bytes) {
  std::ofstream(file, std::ios::binary) << bytes;
}

class Files : public engine_test::EveryEngine {
 protected:
  NDArray Array(const Floats& values, Shape shape, DType dtype = DType::kFloat32) {
    return NDArray::FromVector(values, std::move(shape), dtype, Cpu(), engine_);
  }
  NDArray Array(const Floats& values) {
    return Array(values, Shape{static_cast<std::int64_t>(values.size())});
  }
  ArrayFile Load(const std::string& file) { return LoadArrays(file, Cpu(), engine_); }

  // Loading `bytes` throws IoError with a message that names the file and has `part`.
  void ExpectRefused(const std::string& bytes, const std::string& part) {
    const std::string file = folder_ / "bad";
    WriteBytes(file, bytes);
    const std::string message = MessageOf<IoError>([&] { Load(file); });
    EXPECT_TRUE(Contains(message, file)) << message;
    EXPECT_TRUE(Contains(message, part)) << message;
  }

  std::vector<std::string> NamesInFolder() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      names.push_back(entry.path().filename().string());
    }
    std::ranges::sort(names);
    return names;
  }

  const tools::TempFolder folder_;
  const std::string file_ = folder_ / "arrays.safetensors";
  Engine engine_{GetParam().options};
};

TEST_P(Files, BringBackNamesValuesShapesTypesAndMetadata) {
  std::vector<NamedArray> saved;
  for (const DType dtype : kAllDTypes) {
    saved.push_back(
        {"array of " + std::string(Name(dtype)), Array({0, 1, 2, 3, 4, 100}, {2, 3}, dtype)});
  }
  saved.push_back({"scalar", Array({7}, {})});
  saved.push_back({"none", Array({}, {0, 4})});
  saved.push_back({"view", Array({1, 2, 3, 4}).Slice(1, 3)});
  SaveArrays(file_, saved, {{"step", "12"}});
  const ArrayFile loaded = LoadArrays(file_, Cpu(2), engine_);
  EXPECT_EQ(loaded.metadata, (FileMetadata{{"step", "12"}}));
  ASSERT_EQ(loaded.arrays.size(), saved.size());
  for (std::size_t i = 0; i < saved.size(); ++i) {
    EXPECT_EQ(loaded.arrays[i].name, saved[i].name);
    EXPECT_EQ(loaded.arrays[i].array.shape(), saved[i].array.shape());
    EXPECT_EQ(loaded.arrays[i].array.dtype(), saved[i].array.dtype());
    EXPECT_EQ(loaded.arrays[i].array.device(), Cpu(2));
    EXPECT_EQ(loaded.arrays[i].array.ToVector<double>(), saved[i].array.ToVector<double>());
  }
  EXPECT_EQ(loaded.Find("view").ToVector<float>(), (Floats{2, 3}));
  EXPECT_TRUE(loaded.Find("unknown").empty());
  EXPECT_EQ(NamesInFolder(), std::vector<std::string>{"arrays.safetensors"});
}

// What another program finds: docs/files.md.
TEST_P(Files, HaveTheDocumentedBytes) {
  SaveArrays(file_, {{"b", Array({1, 0}, {2}, DType::kBool)}, {"w", Array({1, -2})}});
  const std::string header = R"({"b":{"dtype":"BOOL","shape":[2],"data_offsets":[8,10]},)"
                             R"("w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  std::string expected(1, static_cast<char>((header.size() + 7) / 8 * 8));
  expected += std::string(7, '\0') + header;
  expected.resize(8 + (header.size() + 7) / 8 * 8, ' ');
  expected += std::string("\0\0\x80\x3f\0\0\0\xc0\1\0", 10);
  EXPECT_EQ(BytesOf(file_), expected);
}

TEST_P(Files, BringBackRowSparseArrays) {
  using Rows = RowSparseNDArray;
  const std::vector<NamedRowSparseArray> saved = {
      {"embedding",
       Rows::FromVectors<float>({1, 40}, {1, 2, 3, 4}, {50, 2}, DType::kFloat32, Cpu(), engine_)},
      {"half", Rows::FromVectors<float>({0}, {5}, {3}, DType::kFloat16, Cpu(), engine_)},
      {"none", Rows({7, 2, 2}, DType::kInt8, Cpu(), engine_)}};
  SaveArrays(file_, {{"bias", Array({1, 2})}}, saved, {{"step", "12"}});
  const ArrayFile loaded = LoadArrays(file_, Cpu(2), engine_);
  EXPECT_EQ(loaded.metadata, (FileMetadata{{"step", "12"}}));
  ASSERT_EQ(loaded.arrays.size(), 1U);
  EXPECT_EQ(loaded.Find("bias").ToVector<float>(), (Floats{1, 2}));
  ASSERT_EQ(loaded.row_sparse.size(), saved.size());
  for (const auto& [name, array] : saved) {
    const RowSparseNDArray found = loaded.FindRowSparse(name);
    ASSERT_FALSE(found.empty()) << name;
    EXPECT_EQ(found.shape(), array.shape());
    EXPECT_EQ(found.dtype(), array.dtype());
    EXPECT_EQ(found.device(), Cpu(2));
    EXPECT_EQ(found.ToVectors<float>().row_ids, array.ToVectors<float>().row_ids);
    EXPECT_EQ(found.ToVectors<float>().rows, array.ToVectors<float>().rows);
  }
  EXPECT_TRUE(loaded.FindRowSparse("bias").empty());
  EXPECT_TRUE(loaded.Find("embedding").empty());
}

TEST_P(Files, HoldTheRowsOfTheMomentOfTheCall) {
  const RowSparseNDArray array =
      RowSparseNDArray::FromVectors<float>({2}, {1}, {4}, DType::kFloat32, Cpu(), engine_);
  array += RowSparseNDArray::FromVectors<float>({3}, {1}, {4}, DType::kFloat32, Cpu(), engine_);
  SaveArrays(file_, {}, {{"a", array}});
  array.Clear();
  EXPECT_EQ(Load(file_).FindRowSparse("a").ToVector<float>(), (Floats{0, 0, 1, 1}));
}

TEST_P(Files, HaveTheDocumentedBytesOfRowSparseArrays) {
  SaveArrays(file_, {},
             {{"e", RowSparseNDArray::FromVectors<float>({1, 2}, {5, 6}, {9, 1}, DType::kFloat32,
                                                         Cpu(), engine_)}});
  const std::string bytes = BytesOf(file_);
  for (const char* part : {R"("heddle.row_sparse.e":"9")",
                           R"("e.row_ids":{"dtype":"I64","shape":[2],"data_offsets":[0,16]})",
                           R"("e.rows":{"dtype":"F32","shape":[2,1],"data_offsets":[16,24]})"}) {
    EXPECT_TRUE(Contains(bytes, part)) << part << " is not in " << bytes;
  }
}

TEST_P(Files, WithBadRowSparseArraysAreRefused) {
  // Headers of which the parts do not make a row-sparse array of 3 rows, one of which is there.
  const auto file_of = [](const std::string& rows, const std::string& ids_name,
                          const std::string& ids_type, const std::string& rows_shape,
                          std::int64_t id) {
    std::string header = "{\"__metadata__\":{\"heddle.row_sparse.e\":\"" + rows + "\"},\"" +
                         ids_name + "\":{\"dtype\":\"" + ids_type +
                         "\",\"shape\":[1],\"data_offsets\":[0,8]},\"e.rows\":{\"dtype\":"
                         "\"F32\",\"shape\":" +
                         rows_shape + ",\"data_offsets\":[8,12]}}";
    while (header.size() % 8 != 0) header += ' ';
    std::string bytes(8, '\0');
    bytes[0] = static_cast<char>(header.size() & 0xFF);
    bytes[1] = static_cast<char>(header.size() >> 8);
    bytes += header;
    for (int i = 0; i < 8; ++i) bytes += static_cast<char>(id >> (8 * i));
    return bytes + std::string(4, '\0');
  };
  WriteBytes(file_, file_of("3", "e.row_ids", "I64", "[1,1]", 2));
  EXPECT_EQ(Load(file_).FindRowSparse("e").shape(), (Shape{3, 1}));
  ExpectRefused(file_of("3", "e.row_ids", "I64", "[1,1]", 3), "row id 3: expected one in [0, 3)");
  ExpectRefused(file_of("3", "e.row_ids", "I64", "[1,1]", -1), "row id -1");
  ExpectRefused(file_of("x", "e.row_ids", "I64", "[1,1]", 2),
                "expected a number of rows, found 'x'");
  ExpectRefused(file_of("-1", "e.row_ids", "I64", "[1,1]", 0), "expected a number of rows");
  ExpectRefused(file_of("3", "e.ids", "I64", "[1,1]", 2), "'e.row_ids' of a row-sparse one");
  ExpectRefused(file_of("3", "e.row_ids", "F64", "[1,1]", 2), "expected int64 ids");
  ExpectRefused(file_of("3", "e.row_ids", "I64", "[]", 2), "as many rows");
  ExpectRefused(file_of("9223372036854775807", "e.row_ids", "I64", "[1,1]", -5), "row id -5");
}

// What the file says of itself may be of any length.
TEST_P(Files, AreRefusedInMessagesOfBoundedLength) {
  const std::string name(100'000, 'n');
  const auto refuse = [&](std::string header, const std::string& data, bool as_list) {
    while (header.size() % 8 != 0) header += ' ';
    std::string bytes;
    for (int i = 0; i < 8; ++i) bytes += static_cast<char>(header.size() >> (8 * i));
    WriteBytes(file_, bytes + header + data);
    const std::string message = MessageOf<IoError>(
        [&] { as_list ? (void)LoadArrayList(file_, Cpu(), engine_) : (void)Load(file_); });
    EXPECT_LT(message.size(), 300u + file_.size());
  };
  const std::string byte = R"(":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]})";
  refuse("{\"" + name + byte + "}", "\x02", false);
  refuse("{\"" + name + byte + "}", "\x01", true);
  refuse("{\"__metadata__\":{\"heddle.row_sparse." + name + "\":\"3\"}}", "", false);
  const std::string parts = R"("e.row_ids":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]},)"
                            R"("e.rows":{"dtype":"BOOL","shape":[1],"data_offsets":[1,2]}})";
  refuse(R"({"__metadata__":{"heddle.row_sparse.e":")" + name + "\"}," + parts,
         std::string(2, '\0'), false);
}

TEST_P(Files, RefuseRowSparseArraysThatDoNotFit) {
  const RowSparseNDArray array({3, 1}, DType::kFloat32, Cpu(), engine_);
  const auto refused = [&](const std::function<void()>& call) {
    return MessageOf<InvalidArgument>(call);
  };
  EXPECT_TRUE(Contains(refused([&] {
                         SaveArrays(file_, {}, {{"a", RowSparseNDArray()}});
                       }),
                       "empty handle"));
  EXPECT_TRUE(Contains(refused([&] {
                         SaveArrays(file_, {}, {{"a", array}, {"a", array}});
                       }),
                       "'a.row_ids' twice"));
  EXPECT_TRUE(Contains(refused([&] {
                         SaveArrays(file_, {{"a.rows", Array({1})}}, {{"a", array}});
                       }),
                       "'a.rows' twice"));
  EXPECT_TRUE(Contains(refused([&] {
                         SaveArrays(file_, {{"a", Array({1})}}, {{"heddle.row_sparse.a", "3"}});
                       }),
                       "heddle.row_sparse."));
  EXPECT_TRUE(NamesInFolder().empty());
  SaveArrays(file_, {}, {{"0", array}});
  EXPECT_TRUE(Contains(MessageOf<IoError>([&] { LoadArrayList(file_, Cpu(), engine_); }),
                       "found row-sparse '0'"));
}

TEST_P(Files, KeepLists) {
  std::vector<NDArray> list;
  for (int i = 0; i < 12; ++i) list.push_back(Array({static_cast<float>(i)}));
  SaveArrayList(file_, list);
  EXPECT_EQ(Load(file_).arrays[10].name, "10");
  const std::vector<NDArray> loaded = LoadArrayList(file_, Cpu(), engine_);
  ASSERT_EQ(loaded.size(), list.size());
  for (int i = 0; i < 12; ++i) {
    EXPECT_EQ(loaded[static_cast<std::size_t>(i)].ToVector<int>(), std::vector<int>{i});
  }
  SaveArrayList(file_, {});
  EXPECT_TRUE(LoadArrayList(file_, Cpu(), engine_).empty());
  // Names in another order make the same list; other names none.
  SaveArrays(file_, {{"1", list[1]}, {"0", list[0]}});
  EXPECT_EQ(LoadArrayList(file_, Cpu(), engine_)[1].ToVector<int>(), std::vector<int>{1});
  for (const char* name : {"1", "00", "x", "", "-0", "99999999999999999999"}) {
    SaveArrays(file_, {{name, list[0]}});
    const std::string message = MessageOf<IoError>([&] { LoadArrayList(file_, Cpu(), engine_); });
    EXPECT_TRUE(Contains(message, "expected a list")) << message;
  }
}

TEST_P(Files, HoldTheValuesOfTheMomentOfTheCall) {
  const NDArray array = Array({1, 2});
  array *= 5;
  SaveArrays(file_, {{"a", array}});
  array.Fill(0);
  EXPECT_EQ(Load(file_).Find("a").ToVector<float>(), (Floats{5, 10}));
}

TEST_P(Files, StayWhenAnArrayIsPoisoned) {
  const NDArray good = Array({1, 2});
  const NDArray bad = Array({3});
  SaveArrays(file_, {{"a", good}});
  const std::string before = BytesOf(file_);
  engine_.Push({.name = "bad", .writes = {bad.var()}}, [] { throw std::runtime_error("poison"); });
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(MessageOf<std::runtime_error>([&] {
                SaveArrays(file_, {{"a", good}, {"b", bad}});
              }),
              "poison");
  }
  EXPECT_EQ(BytesOf(file_), before);
  EXPECT_EQ(NamesInFolder().size(), 1u);
}

TEST_P(Files, RefuseBadArrays) {
  Engine other(GetParam().options);
  const NDArray a = Array({1});
  const NDArray foreign({1}, DType::kFloat32, Cpu(), other);
  const auto refused = [&](const std::vector<NamedArray>& arrays, const std::string& part) {
    const std::string message = MessageOf<InvalidArgument>([&] { SaveArrays(file_, arrays); });
    EXPECT_TRUE(Contains(message, part)) << message;
  };
  refused({{"a", a}, {"b", NDArray()}}, "empty handle");
  refused({{"a", a}, {"b", foreign}}, "another engine");
  refused({{"a", a}, {"a", a}}, "'a' twice");
  refused({{"__metadata__", a}}, "__metadata__");
  refused({{"\xff", a}}, "UTF-8");
  EXPECT_TRUE(NamesInFolder().empty());
}

TEST_P(Files, RefuseMoreArraysThanAnOpReads) {
  const std::vector<NDArray> many(65'001, Array({1}));
  const std::string message =
      MessageOf<InvalidArgument>([&] { SaveArrayList(folder_ / "many", many); });
  EXPECT_TRUE(Contains(message, "at most 65000 arrays in a file, got 65001")) << message;
}

TEST_P(Files, RefuseToBeWrittenInsideAnOp) {
  const NDArray a = Array({1});
  std::string message;
  engine_.Push({.name = "saves"}, [&] {
    message = MessageOf<InvalidState>([&] { SaveArrays(file_, {{"a", a}}); });
  });
  engine_.WaitForAll();
  EXPECT_TRUE(Contains(message, "SaveArrays inside op 'saves'")) << message;
  EXPECT_TRUE(NamesInFolder().empty());
}

TEST_P(Files, ThatCannotBeWrittenAreNamed) {
  const NDArray a = Array({1});
  WriteBytes(folder_ / "plain", "x");
  std::filesystem::create_directory(folder_ / "folder");
  // Stands for a device, whose name must not become that of a file either.
  ASSERT_EQ(mkfifo((folder_ / "fifo").c_str(), 0600), 0);
  for (const std::string& file : {folder_ / "missing/a", folder_ / "plain/a", folder_ / "folder",
                                  folder_ / "fifo", std::string("/dev/full/a")}) {
    const std::string message = MessageOf<IoError>([&] { SaveArrays(file, {{"a", a}}); });
    EXPECT_TRUE(Contains(message, file)) << message;
  }
  EXPECT_EQ(NamesInFolder(), (std::vector<std::string>{"fifo", "folder", "plain"}));
  EXPECT_TRUE(std::filesystem::is_fifo(folder_ / "fifo"));
  engine_.WaitForAll();  // the failures have been reported
}

TEST_P(Files, ThatCannotBeReadAreNamed) {
  std::filesystem::create_directory(folder_ / "folder");
  ASSERT_EQ(mkfifo((folder_ / "fifo").c_str(), 0600), 0);
  for (const std::string& file :
       {folder_ / "missing", folder_ / "folder", folder_ / "fifo", std::string("/dev/zero")}) {
    const std::string message = MessageOf<IoError>([&] { Load(file); });
    EXPECT_TRUE(Contains(message, file)) << message;
  }
  EXPECT_THROW(LoadArrays(file_, Gpu(-1), engine_), InvalidArgument);
}

TEST_P(Files, OfOtherFormatsAreRefused) {
  ExpectRefused("", "found 0 bytes");
  ExpectRefused(std::string("\x93NUMPY\x01\x00v", 9), "found another format");
  ExpectRefused(std::string("\x02\0\0\0\0\0\0\0[]", 10), "found another format");
  ExpectRefused("some text that says nothing", "found another format");
  ExpectRefused(std::string(8, '\xff'), "found 18446744073709551615");
  ExpectRefused(std::string("\0\0\0\0\1\0\0\0{}", 10), "found 4294967296");
  ExpectRefused(std::string("\x03\0\0\0\0\0\0\0{}", 10), "at most 2 bytes, found 3");
  const std::string bools = R"({"b":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}} )";
  ExpectRefused(
      std::string(1, static_cast<char>(bools.size())) + std::string(7, '\0') + bools + "\x01\x02",
      "expected bools of 0 or 1, found 2");
}

TEST_P(Files, WhatCouldNotBeLoadedIsNotSaved) {
  std::uint8_t bytes[] = {1, 2};
  const NDArray foreign = NDArray::FromForeign(
      bytes, {2}, DType::kBool, [] {}, Cpu(), engine_);
  const std::string message = MessageOf<InvalidArgument>([&] {
    SaveArrays(file_, {{"b", foreign}});
  });
  EXPECT_TRUE(Contains(message, "array 'b': expected bools of 0 or 1, found 2")) << message;
  EXPECT_TRUE(NamesInFolder().empty());
}

TEST_P(Files, CutAtAnyLengthAreRefused) {
  SaveArrays(file_, {{"weight", Array({1, 2, 3})}, {"ids", Array({1, 2}, {2}, DType::kInt8)}},
             {{"k", "v"}});
  const std::string whole = BytesOf(file_);
  for (std::size_t length = 0; length < whole.size(); ++length) {
    WriteBytes(file_, whole.substr(0, length));
    EXPECT_THROW(Load(file_), IoError) << length;
  }
  WriteBytes(file_, whole + "x");
  EXPECT_THROW(Load(file_), IoError);
  WriteBytes(file_, whole);
  EXPECT_EQ(Load(file_).Find("weight").ToVector<float>(), (Floats{1, 2, 3}));
}

// Damaged files load, with other contents, or are refused as IoError; never anything else. Memory
// stays within the size of the file: arrays of more are refused by their places.
TEST_P(Files, WithDamagedBytesLoadOrAreRefused) {
  SaveArrays(file_,
             {{"weight", Array({1, 2, 3, 4}, {2, 2})}, {"flags", Array({1, 0}, {2}, DType::kBool)}},
             {{"k", "v"}});
  const std::string whole = BytesOf(file_);
  std::mt19937_64 random(engine_test::BaseSeed());
  const int rounds = engine_test::Rounds(1000);
  int refused = 0;
  for (int round = 0; round < rounds; ++round) {
    std::string damaged = whole;
    for (std::uint64_t flips = 1 + random() % 4; flips > 0; --flips) {
      damaged[random() % damaged.size()] ^= static_cast<char>(1 << (random() % 8));
    }
    WriteBytes(file_, damaged);
    try {
      for (const auto& [name, array] : Load(file_).arrays) {
        EXPECT_LE(array.bytes(), static_cast<std::int64_t>(whole.size()));
        (void)array.ToVector<double>();
      }
    } catch (const IoError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 0);
}

TEST_P(Files, LargerThanOneBlockComeBack) {
  const std::int64_t count = 3 << 20;
  const NDArray array = NDArray::Arange(count, DType::kInt32, Cpu(), engine_);
  SaveArrays(file_, {{"a", array}});
  EXPECT_EQ(Load(file_).Find("a").ToVector<std::int32_t>(), array.ToVector<std::int32_t>());
}

// Sixteen times as many take about sixteen times as long, at the third attempt at the latest.
TEST(FilesOfManyArrays, TakeTimeInProportion) {
  const tools::TempFolder folder;
  const std::string file = folder / "arrays.safetensors";
  Engine engine;
  const auto time_of = [&](int count) {
    std::vector<NamedRowSparseArray> saved;
    const RowSparseNDArray none({7, 2}, DType::kInt8, Cpu(), engine);
    for (int i = 0; i < count; ++i) saved.push_back({std::to_string(i), none});
    SaveArrays(file, {}, saved);
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(LoadArrays(file, Cpu(), engine).row_sparse.size(), saved.size());
    return std::chrono::steady_clock::now() - start;
  };
  for (int attempt = 0; attempt < 3; ++attempt) {
    const auto few = time_of(1000);
    if (time_of(16'000) < 48 * few) return;
  }
  ADD_FAILURE() << "took more than 48 times as long";
}

INSTANTIATE_TEST_SUITE_P(All, Files, testing::ValuesIn(engine_test::AllConfigs()),
                         engine_test::ConfigLabel);

}  // namespace
}  // namespace heddle
