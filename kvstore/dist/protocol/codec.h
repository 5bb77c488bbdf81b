// Little-endian bytes of integers, numbers and texts, as docs/wire.md has them.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace heddle::kvstore::dist {

// What travels as its bytes: integers, double, and enums by their values.
template <class T>
concept WireScalar = std::integral<T> || std::same_as<T, double> || std::is_enum_v<T>;

// The bytes of a value in the order of the wire, or the value of such bytes: the same swap.
template <WireScalar T>
T SwapToLittleEndian(T value) {
  if constexpr (std::endian::native == std::endian::little || sizeof(T) == 1) return value;
  char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  for (std::size_t i = 0; i < sizeof(T) / 2; ++i) std::swap(bytes[i], bytes[sizeof(T) - 1 - i]);
  std::memcpy(&value, bytes, sizeof(T));
  return value;
}

template <WireScalar T>
void StoreLittleEndian(T value, void* to) {
  value = SwapToLittleEndian(value);
  std::memcpy(to, &value, sizeof(T));
}

template <WireScalar T>
T LoadLittleEndian(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return SwapToLittleEndian(value);
}

// Appends to a string.
class WireWriter {
 public:
  template <WireScalar T>
  void Put(T value) {
    const std::size_t at = bytes_.size();
    bytes_.resize(at + sizeof(T));
    StoreLittleEndian(value, bytes_.data() + at);
  }
  void Put(bool value) { Put(static_cast<std::uint8_t>(value)); }
  void Put(std::string_view text) {  // its length in 32 bits, then its bytes
    PutCount(text.size());
    bytes_ += text;
  }
  void PutCount(std::size_t count) { Put(static_cast<std::uint32_t>(count)); }

  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Reads bytes of strangers. A read that does not fit, or a value that cannot be, makes the reader
// fail for good: all later reads fail too, so that a caller needs to look once, at the end.
class WireReader {
 public:
  explicit WireReader(std::string_view bytes) : rest_(bytes) {}

  // False: failed; `value` is unchanged.
  template <WireScalar T>
  bool Get(T* value) {
    if (failed_ || rest_.size() < sizeof(T)) return Fail();
    *value = LoadLittleEndian<T>(rest_.data());
    rest_.remove_prefix(sizeof(T));
    return true;
  }
  bool Get(bool* value) {
    std::uint8_t byte = 0;
    if (!Get(&byte) || byte > 1) return Fail();
    *value = byte == 1;
    return true;
  }
  bool Get(std::string* text) {
    std::uint32_t count = 0;
    if (!Get(&count) || rest_.size() < count) return Fail();
    text->assign(rest_.substr(0, count));
    rest_.remove_prefix(count);
    return true;
  }
  // An enum whose values are 0 to `last`, or `first` to `last`.
  template <class E>
  bool GetEnum(E* value, E last, E first = E{}) {
    E given{};
    if (!Get(&given) || given < first || given > last) return Fail();
    *value = given;
    return true;
  }
  // How many items follow, each of at least `item_bytes_min`: no more than can be there, so that
  // the caller may make room for them.
  bool GetCount(std::size_t* count, std::size_t item_bytes_min) {
    std::uint32_t given = 0;
    if (!Get(&given) || given > rest_.size() / item_bytes_min) return Fail();
    *count = given;
    return true;
  }
  // A count, and the items by `get(WireReader&, T*)`.
  template <class T, class GetItem>
  bool GetList(std::vector<T>* items, std::size_t item_bytes_min, GetItem get) {
    std::size_t count = 0;
    if (!GetCount(&count, item_bytes_min)) return false;
    items->clear();
    items->reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      if (!get(*this, &items->emplace_back())) return Fail();
    }
    return true;
  }

  // All is read, and nothing failed.
  bool Ended() const { return !failed_ && rest_.empty(); }
  bool Fail() {
    failed_ = true;
    return false;
  }

 private:
  std::string_view rest_;
  bool failed_ = false;
};

}  // namespace heddle::kvstore::dist
