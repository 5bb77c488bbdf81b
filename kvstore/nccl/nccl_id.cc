#include "kvstore/nccl/nccl_id.h"

#include <heddle/error.h>

#include <charconv>
#include <cstddef>

#include <fmt/format.h>

namespace heddle::kvstore {

std::string TextOf(const Nccl::Id& id) {
  std::string text;
  for (const char byte : id) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return text;
}

Nccl::Id IdOf(std::string_view name, std::string_view text) {
  Nccl::Id id{};
  bool good = text.size() == 2 * id.size();
  for (std::size_t i = 0; i < id.size() && good; ++i) {
    unsigned value = 0;
    const char* const begin = text.data() + 2 * i;
    const auto [end, error] = std::from_chars(begin, begin + 2, value, 16);
    good = error == std::errc() && end == begin + 2;
    id[i] = static_cast<char>(value);
  }
  if (good) return id;
  throw InvalidArgument(
      fmt::format("{}: expected the {} hexadecimal digits of NewNcclId(), got {} characters", name,
                  2 * id.size(), text.size()));
}

}  // namespace heddle::kvstore
