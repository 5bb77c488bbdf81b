// The same training with several optimizers and with compressed gradients, side by side.
#pragma once

#include <string>
#include <vector>

#include "examples/digits/training.h"

namespace digits {

struct Method {
  std::string name;
  TrainingOptions options;
};

// `options` with plain SGD, the same with 2-bit gradients, Adam and LAMB, each with a learning rate
// that suits it.
std::vector<Method> MethodsToCompare(const TrainingOptions& options);

void PrintComparison(const std::vector<Method>& methods,
                     const std::vector<TrainingResult>& results);

// Draws the losses by epoch; the file's name ends in .svg or .png. False, and nothing is written,
// if gnuplot is not installed or fails.
bool PlotLosses(const std::vector<Method>& methods, const std::vector<TrainingResult>& results,
                const std::string& file);

}  // namespace digits
