// A network of dense layers as engine ops: what an embedding framework would push.
#pragma once

#include <heddle/engine.h>
#include <heddle/ndarray.h>

#include <cstdint>
#include <string>
#include <vector>

namespace digits {

struct LayerSize {
  std::int64_t inputs, outputs;
};

// The parameters of one layer on one device, or their gradients.
struct LayerArrays {
  heddle::NDArray weight;  // (inputs, outputs)
  heddle::NDArray bias;    // (outputs)
};

// One device's copy of the network, with room for the activations of up to `rows` images. All
// methods but the constructor push ops and return; each op names the arrays that it reads and
// writes, so forward of one layer, backward of another and the store's traffic overlap as far as
// the data allows. The sums inside an op run in a fixed order: equal inputs give equal bits.
class Replica {
 public:
  Replica(heddle::Engine& engine, heddle::Device device, const std::vector<LayerSize>& sizes,
          std::int64_t rows);

  // Copies `rows` images to the device; the caller's memory may go right after.
  void Load(const float* pixels, const std::int32_t* labels);
  // Computes the class probabilities of the loaded images.
  void Forward();
  // From the probabilities to the gradients of all layers, summed over the images; adds their
  // cross-entropy to loss().
  void Backward();

  LayerArrays& parameters(std::size_t layer) { return layers_[layer].parameters; }
  LayerArrays& gradients(std::size_t layer) { return layers_[layer].gradients; }
  const heddle::NDArray& probabilities() const { return layers_.back().output; }
  const heddle::NDArray& loss() const { return loss_; }  // (1), float64

 private:
  struct Layer {
    LayerSize size;
    LayerArrays parameters, gradients;
    heddle::NDArray output;       // (rows, outputs)
    heddle::NDArray output_grad;  // the same; of the sum before the activation
    std::string forward_name, backward_name;
  };

  const heddle::NDArray& InputOf(std::size_t layer) const {
    return layer == 0 ? images_ : layers_[layer - 1].output;
  }
  void PushForward(std::size_t layer);
  void PushLoss();
  void PushBackward(std::size_t layer);

  heddle::Engine& engine_;
  const heddle::Device device_;
  const std::int64_t rows_;
  heddle::NDArray images_, labels_, loss_;
  std::vector<Layer> layers_;
};

}  // namespace digits
