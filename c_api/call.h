// One call of the C API: its arguments checked, its exceptions turned into a status.
//
//   HeddleStatus HeddleArrayGetKind(HeddleArray array, int* kind) {
//     return Try(__func__, [&](const Call& call) {
//       call.Result("kind", kind) = static_cast<int>(call.Get("array", array).index());
//     });
//   }
#pragma once

#include <heddle/c_api.h>
#include <heddle/device.h>
#include <heddle/dtype.h>
#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/key.h>
#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>
#include <heddle/shape.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "c_api/handles.h"
#include "c_api/status.h"
#include "engine/fork.h"

namespace heddle::c_api {

// All methods throw InvalidArgument, naming call, argument, the expected and the given.
class Call {
 public:
  explicit Call(const char* name) : name_(name) {}

  [[noreturn]] void Refuse(const std::string& argument, std::string_view expected,
                           std::string_view given) const {
    throw InvalidArgument(
        fmt::format("{}: {}: expected {}, got {}", name_, argument, expected, given));
  }

  // The object of a handle.
  template <class Handle>
  ObjectOf<Handle> Get(const char* argument, Handle handle) const {
    std::optional<ObjectOf<Handle>> object = TableOf<Handle>().Find(NumberOf(handle));
    if (!object) RefuseHandle(argument, handle);
    return *std::move(object);
  }
  template <class Handle>
  ObjectOf<Handle> GetAt(const char* argument, std::size_t i, const Handle* handles) const {
    std::optional<ObjectOf<Handle>> object = TableOf<Handle>().Find(NumberOf(handles[i]));
    if (!object) RefuseHandle(fmt::format("{}[{}]", argument, i), handles[i]);
    return *std::move(object);
  }
  // Ends the handle.
  template <class Handle>
  ObjectOf<Handle> Take(const char* argument, Handle handle) const {
    std::optional<ObjectOf<Handle>> object = TableOf<Handle>().Take(NumberOf(handle));
    if (!object) RefuseHandle(argument, handle);
    return *std::move(object);
  }

  NDArray Dense(const char* argument, HeddleArray array) const {
    AnyArray any = Get(argument, array);
    if (any.index() != HEDDLE_DENSE) Refuse(argument, "a dense array", "a row-sparse one");
    return std::get<NDArray>(std::move(any));
  }
  RowSparseNDArray RowSparse(const char* argument, HeddleArray array) const {
    AnyArray any = Get(argument, array);
    if (any.index() != HEDDLE_ROW_SPARSE) Refuse(argument, "a row-sparse array", "a dense one");
    return std::get<RowSparseNDArray>(std::move(any));
  }

  // Where a result goes.
  template <class T>
  T& Result(const char* argument, T* pointer) const {
    if (pointer == nullptr) Refuse(argument, "a pointer", "NULL");
    return *pointer;
  }
  // Where `count` elements are or go.
  template <class T>
  T* Elements(const char* argument, std::size_t count, T* first) const {
    if (count > 0 && first == nullptr) {
      Refuse(argument, fmt::format("a pointer to {} elements", count), "NULL");
    }
    return first;
  }
  template <class T>
  std::span<const T> List(const char* argument, std::size_t count, const T* first) const {
    return {Elements(argument, count, first), count};
  }
  std::string_view Text(const std::string& argument, const char* text) const {
    if (text == nullptr) Refuse(argument, "a text", "NULL");
    return text;
  }
  template <class Function>
  Function Callback(const char* argument, Function function) const {
    if (function == nullptr) Refuse(argument, "a function", "NULL");
    return function;
  }
  KeyRef Key(const char* argument, const HeddleKey* key) const {
    Result(argument, key);
    return ToKeyRef(*key);
  }
  static KeyRef ToKeyRef(const HeddleKey& key) {
    return key.text != nullptr ? KeyRef(key.text) : KeyRef(key.number);
  }

