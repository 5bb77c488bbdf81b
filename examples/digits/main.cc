// Trains a small network on handwritten digits, on four logical devices that meet in a store.
#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/kvstore.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "examples/digits/comparison.h"
#include "examples/digits/data.h"
#include "examples/digits/report.h"
#include "examples/digits/training.h"

namespace {

struct Options {
  std::vector<std::string> stores = {"local", "device"};
  std::string data = HEDDLE_DIGITS_CSV;
  std::string engine, trace, compare, equals;
  double at_least = 0;
  int workers = 0;
  digits::TrainingOptions training;
};

// After what stdout has.
void Complain(const std::string& what) {
  std::fflush(stdout);
  fmt::print(stderr, "digits: {}\n", what);
}

void AddOptions(CLI::App& app, Options& options) {
  digits::TrainingOptions& training = options.training;
  // What tools/demo.sh is given follows what it gives itself.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option("--store", options.stores, "Types of store, one training each")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--engine", options.engine, "threaded, serial or seeded");
  app.add_option("--workers", options.workers, "Worker threads; 0: one a CPU")
      ->check(CLI::Range(0, 1024));
  app.add_option("--devices", training.devices, "Logical devices")->capture_default_str();
  app.add_option("--epochs", training.epochs, "Times through the images")->capture_default_str();
  app.add_option("--batch", training.batch, "Images a step, over all devices")
      ->capture_default_str();
  app.add_option("--hidden", training.hidden, "Units of the hidden layer")->capture_default_str();
  app.add_option("--seed", training.seed, "Of the first weights and the order of the images")
      ->capture_default_str();
  app.add_option("--data", options.data, "The images")->capture_default_str();
  app.add_option("--compare", options.compare,
                 "First compare optimizers and compression on the first store, and draw their "
                 "losses into this file (.svg or .png)");
  app.add_option("--equals", options.equals,
                 "Then do the same training on this store in one process, and fail unless the "
                 "weights are the same, bit for bit");
  app.add_option("--at-least", options.at_least,
                 "Fail, after all trainings, if the test accuracy of a store is below this")
      ->check(CLI::Range(0.0, 1.0));
  app.add_option("--trace", options.trace,
                 "Record a trace; with several stores the store's name is appended");
}

digits::TrainingOptions TrainingOn(const std::string& store, const Options& options) {
  digits::TrainingOptions training = options.training;
  training.store = store;
  training.engine = heddle::EngineOptions::FromEnvironment();
  if (!options.engine.empty()) training.engine.type = options.engine;
  if (options.workers > 0) training.engine.num_workers = options.workers;
  return training;
}

// What can be refused before the first training, which may take long, is.
void Check(const Options& options) {
  if (!options.compare.empty()) digits::CheckPlotFile(options.compare);
  std::vector<std::string> stores = options.stores;
  if (!options.equals.empty()) stores.push_back(options.equals);
  const std::vector<std::string> known = heddle::KVStore::Types();
  for (const std::string& store : stores) {
    std::string lower = store;
    for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    if (std::find(known.begin(), known.end(), lower) != known.end()) continue;
    throw heddle::InvalidArgument(
        fmt::format("unknown store type '{}': expected one of {}", store, fmt::join(known, ", ")));
  }
}

// False: there is no picture.
bool Compare(const Options& options, const digits::DataSet& data) {
  const std::string& store = options.stores.front();
  const auto methods = digits::MethodsToCompare(TrainingOn(store, options));
  std::vector<digits::TrainingResult> results;
  for (const digits::Method& method : methods) {
    digits::ProgressBar bar(method.name);
    results.push_back(digits::Train(
        data, method.options, [&bar](const digits::Progress& progress) { bar.Show(progress); }));
  }
  fmt::print("\nThe same training with other optimizers and with compressed gradients, store {}\n",
             store);
  digits::PrintComparison(methods, results);
  if (!digits::PlotLosses(methods, results, options.compare)) {
    Complain(fmt::format("no loss curves: gnuplot (Debian package gnuplot-nox) could not draw {}",
                         options.compare));
    return false;
  }
  fmt::print("Loss curves: {}\n\n", options.compare);
  return true;
}

// Trains once more, with the devices of all workers in this process.
void CheckEquals(const Options& options, const digits::DataSet& data,
                 const digits::TrainingResult& result) {
  digits::TrainingOptions training = TrainingOn(options.equals, options);
  training.devices *= result.num_workers;
  digits::ProgressBar bar(options.equals);
  const digits::TrainingResult other = digits::Train(
      data, training, [&bar](const digits::Progress& progress) { bar.Show(progress); });
  if (other.weights_checksum != result.weights_checksum) {
    throw heddle::Error(
        fmt::format("the weights differ from those of store {}: checksums {:016x}, {:016x}",
                    options.equals, result.weights_checksum, other.weights_checksum));
  }
  fmt::print("The weights equal those of store {} with {} devices, bit for bit\n", options.equals,
             training.devices);
}

// Each worker says which weights it ends with, the first one how well it went. False: not as well
// as it has to.
bool TrainWith(const std::string& store, const Options& options, const digits::DataSet& data) {
  digits::TrainingOptions training = TrainingOn(store, options);
  if (!options.trace.empty()) {
    training.engine.trace_file =
        options.stores.size() == 1 ? options.trace : options.trace + "." + store;
  }
  digits::ProgressBar bar(store);
  const digits::TrainingResult result = digits::Train(
      data, training, [&bar](const digits::Progress& progress) { bar.Show(progress); });
  if (result.rank == 0) {
    digits::PrintConfusion(result.confusion);
    digits::PrintTimes(result.times);
  }
  fmt::print("\nChecksum of the weights: {:016x}\n", result.weights_checksum);
  if (result.rank > 0) return true;
  if (!options.equals.empty()) CheckEquals(options, data, result);
  fmt::print("{}: test accuracy {:.3f}\n\n", store, result.accuracy);
  if (result.accuracy >= options.at_least) return true;
  Complain(fmt::format("{}: expected a test accuracy of at least {}, got {:.4f}", store,
                       options.at_least, result.accuracy));
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Data-parallel training on handwritten digits");
  Options options;
  AddOptions(app, options);
  CLI11_PARSE(app, argc, argv);
  bool is_good = true;
  try {
    Check(options);
    const digits::DataSet data = digits::LoadDigits(options.data);
    fmt::print("{} images for training, {} held out for the test, {} device{}\n\n",
               data.train.size(), data.test.size(), options.training.devices,
               options.training.devices == 1 ? "" : "s");
    if (!options.compare.empty()) is_good = Compare(options, data);
    for (const std::string& store : options.stores) {
      is_good = TrainWith(store, options, data) && is_good;
    }
  } catch (const std::exception& error) {
    Complain(error.what());
    return 1;
  }
  return is_good ? 0 : 1;
}
