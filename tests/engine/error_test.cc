// Errors of op bodies: how they poison variables, spread, are cured, and come back. Random graphs
// with failing ops are in error_graph_test.cc.
#include <heddle/engine.h>

#include <atomic>
#include <exception>
#include <latch>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "engine/fail_write.h"
#include "tests/engine/support.h"
#include "tests/message_of.h"

namespace heddle::engine_test {
namespace {

class ErrorTest : public EveryEngine {};
INSTANTIATE_TEST_SUITE_P(All, ErrorTest, testing::ValuesIn(AllConfigs()), ConfigLabel);

struct ForeignError {  // not derived from std::exception
  int code;
};

std::exception_ptr MakeError(const std::string& message) {
  return std::make_exception_ptr(std::runtime_error(message));
}

// The exception that `call` throws, null if none.
template <class F>
std::exception_ptr Thrown(F&& call) {
  try {
    call();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

TEST_P(ErrorTest, AForeignExceptionComesBackUnchangedAtEveryWaitOnTheVar) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  const std::exception_ptr error = MakeError("mine");
  engine.Push({.name = "fails", .writes = {x}}, [error] { std::rethrow_exception(error); });
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(Thrown([&] { engine.WaitForVar(x); }), error);  // the very object, not a copy
    EXPECT_EQ(Thrown([&] { engine.WaitForReadsAndWrites(x); }), error);
    EXPECT_EQ(Thrown([&] { engine.WaitForVar(x, std::chrono::seconds(60)); }), error);
    EXPECT_EQ(Thrown([&] { engine.WaitForReadsAndWrites(x, std::chrono::seconds(60)); }), error);
    EXPECT_EQ(engine.ErrorOf(x), error);
  }
}

TEST_P(ErrorTest, AnyTypeMayBeThrown) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  engine.Push({.name = "throws_struct", .writes = {x}}, [] { throw ForeignError{42}; });
  engine.Push({.name = "throws_int", .writes = {y}}, [] { throw 7; });
  try {
    engine.WaitForVar(x);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const ForeignError& error) {
    EXPECT_EQ(error.code, 42);
  }
  EXPECT_THROW(engine.WaitForVar(y), int);
  ASSERT_TRUE(engine.FailureOf(x).has_value());
  EXPECT_EQ(engine.FailureOf(x)->op, "throws_struct");
  EXPECT_FALSE(engine.FailureOf(x)->message.empty());
}

TEST_P(ErrorTest, AnExceptionMayHaveNoMessage) {
  struct Silent : std::exception {
    const char* what() const noexcept override { return nullptr; }
  };
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  engine.Push({.name = "silent", .writes = {x}}, [] { throw Silent(); });
  EXPECT_THROW(engine.WaitForVar(x), Silent);
  EXPECT_FALSE(engine.FailureOf(x).value().message.empty());
  engine.PushAsync({.name = "completed_so", .writes = {y}},
                   [](Completion done) { done(std::make_exception_ptr(Silent())); });
  EXPECT_THROW(engine.WaitForVar(y), Silent);
}

TEST_P(ErrorTest, FailureOfNamesTheOpThatFailedFirstItsVarAndItsMessage) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y"), z = engine.NewVar("z");
  EXPECT_FALSE(engine.FailureOf(x).has_value());
  EXPECT_EQ(engine.ErrorOf(x), nullptr);
  engine.Push({.name = "root", .writes = {y, x}}, [] { throw std::runtime_error("went wrong"); });
  engine.Push({.name = "next", .reads = {x}, .writes = {z}}, [] {});
  EXPECT_THROW(engine.WaitForVar(z), std::runtime_error);
  EXPECT_THROW(engine.WaitForVar(y), std::runtime_error);
  for (const Var& var : {x, y, z}) {
    const std::optional<Failure> failure = engine.FailureOf(var);
    ASSERT_TRUE(failure.has_value()) << var.name();
    EXPECT_EQ(failure->op, "root");
    EXPECT_EQ(failure->var, "y");
    EXPECT_EQ(failure->message, "went wrong");
  }
}

TEST_P(ErrorTest, FailureMessagesOfHeddlesOwnErrorsAreKept) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  engine.Push({.name = "fails", .writes = {x}}, [] { throw IoError("disk full"); });
  EXPECT_EQ(MessageOf<IoError>([&] { engine.WaitForVar(x); }), "disk full");
  EXPECT_EQ(engine.FailureOf(x)->message, "disk full");
}

