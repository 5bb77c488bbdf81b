#include "examples/digits/training.h"

#include <heddle/kvstore.h>
#include <heddle/ndarray.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <utility>

#include <fmt/format.h>

#include "examples/digits/layers.h"

namespace digits {
namespace {

using Clock = std::chrono::steady_clock;
using heddle::NDArray;

std::int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

// One step's times of one key.
struct Sample {
  std::int64_t push_call_ns, pull_call_ns, ready_ns, readable_ns;
};

// One parameter of the network: its key, its arrays on every device, its samples.
struct Parameter {
  std::string key;
  int priority;
  std::vector<NDArray> gradients, values;
  std::vector<Sample> samples;
};

template <class TimeOf>
Spread SpreadOf(const std::vector<Sample>& samples, TimeOf time_of) {
  std::vector<std::int64_t> times;
  for (const Sample& sample : samples) times.push_back(time_of(sample));
  if (times.empty()) return {};
  std::sort(times.begin(), times.end());
  const auto at = [&](std::size_t percent) {
    return static_cast<double>(times[(times.size() - 1) * percent / 100]) / 1e3;
  };
  return {at(50), at(99)};
}

// FNV-1a.
std::uint64_t AddToChecksum(std::uint64_t checksum, const std::vector<float>& values) {
  const auto* const bytes = reinterpret_cast<const unsigned char*>(values.data());
  for (std::size_t i = 0; i < values.size() * sizeof(float); ++i) {
    checksum = (checksum ^ bytes[i]) * 1099511628211ULL;
  }
  return checksum;
}

class Trainer {
 public:
  Trainer(const DataSet& data, const TrainingOptions& options)
      : data_(data),
        options_(options),
        sizes_{{kPixels, options.hidden}, {options.hidden, kClasses}},
        steps_(data.train.size() / static_cast<std::size_t>(options.batch)),
        random_(options.seed),
        engine_(options.engine),
        store_(heddle::KVStore::Create(options.store, engine_)),
        all_devices_(static_cast<std::size_t>(options.devices) *
                     static_cast<std::size_t>(store_->num_workers())) {
    if (static_cast<std::size_t>(options.batch) % all_devices_ != 0) {
      throw heddle::InvalidArgument(
          fmt::format("batch: expected a multiple of the number of devices of all workers, {}, got "
                      "{}",
                      all_devices_, options.batch));
    }
    for (int d = 0; d < options.devices; ++d) {
      replicas_.push_back(std::make_unique<Replica>(engine_, heddle::Cpu(d), sizes_,
                                                    static_cast<std::int64_t>(BatchOfDevice())));
    }
    if (options.compression) store_->SetGradientCompression(*options.compression);
    auto parameters = options.parameters;
    parameters.emplace_back("rescale_grad", 1.0 / options.batch);
    store_->SetOptimizer(heddle::MakeOptimizer(options.optimizer, parameters));
    for (std::size_t l = 0; l < sizes_.size(); ++l) {
      AddParameter(l, "weight", &LayerArrays::weight);
      AddParameter(l, "bias", &LayerArrays::bias);
    }
    order_.resize(data.train.size());
    std::iota(order_.begin(), order_.end(), std::size_t{0});
  }

  TrainingResult Run(const std::function<void(const Progress&)>& progress) {
    TrainingResult result;
    result.rank = store_->rank();
    result.num_workers = store_->num_workers();
    const heddle::TransferStats before = store_->transfers();
    const Clock::time_point started = Clock::now();
    for (int epoch = 0; epoch < options_.epochs; ++epoch) {
      result.losses.push_back(RunEpoch());
      const std::chrono::duration<double> took = Clock::now() - started;
      result.images_per_second = static_cast<double>(ImagesAnEpoch()) * (epoch + 1) / took.count();
      if (result.rank == 0) {
        progress({epoch + 1, options_.epochs, result.losses.back(), result.images_per_second});
      }
    }
    store_->Barrier();  // all workers' last gradients are in the weights
    result.steps_per_second = result.images_per_second / options_.batch;
    result.transfers = {store_->transfers().pushed_bytes - before.pushed_bytes,
                        store_->transfers().pulled_bytes - before.pulled_bytes};
    Test(result);
    for (const Parameter& parameter : parameters_) result.times.push_back(TimesOf(parameter));
    return result;
  }

