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

// Whether PlotLosses can write `file`. Changes nothing.
// Errors: InvalidArgument if its name does not end in .svg or .png, IoError if it cannot be opened
// for writing.
void CheckPlotFile(const std::string& file);

// Draws the losses by epoch into a file that CheckPlotFile accepts. False, and nothing is written,
// if gnuplot is not installed or fails.
bool PlotLosses(const std::vector<Method>& methods, const std::vector<TrainingResult>& results,
                const std::string& file);

}  // namespace digits