TEST_P(ErrorTest, ReadersAndReadModifiersOfAPoisonedVarAreSkippedAndPassTheErrorOn) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y"), z = engine.NewVar("z"),
            unrelated = engine.NewVar("unrelated");
  const std::exception_ptr error = MakeError("root");
  bool read = false, modified = false, third = false, carried_on = false;
  engine.Push({.name = "root", .writes = {x}}, [error] { std::rethrow_exception(error); });
  engine.Push({.name = "read", .reads = {x}, .writes = {y}}, [&] { read = true; });
  engine.Push({.name = "modify", .reads = {x}, .writes = {x}}, [&] { modified = true; });
  engine.Push({.name = "third", .reads = {unrelated, y}, .writes = {z}}, [&] { third = true; });
  engine.Push({.name = "unrelated", .writes = {unrelated}}, [&] { carried_on = true; });
  for (const Var& var : {x, y, z}) {
    EXPECT_EQ(Thrown([&] { engine.WaitForVar(var); }), error) << var.name();
  }
  engine.WaitForVar(unrelated);
  EXPECT_TRUE(carried_on);
  EXPECT_FALSE(read || modified || third);
  EXPECT_EQ(engine.version(x), 2u);
  EXPECT_EQ(engine.version(y), 1u);
  EXPECT_EQ(engine.version(z), 1u);
}

TEST_P(ErrorTest, APureOverwriteCuresItsVarsAndOnlyThose) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y"), z = engine.NewVar("z");
  int value = 0;
  engine.Push({.name = "root", .writes = {x, y}}, [] { throw std::runtime_error("root"); });
  engine.Push({.name = "overwrite", .writes = {x}}, [&] { value = 5; });
  engine.Push({.name = "read", .reads = {x}, .writes = {z}}, [&] { value *= 2; });
  engine.WaitForVar(z);
  engine.WaitForVar(x);
  EXPECT_EQ(value, 10);
  EXPECT_FALSE(engine.FailureOf(x).has_value());
  EXPECT_EQ(engine.ErrorOf(x), nullptr);
  EXPECT_THROW(engine.WaitForVar(y), std::runtime_error);
}

TEST_P(ErrorTest, AFailureThatIsKeptIsNotCuredByOverwrites) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  const auto fail = [&](const char* error) {
    engine.Push({.name = "merge", .writes = {x}, .run_when_poisoned = true}, [error] {
      engine::KeepFailure();
      throw std::runtime_error(error);
    });
  };
  std::atomic<int> overwrites = 0, settled = 0;
  const auto overwrite = [&](const Var& var) {
    engine.Push({.name = "overwrite", .writes = {var}}, [&] { ++overwrites; });
  };
  for (const bool by_clear_error : {false, true}) {
    fail("kept");
    overwrite(x);
    overwrite(x);  // the one before, which was skipped, has passed the failure on as it was
    engine.Push({.name = "copy", .reads = {x}, .writes = {y}}, [&] { ++overwrites; });
    overwrite(y);  // of another variable, though by the same failure
    EXPECT_EQ(MessageOf<std::runtime_error>([&] { engine.WaitForVar(x); }), "kept");
    engine.WaitForVar(y);
    EXPECT_EQ(overwrites.exchange(0), 1);
    if (by_clear_error) {
      engine.ClearError(x);
    } else {
      engine.Push({.name = "settle", .writes = {x}, .run_when_poisoned = true}, [&] { ++settled; });
    }
    engine.WaitForVar(x);
    engine.Push({.name = "fail", .writes = {x}}, [] { throw std::runtime_error("another"); });
    overwrite(x);  // which is not kept
    engine.WaitForVar(x);
    EXPECT_EQ(overwrites.exchange(0), 1);
  }
  EXPECT_EQ(settled, 1);
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
}

