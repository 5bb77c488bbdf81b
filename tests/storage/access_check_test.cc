// The access checker: each way in which a body may touch an array, declared or not, on every
// engine.
#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>

#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/engine/support.h"
#include "tests/message_of.h"

namespace heddle {
namespace {

using Floats = std::vector<float>;

EngineOptions Checking(EngineOptions options) {
  options.check_access = true;
  return options;
}

class AccessCheck : public engine_test::EveryEngine {
 protected:
  NDArray Ones() { return NDArray::Ones({2, 3}, DType::kFloat32, Cpu(1), engine_); }
  RowSparseNDArray Rows() {
    return RowSparseNDArray::FromVectors<float>({1, 4}, {1, 2, 3, 4}, {6, 2}, DType::kFloat32,
                                                Cpu(), engine_);
  }
  void Run(const OpOptions& options, std::function<void()> body) {
    engine_.Push(options, std::move(body));
    engine_.WaitForAll();
  }
  // The op fails with an AccessError that has all of `parts`.
  void ExpectCaught(const OpOptions& options, std::function<void()> body,
                    const std::vector<std::string>& parts) {
    engine_.Push(options, std::move(body));
    const std::string message = MessageOf<AccessError>([&] { engine_.WaitForAll(); });
    for (const std::string& part : parts) {
      EXPECT_NE(message.find(part), std::string::npos) << part << " is not in: " << message;
    }
  }

