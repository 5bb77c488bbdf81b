// Random bodies and messages, for round trips and as a corpus for fuzzing.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/protocol/message.h"

namespace heddle::kvstore::dist_test {

using Random = std::mt19937_64;

// HEDDLE_TEST_SEED, or a new one each run; printed.
std::uint64_t TestSeed();

std::uint64_t Below(Random& random, std::uint64_t bound);  // 0 to bound - 1
std::string RandomText(Random& random);                    // any bytes, often none
// Any kind, with fields that a receiver accepts; the body, if the kind has one, encoded in meta.
dist::Message RandomMessage(Random& random);

// One type of body. Each function is given any bytes as meta.
struct BodyType {
  std::string name;
  std::function<std::string(Random&)> random;  // the encoding of a random body
  // Nothing if it does not decode; else its encoding again.
  std::function<bool(std::string_view meta, std::string* again)> recode;
};
const std::vector<BodyType>& BodyTypes();

// What a sender puts before and into a stream.
std::string EncodeMessage(const dist::Message& message);  // header, meta, payload

}  // namespace heddle::kvstore::dist_test