 private:
  std::size_t BatchOfDevice() const {
    return static_cast<std::size_t>(options_.batch) / all_devices_;
  }
  std::size_t ImagesAnEpoch() const { return steps_ * static_cast<std::size_t>(options_.batch); }

  void AddParameter(std::size_t layer, const char* kind, NDArray LayerArrays::*array) {
    Parameter parameter{.key = fmt::format("layer{}.{}", layer, kind),
                        // The next step needs the first layer first.
                        .priority = -static_cast<int>(layer),
                        .gradients = {},
                        .values = {},
                        .samples = {}};
    for (const auto& replica : replicas_) {
      parameter.gradients.push_back(replica->gradients(layer).*array);
      parameter.values.push_back(replica->parameters(layer).*array);
    }
    parameter.samples.reserve(steps_ * static_cast<std::size_t>(options_.epochs));
    const heddle::Shape& shape = parameter.values[0].shape();
    const NDArray first = NDArray::FromVector(FirstValues(shape, sizes_[layer]), shape,
                                              heddle::DType::kFloat32, heddle::Cpu(), engine_);
    store_->Broadcast(parameter.key, first, parameter.values);
    parameters_.push_back(std::move(parameter));
  }

  // Weights uniform in +-sqrt(6 / inputs), as suits ReLU; biases 0.
  std::vector<float> FirstValues(const heddle::Shape& shape, LayerSize size) {
    std::vector<float> values(static_cast<std::size_t>(shape.size()));
    if (shape.ndim() == 1) return values;
    const double limit = std::sqrt(6.0 / static_cast<double>(size.inputs));
    for (float& value : values) {
      const double uniform = static_cast<double>(random_() >> 11) * 0x1p-53;
      value = static_cast<float>((2 * uniform - 1) * limit);
    }
    return values;
  }

  // Pushes all steps without waiting, then waits for the losses. Returns their mean.
  double RunEpoch() {
    Shuffle();
    for (const auto& replica : replicas_) replica->loss().Fill(0);
    for (std::size_t step = 0; step < steps_; ++step) {
      for (std::size_t d = 0; d < replicas_.size(); ++d) {
        LoadBatch(step, d);
        replicas_[d]->Forward();
        replicas_[d]->Backward();
      }
      for (auto parameter = parameters_.rbegin(); parameter != parameters_.rend(); ++parameter) {
        Exchange(*parameter);
      }
    }
    double loss = 0;
    for (const auto& replica : replicas_) loss += replica->loss().ToVector<double>()[0];
    return loss / static_cast<double>(steps_ * BatchOfDevice() * replicas_.size());
  }

  // Gradients to the store, new values back.
  void Exchange(Parameter& parameter) {
    Sample& sample = parameter.samples.emplace_back();
    NoteWhenReadable(parameter.gradients, &sample.ready_ns);
    const std::int64_t started = NowNs();
    store_->Push(parameter.key, parameter.gradients, parameter.priority);
    const std::int64_t pushed = NowNs();
    store_->Pull(parameter.key, parameter.values, parameter.priority);
    sample.push_call_ns = pushed - started;
    sample.pull_call_ns = NowNs() - pushed;
    NoteWhenReadable(parameter.values, &sample.readable_ns);
  }

  void NoteWhenReadable(const std::vector<NDArray>& arrays, std::int64_t* time) {
    std::vector<heddle::VarRef> vars;
    for (const NDArray& array : arrays) vars.emplace_back(array.var());
    engine_.Push({.name = "note time", .reads = vars, .priority = std::numeric_limits<int>::max()},
                 [time] { *time = NowNs(); });
  }

  void LoadBatch(std::size_t step, std::size_t device) {
    const std::size_t rows = BatchOfDevice();
    const std::size_t place = static_cast<std::size_t>(store_->rank()) * replicas_.size() + device;
    const std::size_t begin = step * static_cast<std::size_t>(options_.batch) + place * rows;
    std::vector<float> pixels;
    std::vector<std::int32_t> labels;
    for (std::size_t row = begin; row < begin + rows; ++row) {
      const auto image = data_.train.pixels.begin() +
                         static_cast<std::ptrdiff_t>(order_[row] * std::size_t{kPixels});
      pixels.insert(pixels.end(), image, image + kPixels);
      labels.push_back(data_.train.labels[order_[row]]);
    }
    replicas_[device]->Load(pixels.data(), labels.data());
  }

