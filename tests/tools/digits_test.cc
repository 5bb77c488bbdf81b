// The main job: training on real images through the stores.
#include <heddle/error.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "examples/digits/comparison.h"
#include "examples/digits/data.h"
#include "examples/digits/training.h"
#include "tests/tools/child_process.h"
#include "tools/testing/temp_folder.h"

namespace digits {
namespace {

const DataSet& Digits() {
  static const DataSet data = LoadDigits(HEDDLE_DIGITS_CSV);
  return data;
}

TrainingResult TrainOn(const std::string& store, const std::string& engine, int workers, int epochs,
                       std::uint64_t seed = 1) {
  TrainingOptions options;
  options.store = store;
  options.engine = heddle::EngineOptions::FromEnvironment();
  options.engine.type = engine;
  options.engine.num_workers = workers;
  options.epochs = epochs;
  options.seed = seed;
  return Train(Digits(), options, [](const Progress&) {});
}

class DigitsTest : public ::testing::TestWithParam<std::string> {};

TEST(DigitsData, EveryFifthImageIsHeldOut) {
  EXPECT_EQ(Digits().train.size(), 1438u);
  EXPECT_EQ(Digits().test.size(), 359u);
  EXPECT_EQ(Digits().train.pixels.size(), 1438u * kPixels);
  EXPECT_EQ(Digits().train.labels[0], 0);  // the file starts 0 1 2 3 4
  EXPECT_EQ(Digits().train.labels[3], 3);
  EXPECT_EQ(Digits().test.labels[0], 4);
}

TEST(DigitsData, BadFilesAreErrorsThatNameFileAndLine) {
  const heddle::tools::TempFolder folder;
  const std::string path = folder / "bad.csv";
  std::string good;
  for (int i = 0; i < kPixels; ++i) good += "16,";
  good += "9";
  for (const std::string& bad : {std::string("1,2"), good + ",1", "17" + good.substr(2),
                                 good.substr(0, good.size() - 1) + "10", "x" + good}) {
    std::ofstream(path) << good << '\n' << bad << '\n';
    try {
      LoadDigits(path);
      ADD_FAILURE() << "accepted: " << bad;
    } catch (const heddle::IoError& error) {
      EXPECT_NE(std::string(error.what()).find(path + ", line 2"), std::string::npos)
          << error.what();
    }
  }
  const auto refused = [](const std::string& file, const std::string& expected) {
    try {
      LoadDigits(file);
      ADD_FAILURE() << "accepted: " << file;
    } catch (const heddle::IoError& error) {
      EXPECT_EQ(error.what(), file + expected);
    }
  };
  refused(folder / "missing", ": cannot be opened");
  refused(folder.path(), ": cannot be read");
  std::ofstream(path) << good << '\n' << good << '\n';
  refused(path, ": expected 5 images at least, found 2");
}

// Same seed, same bits: the engine's order decides, not the threads.
TEST_P(DigitsTest, WeightsAreTheSameBitsOnEveryEngineAndForEveryNumberOfWorkers) {
  constexpr int kEpochs = 3;
  const TrainingResult expected = TrainOn(GetParam(), "serial", 1, kEpochs);
  for (const int workers : {1, 2, 4}) {
    for (int repeat = 0; repeat < 2; ++repeat) {
      const TrainingResult result = TrainOn(GetParam(), "threaded", workers, kEpochs);
      EXPECT_EQ(result.weights_checksum, expected.weights_checksum) << workers << " workers";
      EXPECT_EQ(result.losses, expected.losses) << workers << " workers";
    }
  }
  EXPECT_EQ(TrainOn(GetParam(), "seeded", 1, kEpochs).weights_checksum, expected.weights_checksum);
  EXPECT_NE(TrainOn(GetParam(), "serial", 1, kEpochs, /*seed=*/2).weights_checksum,
            expected.weights_checksum);
}

TEST_P(DigitsTest, LearnsToReadTheDigits) {
  const TrainingResult result = TrainOn(GetParam(), "threaded", 2, TrainingOptions().epochs);
  EXPECT_GE(result.accuracy, 0.96);
  EXPECT_LT(result.losses.back(), result.losses.front() / 10);
  int images = 0, right = 0;
  for (std::size_t label = 0; label < result.confusion.size(); ++label) {
    for (const int count : result.confusion[label]) images += count;
    right += result.confusion[label][label];
  }
  EXPECT_EQ(images, 359);
  EXPECT_DOUBLE_EQ(result.accuracy, right / 359.0);
  ASSERT_EQ(result.times.size(), 4u);
  for (const KeyTimes& times : result.times) {
    EXPECT_GT(times.push_call.median, 0) << times.key;
    EXPECT_GT(times.exchange.median, 0) << times.key;
  }
}

INSTANTIATE_TEST_SUITE_P(Stores, DigitsTest, ::testing::Values("local", "device"),
                         [](const auto& info) { return info.param; });

TEST(Digits, OptionsThatCannotWorkAreErrors) {
  TrainingOptions options;
  options.batch = 63;
  EXPECT_THROW(Train(Digits(), options, {}), heddle::InvalidArgument);
  options = {};
  options.store = "cloud";
  EXPECT_THROW(Train(Digits(), options, {}), heddle::InvalidArgument);
}

TEST(Comparison, EveryMethodLearnsAndCompressionSendsASixteenth) {
  TrainingOptions options;
  options.engine = heddle::EngineOptions::FromEnvironment();
  options.engine.num_workers = 2;
  std::vector<TrainingResult> results;
  for (const Method& method : MethodsToCompare(options)) {
    results.push_back(Train(Digits(), method.options, [](const Progress&) {}));
    EXPECT_GE(results.back().accuracy, 0.95) << method.name;
    EXPECT_LT(results.back().losses.back(), results.back().losses.front() / 10) << method.name;
  }
  ASSERT_EQ(results.size(), 4u);
  const heddle::TransferStats whole = results[0].transfers, compressed = results[1].transfers;
  // 64 * 128 + 128 + 128 * 10 + 10 parameters, 22 steps of 4 devices an epoch.
  EXPECT_EQ(whole.pushed_bytes, 9610 * 4 * 4 * 22 * options.epochs);
  EXPECT_EQ(compressed.pushed_bytes, (8192 + 128 + 1280 + 16) / 4 * 4 * 22 * options.epochs);
  EXPECT_EQ(whole.pulled_bytes, whole.pushed_bytes);
  EXPECT_EQ(compressed.pulled_bytes, whole.pulled_bytes);
}

bool HasGnuplot() { return heddle::tools::RunProgram({"gnuplot", "--version"}).status == 0; }

std::string ContentsOf(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(Comparison, DrawsBothKindsOfPictures) {
  if (!HasGnuplot()) GTEST_SKIP() << "gnuplot is not installed";
  const heddle::tools::TempFolder folder;
  const std::vector<Method> methods = MethodsToCompare({});
  std::vector<TrainingResult> results(methods.size());
  for (TrainingResult& result : results) result.losses = {1, 0.1, 0.01};
  ASSERT_TRUE(PlotLosses(methods, results, folder / "losses.png"));
  EXPECT_TRUE(ContentsOf(folder / "losses.png").starts_with("\x89PNG\r\n"));
  ASSERT_TRUE(PlotLosses(methods, results, folder / "losses.svg"));
  const std::string svg = ContentsOf(folder / "losses.svg");
  EXPECT_NE(svg.find("<svg"), std::string::npos);
  EXPECT_NE(svg.find("2-bit gradients"), std::string::npos);
}

TEST(DigitsProgram, ComparesMethodsBeforeItTrainsAndSaysWhereTheCurvesAre) {
  if (!HasGnuplot()) GTEST_SKIP() << "gnuplot is not installed";
  const heddle::tools::TempFolder folder;
  const std::string file = folder / "losses.svg";
  const heddle::tools::ProgramResult result = heddle::tools::RunProgram(
      {DIGITS_PROGRAM, "--store", "device", "--epochs", "20", "--compare", file});
  ASSERT_EQ(result.status, 0) << result.output;
  for (const char* part : {"\nSGD ", "\nSGD, 2-bit gradients", "\nAdam", "\nLAMB", "steps/s",
                           "MB pushed", "\ndevice: test accuracy 0.9"}) {
    EXPECT_NE(result.output.find(part), std::string::npos) << part << "\n" << result.output;
  }
  EXPECT_NE(result.output.find("Loss curves: " + file), std::string::npos) << result.output;
  EXPECT_NE(ContentsOf(file).find("<svg"), std::string::npos);
}

TEST(DigitsProgram, FailsWithoutThePictureThatWasAskedForButTrainsAllTheSame) {
  const heddle::tools::TempFolder folder;
  std::ofstream(folder / "gnuplot") << "#!/bin/sh\nexit 1\n";  // reads nothing
  std::filesystem::permissions(folder / "gnuplot", std::filesystem::perms::owner_all);
  const heddle::tools::ProgramResult result = heddle::tools::RunProgram(
      {DIGITS_PROGRAM, "--store", "device", "--epochs", "1", "--compare", folder / "losses.svg"},
      {"PATH=" + folder.path() + ":" + std::getenv("PATH")});
  EXPECT_EQ(result.status, 1);
  for (const std::string& part :
       {"digits: no loss curves: gnuplot (Debian package gnuplot-nox) could not draw " +
            (folder / "losses.svg"),
        std::string("\ndevice: test accuracy 0.")}) {
    EXPECT_NE(result.output.find(part), std::string::npos) << part << "\n" << result.output;
  }
}

TEST(DigitsProgram, WhatCannotWorkIsRefusedBeforeAnyTraining) {
  const heddle::tools::TempFolder folder;
  const std::string other = folder / "losses.pdf", missing = folder / "missing/losses.svg";
  const std::vector<std::vector<std::string>> cases = {
      {"--compare", other, "plot file " + other + ": expected a name that ends in .svg or .png"},
      {"--compare", missing, "plot file " + missing + ": cannot be opened for writing"},
      {"--store", "local,cloud", "unknown store type 'cloud': expected one of device, "},
      {"--equals", "cloud", "unknown store type 'cloud': expected one of device, "},
      {"--workers", "-3", "--workers: Value -3 not in range 0 to 1024"},
  };
  for (const std::vector<std::string>& args : cases) {
    const heddle::tools::ProgramResult result =
        heddle::tools::RunProgram({DIGITS_PROGRAM, "--epochs", "1", args[0], args[1]});
    EXPECT_NE(result.status, 0);
    EXPECT_NE(result.output.find(args[2]), std::string::npos) << result.output;
    EXPECT_EQ(result.output.find("epoch"), std::string::npos) << result.output;
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(DigitsProgram, OfAnOptionThatIsThereTwiceTheLastCounts) {
  const heddle::tools::ProgramResult result = heddle::tools::RunProgram(
      {DIGITS_PROGRAM, "--store", "local", "--devices", "3", "--batch", "63", "--epochs", "50",
       "--devices", "1", "--batch", "60", "--epochs", "1"});
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_NE(result.output.find(", 1 device\n"), std::string::npos) << result.output;
}

TEST(DigitsProgram, FailsIfAStoreIsLessAccurateThanItHasToBe) {
  const auto run = [](const std::string& at_least) {
    return heddle::tools::RunProgram(
        {DIGITS_PROGRAM, "--store", "local,device", "--epochs", "1", "--at-least", at_least});
  };
  const heddle::tools::ProgramResult result = run("1");
  EXPECT_EQ(result.status, 1);
  for (const char* part : {"\ndigits: local: expected a test accuracy of at least 1, got 0.",
                           "\ndigits: device: expected a test accuracy of at least 1, got 0."}) {
    EXPECT_NE(result.output.find(part), std::string::npos) << part << "\n" << result.output;
  }
  EXPECT_EQ(run("0.1").status, 0);
}

TEST(DigitsProgram, EndsWithTheAccuracyOfEachStore) {
  const heddle::tools::ProgramResult result =
      heddle::tools::RunProgram({DIGITS_PROGRAM, "--store", "local,device", "--epochs", "30"});
  ASSERT_EQ(result.status, 0) << result.output;
  EXPECT_NE(result.output.find("\nlocal: test accuracy 0.9"), std::string::npos) << result.output;
  EXPECT_NE(result.output.find("\ndevice: test accuracy 0.9"), std::string::npos) << result.output;
}

}  // namespace
}  // namespace digits
