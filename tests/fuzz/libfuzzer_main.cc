// libFuzzer's entry. The corpus is what `wire_mutations --corpus <folder>` writes.
#include <cstddef>
#include <cstdint>

#include "tests/fuzz/wire_fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* input, std::size_t bytes) {
  heddle::fuzz::ReadWire(input, bytes);
  return 0;
}
