// Everything that reads bytes of peers, behind one function: headers, bodies, the handshake, and
// the making of messages from a stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/kvstore/dist/random_bodies.h"

namespace heddle::fuzz {

// Aborts if the readers of `input` do not do what they promise. Its first byte picks a reader, the
// second the size of the pieces in which the reader gets the others.
void ReadWire(const std::uint8_t* input, std::size_t bytes);

// Inputs of honest senders, for each reader.
std::vector<std::string> HonestInputs(kvstore::dist_test::Random& random);

}  // namespace heddle::fuzz