  void Shuffle() {  // std::shuffle may differ between libraries
    for (std::size_t i = order_.size() - 1; i > 0; --i) {
      std::swap(order_[i], order_[random_() % (i + 1)]);
    }
  }

  void Test(TrainingResult& result) {
    const auto rows = static_cast<std::int64_t>(data_.test.size());
    Replica replica(engine_, heddle::Cpu(), sizes_, rows);
    for (std::size_t l = 0; l < sizes_.size(); ++l) {
      store_->Pull(parameters_[2 * l].key, replica.parameters(l).weight);
      store_->Pull(parameters_[2 * l + 1].key, replica.parameters(l).bias);
    }
    replica.Load(data_.test.pixels.data(), data_.test.labels.data());
    replica.Forward();
    const std::vector<float> probabilities = replica.probabilities().ToVector<float>();
    int right = 0;
    for (std::size_t i = 0; i < data_.test.size(); ++i) {
      const auto row = probabilities.begin() + static_cast<std::ptrdiff_t>(i * kClasses);
      const auto answer = std::max_element(row, row + kClasses) - row;
      const auto label = static_cast<std::size_t>(data_.test.labels[i]);
      ++result.confusion[label][static_cast<std::size_t>(answer)];
      if (static_cast<std::size_t>(answer) == label) ++right;
    }
    result.accuracy = static_cast<double>(right) / static_cast<double>(data_.test.size());
    result.weights_checksum = 14695981039346656037ULL;
    for (std::size_t l = 0; l < sizes_.size(); ++l) {
      for (const NDArray& array : {replica.parameters(l).weight, replica.parameters(l).bias}) {
        result.weights_checksum = AddToChecksum(result.weights_checksum, array.ToVector<float>());
      }
    }
    engine_.WaitForAll();  // the last samples
  }

  static KeyTimes TimesOf(const Parameter& parameter) {
    return {
        .key = parameter.key,
        .bytes = parameter.values[0].bytes(),
        .push_call = SpreadOf(parameter.samples, [](const Sample& s) { return s.push_call_ns; }),
        .pull_call = SpreadOf(parameter.samples, [](const Sample& s) { return s.pull_call_ns; }),
        .exchange = SpreadOf(parameter.samples,
                             [](const Sample& s) { return s.readable_ns - s.ready_ns; })};
  }

  const DataSet& data_;
  const TrainingOptions& options_;
  const std::vector<LayerSize> sizes_;
  const std::size_t steps_;  // an epoch
  std::mt19937_64 random_;
  std::vector<std::size_t> order_;  // of the training images
  std::vector<Parameter>
      parameters_;  // by layer: weight, bias. Ops write their samples, so the engine ends first
  heddle::Engine engine_;
  std::unique_ptr<heddle::KVStore> store_;
  const std::size_t all_devices_;  // of all workers
  std::vector<std::unique_ptr<Replica>> replicas_;
};

void CheckOptions(const DataSet& data, const TrainingOptions& options) {
  const auto require = [](bool ok, const char* what, int given) {
    if (!ok) throw heddle::InvalidArgument(fmt::format("{}, got {}", what, given));
  };
  require(options.devices >= 1, "devices: expected 1 or more", options.devices);
  require(options.epochs >= 1, "epochs: expected 1 or more", options.epochs);
  require(options.hidden >= 1, "hidden: expected 1 or more", options.hidden);
  require(options.batch >= 1, "batch: expected 1 or more", options.batch);
  require(static_cast<std::size_t>(options.batch) <= data.train.size(),
          "batch: expected no more than the training images", options.batch);
}

}  // namespace

TrainingResult Train(const DataSet& data, const TrainingOptions& options,
                     const std::function<void(const Progress&)>& progress) {
  CheckOptions(data, options);
  return Trainer(data, options).Run(progress);
}

}  // namespace digits
