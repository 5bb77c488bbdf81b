// What the example prints.
#pragma once

#include <string>
#include <vector>

#include "examples/digits/training.h"

namespace digits {

// Shows the progress of one training: on a terminal one line that is drawn over and over, elsewhere
// a line now and then.
class ProgressBar {
 public:
  explicit ProgressBar(std::string title);
  void Show(const Progress& progress);

 private:
  const std::string title_;
  const bool terminal_;
};

void PrintConfusion(const ConfusionMatrix& confusion);
void PrintTimes(const std::vector<KeyTimes>& times);

}  // namespace digits
