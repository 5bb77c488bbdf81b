// The parameters of a network, as what a training step moves.
#pragma once

#include <cstdint>
#include <vector>

namespace heddle::bench {

// Elements of each parameter, in the order of the layers (He et al., 2015, table 1): convolutions
// without bias, each followed by the scale and shift of its normalisation, and the classifier.
std::vector<std::int64_t> ResNet50();

}  // namespace heddle::bench
