// The bytes of one direction of a connection between processes of a job, as messages.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "kvstore/dist/protocol/message.h"
#include "kvstore/dist/protocol/wire.h"

namespace heddle::tools {

// One message, where it begins in the stream, and how long its payload is. Of the payload only the
// first bytes are kept; message.payload is empty.
struct WireRecord {
  std::uint64_t offset = 0;
  kvstore::dist::Message message;
  std::uint64_t payload_bytes = 0;
  std::string payload_begin;
};

// Takes the stream in pieces of any size.
class WireStream {
 public:
  using OnRecord = std::function<void(const WireRecord&)>;

  // Of payloads it keeps `payload_kept` bytes. `on_record` must not call the stream.
  WireStream(const kvstore::dist::WireLimits& limits, std::uint64_t payload_kept,
             OnRecord on_record);

  // False: these are no such bytes, why() says it, and all further ones are ignored.
  bool Feed(std::span<const std::byte> bytes);
  // What is missing when the stream ends here; empty: it ends between messages.
  std::string Missing() const;

  // In words, with the place.
  const std::string& why() const { return why_; }

 private:
  enum class State { kPreamble, kHeader, kMeta, kPayload };

  std::span<const std::byte> Take(std::span<const std::byte>* bytes, std::uint64_t most);
  bool Collect(std::span<const std::byte>* bytes, std::size_t wanted);
  bool Step(std::span<const std::byte>* bytes);
  void EndMessageIfComplete();
  bool Fail(std::uint64_t offset, const std::string& why);

  const kvstore::dist::WireLimits limits_;
  const std::uint64_t payload_kept_;
  const OnRecord on_record_;
  State state_ = State::kPreamble;
  std::uint64_t offset_ = 0;  // of the next byte
  std::string collected_;     // of the preamble, header or meta
  std::uint32_t meta_bytes_ = 0;
  std::uint64_t payload_rest_ = 0;
  WireRecord record_;
  std::string why_;
};

// One line or more for people, without the offset: kind, fields, and what the body says.
std::string DescribeRecord(const WireRecord& record);

}  // namespace heddle::tools