// What is skipped because of another input has not written the variable either.
TEST_P(ErrorTest, AFailureThatIsKeptOutlivesOpsThatOtherFailuresSkip) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), other = engine.NewVar("other");
  std::atomic<int> runs = 0;
  engine.Push({.name = "fail", .writes = {other}}, [] { throw std::runtime_error("other"); });
  engine.Push({.name = "merge", .writes = {x}, .run_when_poisoned = true}, [] {
    engine::KeepFailure();
    throw std::runtime_error("kept");
  });
  const auto expect_kept = [&] {
    engine.Push({.name = "overwrite", .writes = {x}}, [&] { ++runs; });
    EXPECT_EQ(MessageOf<std::runtime_error>([&] { engine.WaitForVar(x); }), "kept");
  };
  engine.Push({.name = "copy", .reads = {other}, .writes = {x}}, [&] { ++runs; });
  expect_kept();
  engine.Push({.name = "add", .reads = {other, x}, .writes = {x}}, [&] { ++runs; });
  expect_kept();
  engine.PushAsync({.name = "receive", .reads = {other}, .writes = {x}},
                   [&](const Completion& done) {
                     ++runs;
                     done();
                   });
  expect_kept();
  EXPECT_EQ(runs, 0);
  engine.Push({.name = "settle", .writes = {x}, .run_when_poisoned = true}, [] {});
  engine.WaitForVar(x);
  engine.Push({.name = "copy", .reads = {other}, .writes = {x}}, [&] { ++runs; });
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { engine.WaitForVar(x); }), "other");
  EXPECT_EQ(runs, 0);
  for (int i = 0; i < 2; ++i) EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
}

// A skipped op did not overwrite anything: its pure outputs are poisoned, not cured.
TEST_P(ErrorTest, ASkippedOverwritePoisonsItsVar) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  engine.Push({.name = "fill", .writes = {y}}, [] {});
  engine.Push({.name = "root", .writes = {x}}, [] { throw std::runtime_error("root"); });
  engine.Push({.name = "copy", .reads = {x}, .writes = {y}}, [] {});
  EXPECT_THROW(engine.WaitForVar(y), std::runtime_error);
  EXPECT_EQ(engine.FailureOf(y)->op, "root");
}

TEST_P(ErrorTest, AnOverwriteThatFailsReplacesTheError) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  engine.Push({.name = "first", .writes = {x}}, [] { throw std::runtime_error("first"); });
  engine.Push({.name = "second", .writes = {x}}, [] { throw std::logic_error("second"); });
  EXPECT_THROW(engine.WaitForVar(x), std::logic_error);
  EXPECT_EQ(engine.FailureOf(x)->op, "second");
}

TEST_P(ErrorTest, ClearErrorCuresInOrderLikeAWritePushedThen) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), gate = engine.NewVar("gate");
  bool before = false, after = false;
  {
    Hold hold(engine, {.name = "hold", .writes = {gate}});
    engine.Push({.name = "root", .reads = {gate}, .writes = {x}},
                [] { throw std::runtime_error("root"); });
    engine.Push({.name = "before", .reads = {x}}, [&] { before = true; });
    engine.ClearError(x);  // queued: x is not even poisoned yet
    engine.Push({.name = "after", .reads = {x}}, [&] { after = true; });
  }
  engine.WaitForVar(x);
  engine.WaitForReadsAndWrites(x);
  EXPECT_FALSE(before);
  EXPECT_TRUE(after);
  EXPECT_FALSE(engine.FailureOf(x).has_value());
  EXPECT_EQ(engine.version(x), 1u);  // clearing is no write
}

TEST_P(ErrorTest, ClearErrorOfAHealthyVarChangesNothing) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  engine.ClearError(x);
  engine.Push({.name = "write", .writes = {x}}, [] {});
  engine.ClearError(x);
  engine.WaitForVar(x);
  EXPECT_EQ(engine.version(x), 1u);
}

TEST_P(ErrorTest, ClearErrorInsideAnOpWorks) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  engine.Push({.name = "root", .writes = {x}}, [] { throw std::runtime_error("root"); });
  EXPECT_THROW(engine.WaitForVar(x), std::runtime_error);
  engine.Push({.name = "clears"}, [&] { engine.ClearError(x); });
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
  engine.WaitForVar(x);
}

