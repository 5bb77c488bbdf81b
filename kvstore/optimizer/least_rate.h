// The learning rate by which formulas divide.
#pragma once

namespace heddle::kvstore {

// Below, as at 0, to which a schedule may come, FTML and Ftrl change nothing: the quotient would be
// no float any more, and the step is too small to change a value that is one.
inline constexpr double kLeastDividingRate = 1e-30;

}  // namespace heddle::kvstore
