// Data-parallel training: a replica of the network on each device, one store between them. With a
// dist store the devices are those of all workers of the job, and each process trains its own.
#pragma once

#include <heddle/engine.h>
#include <heddle/kvstore.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "examples/digits/data.h"

namespace digits {

struct TrainingOptions {
  std::string store = "local";
  heddle::EngineOptions engine;
  int devices = 4;  // of this process: cpu(0) to cpu(devices - 1)
  int epochs = 100;
  int batch = 64;  // images a step, a multiple of the number of all devices
  int hidden = 128;
  std::string optimizer = "sgd";  // by name, with parameters; the gradients are rescaled to means
  std::vector<std::pair<std::string_view, double>> parameters = {{"learning_rate", 0.1},
                                                                 {"momentum", 0.9}};
  std::optional<heddle::CompressionOptions> compression;
  std::uint64_t seed = 1;  // of the first weights and the order of the images
};

struct Progress {
  int epoch = 0, epochs = 0;
  double loss = 0;  // mean cross-entropy of the epoch, over the images of this process
  double images_per_second = 0;
};

// Times of one key in microseconds: median and 99th percentile over all steps.
struct Spread {
  double median = 0, p99 = 0;
};
struct KeyTimes {
  std::string key;
  std::int64_t bytes = 0;
  Spread push_call, pull_call;  // until the calls return
  Spread exchange;  // from the last device's gradient until all devices can read the new value
};

using ConfusionMatrix = std::array<std::array<int, kClasses>, kClasses>;  // [label][answer]

struct TrainingResult {
  int rank = 0;
  int num_workers = 1;
  std::vector<double> losses;  // one an epoch
  double images_per_second = 0;
  double steps_per_second = 0;
  heddle::TransferStats transfers;  // of the training alone
  ConfusionMatrix confusion = {};
  double accuracy = 0;                 // on the test images
  std::uint64_t weights_checksum = 0;  // equal for equal bits
  std::vector<KeyTimes> times;
};

// Trains on data.train and tests on data.test; `progress` is called after each epoch, in worker 0
// only. The same options give the same weights, bit for bit, on every type of engine, for every
// number of worker threads, and in a job of W workers with a device each that is synchronous as in
// one process with W devices; a worker with several adds up their gradients first, which rounds
// differently. Errors: InvalidArgument for options that cannot work.
TrainingResult Train(const DataSet& data, const TrainingOptions& options,
                     const std::function<void(const Progress&)>& progress);

}  // namespace digits
