#include "kvstore/nccl/meeting.h"

#include <heddle/error.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <span>
#include <system_error>

#include <fmt/format.h>

namespace heddle::kvstore {

std::string WhatOf(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "an unknown exception";
  }
}

std::string PackWords(const Words& words) {
  std::string text;
  for (const std::string& word : words) text += fmt::format("{}:{}", word.size(), word);
  return text;
}

Words UnpackWords(std::string_view text) {
  Words words;
  for (std::string_view rest = text; !rest.empty();) {
    std::size_t size = 0;
    const char* const end = rest.data() + rest.size();
    const auto [colon, error] = std::from_chars(rest.data(), end, size);
    if (error != std::errc() || colon == end || *colon != ':' ||
        size > static_cast<std::size_t>(end - colon - 1)) {
      throw InvalidState(fmt::format(
          "NCCL: expected words of another process, each behind its length, got a text of {} bytes "
          "with something else at {}",
          text.size(), text.size() - rest.size()));
    }
    words.emplace_back(colon + 1, size);
    rest = {colon + 1 + size, end};
  }
  return words;
}

std::vector<std::string> Meeting::Exchange(const std::string& text) {
  using Size = std::uint64_t;
  const auto count = static_cast<std::size_t>(processes());
  const auto self = static_cast<std::size_t>(rank());
  // Each process fills its own place and leaves the others' at 0: the sum is all of them.
  Bytes bytes(count * sizeof(Size));
  const Size own = text.size();
  std::memcpy(&bytes[self * sizeof(Size)], &own, sizeof(own));
  bytes = Add(bytes);
  std::vector<Size> begins(count + 1, 0);
  for (std::size_t i = 0; i < count; ++i) {
    Size size = 0;
    std::memcpy(&size, &bytes[i * sizeof(Size)], sizeof(size));
    begins[i + 1] = begins[i] + size;
  }
  bytes.assign(begins[count], 0);
  std::ranges::copy(text, bytes.begin() + static_cast<std::ptrdiff_t>(begins[self]));
  bytes = Add(bytes);
  std::vector<std::string> texts;
  for (std::size_t i = 0; i < count; ++i) {
    texts.emplace_back(bytes.begin() + static_cast<std::ptrdiff_t>(begins[i]),
                       bytes.begin() + static_cast<std::ptrdiff_t>(begins[i + 1]));
  }
  return texts;
}

std::vector<NDArray> Meeting::Share(const std::vector<NDArray>& values) {
  std::vector<NDArray> shared;
  for (const NDArray& value : values) {
    NDArray host = value.Copy(Cpu());
    host.WaitToWrite();
    const std::span<std::uint8_t> place(static_cast<std::uint8_t*>(host.data()),
                                        static_cast<std::size_t>(host.bytes()));
    if (!place.empty()) {
      Bytes bytes(place.size(), 0);
      if (rank() == 0) std::ranges::copy(place, bytes.begin());
      std::ranges::copy(Add(bytes), place.begin());
    }
    shared.push_back(host.Copy(value.device()));
  }
  return shared;
}

}  // namespace heddle::kvstore