TEST_P(ErrorTest, RunWhenPoisonedLetsTheBodyLook) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y"), healthy = engine.NewVar("healthy");
  const std::exception_ptr error = MakeError("root");
  std::optional<Failure> failure;
  std::exception_ptr seen;
  bool healthy_failed = true;
  engine.Push({.name = "root", .writes = {x}}, [error] { std::rethrow_exception(error); });
  engine.Push({.name = "look", .reads = {x, healthy}, .writes = {y}, .run_when_poisoned = true},
              [&] {
                failure = engine.FailureOf(x);
                seen = engine.ErrorOf(x);
                healthy_failed = engine.FailureOf(healthy).has_value();
              });
  engine.WaitForVar(y);  // the body returned, so y is healthy
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(failure->op, "root");
  EXPECT_EQ(failure->message, "root");
  EXPECT_EQ(seen, error);
  EXPECT_FALSE(healthy_failed);
  EXPECT_EQ(Thrown([&] { engine.WaitForVar(x); }), error);  // reading cures nothing
}

TEST_P(ErrorTest, RethrowingAnInputsErrorPassesTheSameFailureOn) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  const std::exception_ptr error = MakeError("root");
  engine.Push({.name = "root", .writes = {x}}, [error] { std::rethrow_exception(error); });
  engine.Push({.name = "pass_on", .reads = {x}, .writes = {y}, .run_when_poisoned = true},
              [&] { std::rethrow_exception(engine.ErrorOf(x)); });
  EXPECT_EQ(Thrown([&] { engine.WaitForAll(); }), error);
  engine.WaitForAll();  // one failure, reported once
  ASSERT_TRUE(engine.FailureOf(y).has_value());
  EXPECT_EQ(engine.FailureOf(y)->op, "root");
  EXPECT_EQ(engine.FailureOf(y)->var, "x");
}

TEST_P(ErrorTest, WaitForAllReportsEachFailureOnceTheOnePushedEarliestFirst) {
  Engine engine(GetParam().options);
  const Var gate = engine.NewVar("gate");
  std::vector<std::exception_ptr> errors;
  {
    Hold hold(engine, {.name = "hold", .writes = {gate}});
    for (int i = 0; i < 10; ++i) {
      errors.push_back(MakeError("error " + std::to_string(i)));
      // The later an op was pushed the earlier it fails.
      const Var out = engine.NewVar("out" + std::to_string(i));
      if (i < 5) {
        engine.Push({.name = "fails", .reads = {gate}, .writes = {out}, .priority = i},
                    [error = errors.back()] { std::rethrow_exception(error); });
      } else {
        engine.Push({.name = "fails", .writes = {out}, .priority = i},
                    [error = errors.back()] { std::rethrow_exception(error); });
      }
      engine.Push({.name = "skipped", .reads = {out}, .writes = {engine.NewVar()}}, [] {});
    }
  }
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(Thrown([&] { engine.WaitForAll(); }), errors[i]) << i;
    EXPECT_EQ(engine.stats().done, engine.stats().pushed);  // it threw, but only after all was done
  }
  engine.WaitForAll();
  engine.Push({.name = "fails", .writes = {gate}}, [] { throw std::logic_error("another"); });
  EXPECT_THROW(engine.WaitForAll(), std::logic_error);
  engine.WaitForAll();
}

TEST_P(ErrorTest, ACuredFailureIsStillReported) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  engine.Push({.name = "root", .writes = {x}}, [] { throw std::runtime_error("root"); });
  engine.Push({.name = "overwrite", .writes = {x}}, [] {});
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
  engine.WaitForAll();
  engine.WaitForVar(x);
}

TEST_P(ErrorTest, FailuresOfOpsWithoutWrittenVarsSurfaceAtWaitForAll) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  engine.Push({.name = "reads_and_fails", .reads = {x}}, [] { throw std::logic_error("read"); });
  engine.Push({.name = "fails"}, [] { throw std::runtime_error("nothing written"); });
  engine.WaitForReadsAndWrites(x);  // reading poisons nothing
  EXPECT_THROW(engine.WaitForAll(), std::logic_error);
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
  engine.WaitForAll();
}

TEST_P(ErrorTest, FailuresOfNestedOpsSurfaceToo) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  engine.Push({.name = "parent"}, [&] {
    engine.Push({.name = "child", .writes = {x}}, [] { throw std::runtime_error("child"); });
  });
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
  EXPECT_EQ(engine.FailureOf(x)->op, "child");
}

