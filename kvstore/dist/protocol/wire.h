// The fixed parts of the wire format: what a connection begins with, and the header of a message.
// docs/wire.md has them byte by byte.
//
// Everything here is for bytes of strangers: it reads what it is given and no more, and allocates
// only error texts.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "kvstore/dist/protocol/message.h"

namespace heddle::kvstore::dist {

// Counts the incompatible changes of docs/wire.md.
inline constexpr std::uint16_t kWireVersion = 1;

// Each side of a connection begins with a preamble, before it reads any.
inline constexpr std::size_t kPreambleBytes = 16;
inline constexpr std::size_t kHeaderBytes = 64;

// Of every message; a machine whose program wants to say more says so to the program instead.
inline constexpr std::uint32_t kMetaBytesMax = 1 << 20;

struct WireLimits {
  std::uint32_t meta_bytes_max = kMetaBytesMax;
  // More than any machine has. Receivers take memory as bytes come, not by what a header says.
  std::uint64_t payload_bytes_max = std::uint64_t{1} << 48;
};
// Of a peer that has not shown yet that it belongs to the job.
inline constexpr WireLimits kStrangerLimits = {.meta_bytes_max = 4096, .payload_bytes_max = 0};

std::array<std::byte, kPreambleBytes> EncodePreamble();

// What is wrong with the first bytes of a connection, at most kPreambleBytes of them, in words: not
// heddle's, or of which other version. Empty: so far nothing, and with kPreambleBytes of them all
// is well. Wrong bytes are known at the first that is wrong, so that a peer which sends little and
// then waits gets its answer.
[[nodiscard]] std::string CheckPreamble(std::span<const std::byte> first);

// What to send, before closing, to a peer whose `first` bytes CheckPreamble has refused for `why`:
// to a web browser a page, to anything else a preamble and a kRefused.
std::string AnswerToStranger(std::span<const std::byte> first, const std::string& why);

// Of the message's meta and payload it writes the sizes. Meta is smaller than 4 GiB.
void EncodeHeader(const Message& message, std::span<std::byte, kHeaderBytes> header);
// Sets Message::arrivals in what EncodeHeader has written.
void SetArrivals(std::uint8_t arrivals, std::span<std::byte, kHeaderBytes> header);

// The inverse; leaves message->meta and message->payload alone. Returns what is wrong, in words;
// empty: nothing. Wrong are kinds, flags and dtypes that do not exist, flags that the kind does not
// have, a payload where the kind has none, and sizes above `limits`.
[[nodiscard]] std::string DecodeHeader(std::span<const std::byte, kHeaderBytes> header,
                                       const WireLimits& limits, Message* message,
                                       std::uint32_t* meta_bytes, std::uint64_t* payload_bytes);

}  // namespace heddle::kvstore::dist
