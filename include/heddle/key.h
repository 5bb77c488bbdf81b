// Keys of a KVStore: 64-bit integers or strings.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

namespace heddle {

// A key that owns its text: a 64-bit integer or a string. A store holds keys of one kind.
using Key = std::variant<std::int64_t, std::string>;

namespace internal {
template <class T>
concept KeyInteger = std::integral<T> && !std::same_as<T, bool> && !std::same_as<T, char> &&
                     !std::same_as<T, wchar_t> && !std::same_as<T, char8_t> &&
                     !std::same_as<T, char16_t> && !std::same_as<T, char32_t>;
[[noreturn]] void ThrowKeyTooLarge(std::uint64_t key);
}  // namespace internal

// Borrows a key for the duration of a call.
class KeyRef {
 public:
  template <internal::KeyInteger T>
  constexpr KeyRef(T number)  // NOLINT(google-explicit-constructor)
      : number_(static_cast<std::int64_t>(number)) {
    if (!std::in_range<std::int64_t>(number)) {
      internal::ThrowKeyTooLarge(static_cast<std::uint64_t>(number));
    }
  }
  constexpr KeyRef(std::string_view text)  // NOLINT(google-explicit-constructor)
      : text_(text.data() != nullptr ? text.data() : ""),
        number_(static_cast<std::int64_t>(text.size())) {}
  constexpr KeyRef(const char* text)  // NOLINT(google-explicit-constructor)
      : KeyRef(std::string_view(text)) {}
  KeyRef(const std::string& text)  // NOLINT(google-explicit-constructor)
      : KeyRef(std::string_view(text)) {}
  KeyRef(const Key& key)  // NOLINT(google-explicit-constructor)
      : KeyRef(key.index() == 0 ? KeyRef(std::get<0>(key)) : KeyRef(std::get<1>(key))) {}

  constexpr bool is_string() const { return text_ != nullptr; }
  constexpr std::int64_t number() const { return number_; }  // of an integer key
  constexpr std::string_view text() const {                  // of a string key
    return {text_, static_cast<std::size_t>(number_)};
  }
  Key ToKey() const { return is_string() ? Key(std::string(text())) : Key(number_); }

  friend constexpr bool operator==(KeyRef a, KeyRef b) {
    if (a.is_string() != b.is_string()) return false;
    return a.is_string() ? a.text() == b.text() : a.number_ == b.number_;
  }

 private:
  const char* text_ = nullptr;
  std::int64_t number_ = 0;  // the integer, or the length of the text
};

// "'weight'" or "7", as messages show it: control characters as \x0a, a backslash as two. Keys that
// differ look different.
std::string ToString(KeyRef key);

}  // namespace heddle