TEST_P(ErrorTest, StatisticsCountFailedAndSkippedOps) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  engine.Push({.name = "fine", .writes = {y}}, [] {});
  engine.Push({.name = "root", .writes = {x}}, [] { throw std::runtime_error("root"); });
  engine.Push({.name = "skipped", .reads = {x}, .writes = {y}}, [] {});
  engine.Push({.name = "skipped", .reads = {y}}, [] {});
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
  EXPECT_EQ(engine.stats().pushed, 4u);
  EXPECT_EQ(engine.stats().done, 4u);
  EXPECT_EQ(engine.stats().failed, 3u);
  EXPECT_EQ(engine.stats().running, 0u);
}

TEST_P(ErrorTest, ErrorsThatNobodySawAreLoggedAtStop) {
  LogCapture log;
  {
    Engine engine(GetParam().options);
    const Var x = engine.NewVar("x");
    engine.Push({.name = "seen", .writes = {x}}, [] { throw std::runtime_error("seen error"); });
    EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
    engine.Push({.name = "unseen", .writes = {x}}, [] { throw std::runtime_error("lost error"); });
    engine.Stop();
    EXPECT_TRUE(log.HasLine({"unseen", "lost error"})) << log.Text();
    EXPECT_FALSE(log.HasLine({"seen error"})) << log.Text();
  }
  {
    Engine engine(GetParam().options);
    engine.Push({.name = "destroyed"}, [] { throw std::runtime_error("lost in destructor"); });
  }
  EXPECT_TRUE(log.HasLine({"destroyed", "lost in destructor"})) << log.Text();
}

TEST_P(ErrorTest, CapturesOfSkippedOpsAreDestroyedBeforeWaitsReturn) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  auto token = std::make_shared<int>(1);
  engine.Push({.name = "root", .writes = {x}}, [token] { throw std::runtime_error("root"); });
  engine.Push({.name = "skipped", .reads = {x}, .writes = {y}}, [token] { ++*token; });
  engine.PushAsync({.name = "skipped_async", .reads = {y}, .writes = {y}},
                   [token](Completion done) { done(); });
  EXPECT_THROW(engine.WaitForVar(y), std::runtime_error);
  EXPECT_EQ(token.use_count(), 1);
  EXPECT_EQ(*token, 1);
}

// What an exception owns, in Python all that its traceback refers to, may use the engine as it
// goes.
TEST_P(ErrorTest, AnExceptionThatUsesTheEngineInItsDestructorDoesNotHang) {
  struct Owner : std::runtime_error {
    explicit Owner(std::shared_ptr<void> what) : std::runtime_error("owner"), owned(what) {}
    std::shared_ptr<void> owned;
  };
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  int ran = 0;
  engine.Push({.name = "fails", .writes = {x}}, [&] {
    throw Owner(std::shared_ptr<void>(nullptr, [&](void*) {
      (void)engine.stats();
      engine.Push({.name = "last_will", .writes = {x}}, [&] { ++ran; });
    }));
  });
  EXPECT_THROW(engine.WaitForAll(), Owner);
  engine.Push({.name = "cures", .writes = {x}}, [] {});
  engine.WaitForVar(x);
  engine.Push({.name = "fails_too"}, [] { throw std::logic_error("another"); });
  EXPECT_THROW(engine.WaitForAll(), std::logic_error);
  engine.WaitForAll();
  EXPECT_EQ(ran, 1);
}

// That of Python takes the interpreter's lock, whose owner may be in a call of the engine.
TEST_P(ErrorTest, AMessageMayUseTheEngine) {
  struct Curious : std::exception {
    explicit Curious(Engine& of) : engine(&of) {}
    const char* what() const noexcept override {
      (void)engine->stats();
      return "curious";
    }
    Engine* engine;
  };
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y"), z = engine.NewVar("z");
  engine.Push({.name = "throws", .writes = {x}}, [&] { throw Curious(engine); });
  engine.PushAsync({.name = "fails", .writes = {y}},
                   [&](const Completion& done) { done(std::make_exception_ptr(Curious(engine))); });
  Hold hold(engine, {.name = "fails_later", .writes = {z}});
  EXPECT_THROW(engine.WaitForVar(x), Curious);
  EXPECT_THROW(engine.WaitForVar(y), Curious);
  hold.Release(std::make_exception_ptr(Curious(engine)));
  EXPECT_THROW(engine.WaitForVar(z), Curious);
  for (const Var& var : {x, y, z}) {
    ASSERT_TRUE(engine.FailureOf(var).has_value()) << var.name();
    EXPECT_EQ(engine.FailureOf(var)->message, "curious") << var.name();
  }
}

