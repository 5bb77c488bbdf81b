#include "examples/digits/layers.h"

#include <algorithm>
#include <cmath>
#include <span>

#include <fmt/format.h>

namespace digits {
namespace {

using heddle::NDArray;

enum class Activation { kRelu, kSoftmax };

void Softmax(float* row, std::int64_t count) {
  const float max = *std::max_element(row, row + count);
  float sum = 0;
  for (std::int64_t j = 0; j < count; ++j) sum += row[j] = std::exp(row[j] - max);
  for (std::int64_t j = 0; j < count; ++j) row[j] /= sum;
}

// output = activation(input * weight + bias), row by row.
void DenseForward(const float* input, const float* weight, const float* bias, float* output,
                  std::int64_t rows, LayerSize size, Activation activation) {
  for (std::int64_t r = 0; r < rows; ++r, input += size.inputs, output += size.outputs) {
    std::copy(bias, bias + size.outputs, output);
    for (std::int64_t i = 0; i < size.inputs; ++i) {
      const float x = input[i];
      const float* const from = weight + i * size.outputs;
      for (std::int64_t j = 0; j < size.outputs; ++j) output[j] += x * from[j];
    }
    if (activation == Activation::kSoftmax) {
      Softmax(output, size.outputs);
    } else {
      for (std::int64_t j = 0; j < size.outputs; ++j) output[j] = std::max(output[j], 0.0f);
    }
  }
}

// weight_grad = input^T * output_grad and bias_grad = the column sums of output_grad.
void DenseGradients(const float* input, const float* output_grad, float* weight_grad,
                    float* bias_grad, std::int64_t rows, LayerSize size) {
  std::fill(weight_grad, weight_grad + size.inputs * size.outputs, 0.0f);
  std::fill(bias_grad, bias_grad + size.outputs, 0.0f);
  for (std::int64_t r = 0; r < rows; ++r, input += size.inputs, output_grad += size.outputs) {
    for (std::int64_t i = 0; i < size.inputs; ++i) {
      const float x = input[i];
      float* const to = weight_grad + i * size.outputs;
      for (std::int64_t j = 0; j < size.outputs; ++j) to[j] += x * output_grad[j];
    }
    for (std::int64_t j = 0; j < size.outputs; ++j) bias_grad[j] += output_grad[j];
  }
}

// input_grad = output_grad * weight^T where the input was positive (it left a ReLU), else 0.
void DenseInputGradient(const float* input, const float* weight, const float* output_grad,
                        float* input_grad, std::int64_t rows, LayerSize size) {
  for (std::int64_t r = 0; r < rows;
       ++r, input += size.inputs, input_grad += size.inputs, output_grad += size.outputs) {
    for (std::int64_t i = 0; i < size.inputs; ++i) {
      const float* const from = weight + i * size.outputs;
      float sum = 0;
      for (std::int64_t j = 0; j < size.outputs; ++j) sum += output_grad[j] * from[j];
      input_grad[i] = input[i] > 0 ? sum : 0.0f;
    }
  }
}

}  // namespace

Replica::Replica(heddle::Engine& engine, heddle::Device device, const std::vector<LayerSize>& sizes,
                 std::int64_t rows)
    : engine_(engine),
      device_(device),
      rows_(rows),
      images_(heddle::Shape{rows, sizes.front().inputs}, heddle::DType::kFloat32, device, engine),
      labels_(heddle::Shape{rows}, heddle::DType::kInt32, device, engine),
      loss_(NDArray::Zeros({1}, heddle::DType::kFloat64, device, engine)) {
  const auto array = [&](heddle::Shape shape) {
    return NDArray::Zeros(std::move(shape), heddle::DType::kFloat32, device, engine);
  };
  for (std::size_t l = 0; l < sizes.size(); ++l) {
    const auto [inputs, outputs] = sizes[l];
    layers_.push_back({.size = sizes[l],
                       .parameters = {array({inputs, outputs}), array({outputs})},
                       .gradients = {array({inputs, outputs}), array({outputs})},
                       .output = array({rows, outputs}),
                       .output_grad = array({rows, outputs}),
                       .forward_name = fmt::format("forward {}", l),
                       .backward_name = fmt::format("backward {}", l)});
  }
}

void Replica::Load(const float* pixels, const std::int32_t* labels) {
  images_.CopyFromHost(std::span(pixels, static_cast<std::size_t>(images_.size())));
  labels_.CopyFromHost(std::span(labels, static_cast<std::size_t>(rows_)));
}

void Replica::Forward() {
  for (std::size_t l = 0; l < layers_.size(); ++l) PushForward(l);
}

void Replica::Backward() {
  PushLoss();
  for (std::size_t l = layers_.size(); l-- > 0;) PushBackward(l);
}

void Replica::PushForward(std::size_t l) {
  const Layer& layer = layers_[l];
  const NDArray input = InputOf(l), weight = layer.parameters.weight, bias = layer.parameters.bias;
  const Activation activation = l + 1 < layers_.size() ? Activation::kRelu : Activation::kSoftmax;
  engine_.Push(
      {.name = layer.forward_name,
       .reads = {input.var(), weight.var(), bias.var()},
       .writes = {layer.output.var()},
       .device = device_},
      [input, weight, bias, output = layer.output, rows = rows_, size = layer.size, activation] {
        DenseForward(input.data<const float>(), weight.data<const float>(),
                     bias.data<const float>(), output.data<float>(), rows, size, activation);
      });
}

// The gradient of softmax and cross-entropy together: probability minus one for the label.
void Replica::PushLoss() {
  const Layer& last = layers_.back();
  engine_.Push({.name = "loss",
                .reads = {last.output.var(), labels_.var(), loss_.var()},
                .writes = {last.output_grad.var(), loss_.var()},
                .device = device_},
               [probabilities = last.output, labels = labels_, grad = last.output_grad,
                loss = loss_, rows = rows_, classes = last.size.outputs] {
                 const float* const p = probabilities.data<const float>();
                 float* const g = grad.data<float>();
                 std::copy(p, p + rows * classes, g);
                 double sum = 0;
                 for (std::int64_t r = 0; r < rows; ++r) {
                   const std::int64_t at = r * classes + labels.data<const std::int32_t>()[r];
                   sum -= std::log(std::max(p[at], 1e-30f));
                   g[at] -= 1.0f;
                 }
                 *loss.data<double>() += sum;
               });
}

// Two ops, so that the gradients can leave for the store while the error still travels down.
void Replica::PushBackward(std::size_t l) {
  const Layer& layer = layers_[l];
  const NDArray input = InputOf(l);
  if (l > 0) {
    const NDArray weight = layer.parameters.weight, input_grad = layers_[l - 1].output_grad;
    engine_.Push({.name = "backward input",
                  .reads = {input.var(), weight.var(), layer.output_grad.var()},
                  .writes = {input_grad.var()},
                  .device = device_},
                 [input, weight, output_grad = layer.output_grad, input_grad, rows = rows_,
                  size = layer.size] {
                   DenseInputGradient(input.data<const float>(), weight.data<const float>(),
                                      output_grad.data<const float>(), input_grad.data<float>(),
                                      rows, size);
                 });
  }
  engine_.Push({.name = layer.backward_name,
                .reads = {input.var(), layer.output_grad.var()},
                .writes = {layer.gradients.weight.var(), layer.gradients.bias.var()},
                .device = device_},
               [input, output_grad = layer.output_grad, weight_grad = layer.gradients.weight,
                bias_grad = layer.gradients.bias, rows = rows_, size = layer.size] {
                 DenseGradients(input.data<const float>(), output_grad.data<const float>(),
                                weight_grad.data<float>(), bias_grad.data<float>(), rows, size);
               });
}

}  // namespace digits
