#include "tools/heddle/wire_stream.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

namespace heddle::tools {

using kvstore::dist::CheckPreamble;
using kvstore::dist::DecodeHeader;
using kvstore::dist::kHeaderBytes;
using kvstore::dist::kPreambleBytes;
using kvstore::dist::Name;

WireStream::WireStream(const kvstore::dist::WireLimits& limits, std::uint64_t payload_kept,
                       OnRecord on_record)
    : limits_(limits), payload_kept_(payload_kept), on_record_(std::move(on_record)) {}

bool WireStream::Feed(std::span<const std::byte> bytes) {
  while (why_.empty() && !bytes.empty()) {
    if (!Step(&bytes)) return false;
  }
  return why_.empty();
}

// Up to `most` of the bytes.
std::span<const std::byte> WireStream::Take(std::span<const std::byte>* bytes, std::uint64_t most) {
  const auto count = static_cast<std::size_t>(std::min<std::uint64_t>(bytes->size(), most));
  const std::span<const std::byte> taken = bytes->first(count);
  *bytes = bytes->subspan(count);
  offset_ += count;
  return taken;
}

// True: collected_ has `wanted` bytes.
bool WireStream::Collect(std::span<const std::byte>* bytes, std::size_t wanted) {
  const auto taken = Take(bytes, wanted - collected_.size());
  collected_.append(reinterpret_cast<const char*>(taken.data()), taken.size());
  return collected_.size() == wanted;
}

bool WireStream::Step(std::span<const std::byte>* bytes) {
  switch (state_) {
    case State::kPreamble: {
      const bool complete = Collect(bytes, kPreambleBytes);
      const std::string wrong = CheckPreamble(std::as_bytes(std::span(collected_)));
      if (!wrong.empty()) return Fail(0, wrong);
      if (complete) {
        collected_.clear();
        state_ = State::kHeader;
      }
      return true;
    }
    case State::kHeader: {
      if (!Collect(bytes, kHeaderBytes)) return true;
      record_ = {};
      record_.offset = offset_ - kHeaderBytes;
      const std::string wrong =
          DecodeHeader(std::as_bytes(std::span(collected_)).first<kHeaderBytes>(), limits_,
                       &record_.message, &meta_bytes_, &record_.payload_bytes);
      if (!wrong.empty()) return Fail(record_.offset, wrong);
      collected_.clear();
      payload_rest_ = record_.payload_bytes;
      state_ = meta_bytes_ > 0 ? State::kMeta : State::kPayload;
      EndMessageIfComplete();
      return true;
    }
    case State::kMeta:
      if (!Collect(bytes, meta_bytes_)) return true;
      record_.message.meta = std::exchange(collected_, {});
      state_ = State::kPayload;
      EndMessageIfComplete();
      return true;
    case State::kPayload: {
      const auto taken = Take(bytes, payload_rest_);
      payload_rest_ -= taken.size();
      const std::uint64_t room = payload_kept_ - record_.payload_begin.size();
      record_.payload_begin.append(
          reinterpret_cast<const char*>(taken.data()),
          static_cast<std::size_t>(std::min<std::uint64_t>(taken.size(), room)));
      EndMessageIfComplete();
      return true;
    }
  }
  return true;
}

void WireStream::EndMessageIfComplete() {
  if (state_ != State::kPayload || payload_rest_ > 0) return;
  state_ = State::kHeader;
  on_record_(record_);
}

bool WireStream::Fail(std::uint64_t offset, const std::string& why) {
  why_ = fmt::format("at byte {}: {}", offset, why);
  return false;
}

std::string WireStream::Missing() const {
  const auto part = [&](std::string_view what, std::uint64_t have, std::uint64_t want) {
    return fmt::format("ends at byte {} within {}: {} of {} bytes are there", offset_, what, have,
                       want);
  };
  const std::string name(Name(record_.message.kind));
  switch (state_) {
    case State::kPreamble:
      return part("the preamble", collected_.size(), kPreambleBytes);
    case State::kHeader:
      return collected_.empty() ? "" : part("a header", collected_.size(), kHeaderBytes);
    case State::kMeta:
      return part(fmt::format("the meta of a {}", name), collected_.size(), meta_bytes_);
    case State::kPayload:
      return part(fmt::format("the payload of a {}", name), record_.payload_bytes - payload_rest_,
                  record_.payload_bytes);
  }
  return {};
}

}  // namespace heddle::tools