// A sink with a mutex, say, whose owner is in a call of the engine.
TEST_P(ErrorTest, ALogSinkMayWaitForWhoLooksAtAFailure) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  std::latch logged(1), looked(1);
  std::atomic<int> lines = 0;
  engine.Push({.name = "unseen", .writes = {x}}, [] { throw std::runtime_error("lost"); });
  SetLogSink([&](LogLevel, std::string_view) {
    if (++lines == 1) logged.count_down();
    looked.wait();
  });
  std::thread looker([&] {
    logged.wait();
    EXPECT_TRUE(engine.FailureOf(x).has_value());
    looked.count_down();
  });
  engine.Stop();
  looker.join();
  SetLogSink({});
  EXPECT_EQ(lines, 1);
}

// What a program that never calls WaitForAll leaves to it.
class ManyErrorsTest : public EveryEngine {
 protected:
  static constexpr int kKept = 10'000;
};
INSTANTIATE_TEST_SUITE_P(All, ManyErrorsTest, testing::ValuesIn(OneConfigOfEachKind()),
                         ConfigLabel);

TEST_P(ManyErrorsTest, OfThoseThatWaitsHaveThrownTheEarliestAreLeftOut) {
  struct Numbered : std::runtime_error {
    Numbered(int number, std::shared_ptr<int> what)
        : std::runtime_error(std::to_string(number)), owned(std::move(what)) {}
    std::shared_ptr<int> owned;
  };
  LogCapture log;
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  const auto token = std::make_shared<int>(0);
  for (int i = 0; i < kKept + 3; ++i) {
    engine.Push({.name = "fails", .writes = {x}}, [&token, i] { throw Numbered(i, token); });
    ASSERT_THROW(engine.WaitForVar(x), Numbered);
  }
  EXPECT_EQ(token.use_count(), 1 + kKept);  // the others are gone
  EXPECT_EQ(MessageOf<Numbered>([&] { engine.WaitForAll(); }), "3");
  engine.Stop();
  EXPECT_EQ(log.Text(), "");
}

TEST_P(ManyErrorsTest, OfThoseThatNobodySawTheEarliestAreLogged) {
  LogCapture log;
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  int pushed = 0;
  const auto fail = [&] {
    engine.Push({.name = "unseen", .writes = {x}}, [number = pushed++] {
      throw std::runtime_error("error " + std::to_string(number));
    });
  };
  for (int i = 0; i < kKept + 2; ++i) fail();
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { engine.WaitForAll(); }), "error 2");
  const std::string expected =
      "op 'unseen' failed and nobody waited for it: error 0\n"
      "op 'unseen' failed and nobody waited for it: error 1\n";
  EXPECT_EQ(log.Text(), expected);
  EXPECT_THROW(engine.WaitForVar(x), std::runtime_error);
  for (int i = 0; i < 2; ++i) fail();  // the first is in place of error 2
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { engine.WaitForAll(); }), "error 3");
  EXPECT_EQ(log.Text(), expected);  // the one that a wait has thrown went first
}

// Kept by the program, and thrown again when the engine has forgotten it.
TEST_P(ErrorTest, AnErrorThatIsOverAndThrownAgainIsANewFailure) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  const std::exception_ptr error = MakeError("again");
  for (const char* const op : {"first", "second", "third"}) {
    engine.Push({.name = op, .writes = {x}}, [&] { std::rethrow_exception(error); });
    EXPECT_EQ(Thrown([&] { engine.WaitForAll(); }), error) << op;
    ASSERT_TRUE(engine.FailureOf(x).has_value());
    EXPECT_EQ(engine.FailureOf(x)->op, op);
    engine.ClearError(x);
    engine.WaitForAll();
  }
}

// The serial engine has run the op by the end of Push; its error must wait for a wait.
TEST_P(ErrorTest, PushNeverThrowsTheErrorOfABody) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  for (int i = 0; i < 100; ++i) {
    engine.Push({.name = "fails", .reads = {x}, .writes = {x}},
                [] { throw std::runtime_error("x"); });
  }
  EXPECT_THROW(engine.WaitForVar(x), std::runtime_error);
}

}  // namespace
}  // namespace heddle::engine_test