  // One of an enumeration that has the values 0 to count - 1.
  template <class Enum>
  Enum OneOf(const char* argument, int value, int count) const {
    if (value < 0 || value >= count) {
      Refuse(argument, fmt::format("0 to {}", count - 1), fmt::to_string(value));
    }
    return static_cast<Enum>(value);
  }
  DType ToDType(const char* argument, int dtype) const {
    return OneOf<DType>(argument, dtype, static_cast<int>(kAllDTypes.size()));
  }
  // Of values on the host that an array of `to` takes. What C has written as a bool may be any
  // byte: the cast from uint8 makes 0 and 1 of them.
  DType ToHostDType(const char* argument, int dtype, DType to) const {
    const DType given = ToDType(argument, dtype);
    return given == DType::kBool && to == DType::kBool ? DType::kUInt8 : given;
  }
  Device ToDevice(int type, int id) const {
    const auto checked = OneOf<DeviceType>("device_type", type, 3);
    if (!std::in_range<std::int16_t>(id)) Refuse("device_id", "0 to 32767", fmt::to_string(id));
    return {checked, static_cast<std::int16_t>(id)};
  }
  Shape ToShape(std::size_t ndim, const std::int64_t* shape) const {
    constexpr std::size_t kAxesMax = 1024;  // more is no number but what was in the memory
    if (ndim > kAxesMax) {
      Refuse("ndim", fmt::format("at most {} axes", kAxesMax), fmt::to_string(ndim));
    }
    return Shape(List("shape", ndim, shape));
  }

  // A struct that begins with struct_size, as this library knows it: what a shorter one lacks is
  // zero, and what a longer one has beyond must be.
  template <class Struct>
  Struct Versioned(const char* argument, const Struct* given) const {
    const std::size_t size = Result(argument, given).struct_size;
    constexpr std::size_t kLargest = 4096;  // more is no size but what was in the memory
    if (size < sizeof(std::size_t) || size > kLargest) {
      Refuse(fmt::format("{}->struct_size", argument), "the size of the struct",
             fmt::to_string(size));
    }
    const auto* const bytes = reinterpret_cast<const char*>(given);
    const auto is_set = [](char byte) { return byte != 0; };
    if (size > sizeof(Struct) && std::any_of(bytes + sizeof(Struct), bytes + size, is_set)) {
      Refuse(argument,
             fmt::format("zeros beyond the {} bytes that this heddle knows", sizeof(Struct)),
             "a field of a later version");
    }
    Struct known = {};
    std::memcpy(&known, given, std::min(size, sizeof(Struct)));
    return known;
  }

 private:
  template <class Handle>
  [[noreturn]] void RefuseHandle(const std::string& argument, Handle handle) const {
    Refuse(argument, HandleKind<Handle>::kName,
           handle == nullptr                            ? "NULL"
           : TableOf<Handle>().HasTag(NumberOf(handle)) ? "a handle that is not valid any more"
                                                        : "no handle of this kind");
  }

  const char* name_;
};

template <class F>
HeddleStatus Try(const char* name, F&& call) noexcept {
  try {
    engine::CheckNotForked(name);  // whose locks may be held for ever, those of the handles too
    call(Call(name));
    return HEDDLE_OK;
  } catch (...) {
    return SetLastErrorToCurrentException();
  }
}

template <class Handle>
HeddleStatus Free(const char* name, const char* argument, Handle handle) noexcept {
  if (handle == nullptr) return HEDDLE_OK;
  return Try(name, [&](const Call& call) { call.Take(argument, handle); });
}

// Calls wait(deadline) or, if the time never passes, wait(). A negative time has passed.
template <class F>
void WaitFor(std::int64_t timeout_ms, F&& wait) {
  // A century: more would not fit the clock.
  constexpr std::int64_t kLongestMs = std::int64_t{100} * 365 * 24 * 3600 * 1000;
  if (timeout_ms == HEDDLE_FOREVER || timeout_ms > kLongestMs) {
    wait();
  } else {
    wait(Deadline(std::chrono::milliseconds(std::max<std::int64_t>(timeout_ms, 0))));
  }
}

}  // namespace heddle::c_api