  Engine engine_{Checking(GetParam().options)};
  const NDArray a_ = Ones(), b_ = Ones();
};

TEST_P(AccessCheck, AReadThatIsNotDeclaredIsCaught) {
  ExpectCaught({.name = "peek", .reads = {b_.var()}}, [a = a_] { a.data<const float>(); },
               {"op 'peek'", "reads array " + a_.var().name(), "(2, 3), float32, cpu(1)",
                "does not declare"});
  ExpectCaught({.name = "peek"}, [a = a_] { a.const_data(); }, {"op 'peek'", "reads"});
}

TEST_P(AccessCheck, AWriteThatIsNotDeclaredIsCaughtAndPoisonsWhatTheOpWrites) {
  ExpectCaught({.name = "scribble", .writes = {b_.var()}}, [a = a_] { a.data<float>(); },
               {"op 'scribble'", "writes array " + a_.var().name(), "does not declare"});
  EXPECT_THROW(b_.WaitToRead(), AccessError);
  EXPECT_EQ(engine_.FailureOf(b_.var())->op, "scribble");
  EXPECT_EQ(a_.ToVector<float>(), Floats(6, 1));
}

TEST_P(AccessCheck, AWriteToWhatIsDeclaredAsReadIsCaught) {
  ExpectCaught({.name = "add", .reads = {a_.var()}, .writes = {b_.var()}}, [a = a_] { a.data(); },
               {"op 'add'", "writes array " + a_.var().name(), "declares as read"});
}

TEST_P(AccessCheck, WhatIsDeclaredMayBeTouched) {
  Run({.name = "copy", .reads = {a_.var()}, .writes = {b_.var()}}, [a = a_, b = b_] {
    for (int i = 0; i < 6; ++i) b.data<float>()[i] = a.data<const float>()[i] + 1;
  });
  Run({.name = "change", .reads = {b_.var()}, .writes = {b_.var()}},
      [b = b_] { b.data<float>()[0] += b.data<const float>()[1]; });
  EXPECT_EQ(b_.ToVector<float>(), (Floats{4, 2, 2, 2, 2, 2}));
}

TEST_P(AccessCheck, ViewsCountAsTheirArray) {
  const NDArray row = a_.Slice(1, 2);
  Run({.name = "view", .reads = {row.var()}}, [a = a_] { a.data<const float>(); });
  ExpectCaught({.name = "view", .reads = {a_.var()}}, [row] { row.data<float>(); },
               {"op 'view'", "(1, 3)", "declares as read"});
}

TEST_P(AccessCheck, ABodyMayUseArraysOfItsOwn) {
  Run({.name = "scratch", .writes = {b_.var()}}, [b = b_, &engine = engine_] {
    const NDArray scratch({6}, DType::kFloat32, Cpu(), engine);
    std::fill_n(scratch.data<float>(), 6, 7.0F);
    std::copy_n(scratch.data<const float>(), 6, b.data<float>());
  });
  EXPECT_EQ(b_.ToVector<float>(), Floats(6, 7));
}

TEST_P(AccessCheck, AnArrayThatAnotherBodyMadeIsCaught) {
  auto made = std::make_shared<NDArray>();
  Run({.name = "make"}, [made, &engine = engine_] {
    *made = NDArray({6}, DType::kFloat32, Cpu(), engine);
    made->data<float>()[0] = 1;
  });
  ExpectCaught({.name = "steal"}, [made] { made->data<const float>(); }, {"op 'steal'", "reads"});
}

TEST_P(AccessCheck, ThreadsThatHelpABodyAreChecked) {
  for (const bool declared : {true, false}) {
    OpOptions options{.name = "blocks", .writes = {b_.var()}};
    if (declared) options.reads = {a_.var()};
    const auto body = [a = a_, &engine = engine_] {
      engine.ParallelFor(64, 1, [&](std::int64_t, std::int64_t) { a.data<const float>(); });
    };
    if (declared) {
      Run(options, body);
    } else {
      ExpectCaught(options, body, {"op 'blocks'", "reads", "does not declare"});
    }
  }
}

TEST_P(AccessCheck, BodiesOfAsyncOpsAreChecked) {
  engine_.PushAsync({.name = "send", .writes = {b_.var()}},
                    [a = a_](Completion) { a.data<const float>(); });
  const std::string message = MessageOf<AccessError>([&] { engine_.WaitForAll(); });
  EXPECT_NE(message.find("op 'send' reads"), std::string::npos) << message;
}

TEST_P(AccessCheck, ArraysOfAnotherEngineAreCaught) {
  Engine other(EngineOptions::FromEnvironment());
  const NDArray foreign = NDArray::Ones({2}, DType::kFloat32, Cpu(), other);
  foreign.WaitToRead();
  ExpectCaught({.name = "foreign"}, [foreign] { foreign.const_data(); },
               {"op 'foreign'", "reads", "does not declare"});
}

TEST_P(AccessCheck, OutsideOfBodiesNothingIsChecked) {
  a_.WaitToWrite();
  a_.data<float>()[0] = 3;
  EXPECT_EQ(a_.data<const float>()[0], 3);
}

TEST_P(AccessCheck, OtherEnginesOfTheProcessAreNotChecked) {
  Engine plain(GetParam().options.check_access ? EngineOptions{} : GetParam().options);
  const NDArray array = NDArray::Ones({2}, DType::kFloat32, Cpu(), plain);
  array.WaitToRead();
  plain.Push({.name = "undeclared"}, [array] { array.data<float>()[0] = 5; });
  plain.WaitForAll();
  EXPECT_EQ(array.ToVector<float>(), (Floats{5, 1}));
}

TEST_P(AccessCheck, RowSparseArraysAreCheckedToo) {
  const RowSparseNDArray rows = Rows();
  const std::vector<std::function<void()>> reads = {
      [rows] { rows.num_rows(); }, [rows] { rows.row_ids(); }, [rows] { rows.rows<const float>(); },
      [rows] { rows.const_rows(); }};
  const std::vector<std::function<void()>> writes = {
      [rows] { rows.rows<float>(); }, [rows] { rows.rows(); }, [rows] { rows.SetRowIds({}); }};
  for (const auto& read : reads) {
    ExpectCaught({.name = "r"}, read, {"op 'r' reads array " + rows.var().name(), "(6, 2)"});
    Run({.name = "r", .reads = {rows.var()}}, read);
    Run({.name = "r", .writes = {rows.var()}}, read);
  }
  for (const auto& write : writes) {
    ExpectCaught({.name = "w"}, write, {"op 'w' writes array", "does not declare"});
    ExpectCaught({.name = "w", .reads = {rows.var()}}, write, {"declares as read"});
    Run({.name = "w", .writes = {rows.var()}}, write);
  }
}

INSTANTIATE_TEST_SUITE_P(All, AccessCheck, testing::ValuesIn(engine_test::AllConfigs()),
                         engine_test::ConfigLabel);

}  // namespace
}  // namespace heddle
