// Calls that wait are refused where nothing may wait: in the body of an op, in what a poller calls.
#pragma once

#include <string_view>

namespace heddle::engine {

// Throws InvalidState there, naming the call and the op. A call of several steps asks this before
// its first one, so that it changes nothing and the error says what the caller wrote.
void CheckMayWait(std::string_view call);

}  // namespace heddle::engine
