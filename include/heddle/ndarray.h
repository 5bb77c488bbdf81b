// NDArray: a dense array whose operations are ops of an engine.
//
//   heddle::NDArray weight = heddle::NDArray::Zeros({128, 64});
//   weight += gradient * 0.5;               // queued: returns at once
//   std::vector<float> values = weight.ToVector<float>();  // waits for what it needs
//
// A handle: copies are cheap and show the same values. Views (Slice, Reshape) share buffer and Var
// with the array that they come from, so the engine orders work on any of them. Const concerns the
// handle, not the values, as with std::span.
//
// Order:    operations of one thread take effect in program order; docs/consistency.md has the
//           rest. An operation that covers its array's whole buffer is a pure write, which cures a
//           poisoned array; on a view of a part it is a read-modify of the shared Var.
// Memory:   contiguous, C order, 64-byte aligned, taken from the device's pool (heddle/memory.h)
//           when the first op touches it and given back when the last handle is gone and the last
//           op is done. Dropping a handle is safe at any time, also after its engine is gone.
// Devices:  cpu(i) for any i >= 0; gpu(i) and cpu_pinned(i) where there are GPUs: see docs/gpu.md.
// Errors:   InvalidArgument on the calling thread for an empty handle, or shape, dtype, device or
//           engine that do not fit, naming the expected and the given; nothing is changed then.
//           Failures inside ops (OutOfMemory among them) come out of the waits.
// Threads:  copies may be used from any thread; one handle object from one thread at a time.
#pragma once

#include <heddle/device.h>
#include <heddle/dtype.h>
#include <heddle/engine.h>
#include <heddle/shape.h>
#include <heddle/var.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace heddle {

class NDArray;

namespace internal {
struct ArrayState;
class ArrayAccess;
void RetainArray(ArrayState* state) noexcept;
void ReleaseArray(ArrayState* state) noexcept;
}  // namespace internal

// A number for element-wise arithmetic: an integer exactly, or a floating-point number. An array of
// integers takes only scalars that its dtype represents exactly.
class Scalar {
 public:
  template <class T>
  requires std::is_arithmetic_v<T> Scalar(T value)  // NOLINT(google-explicit-constructor)
      : is_integer_(std::is_integral_v<T> && std::in_range<std::int64_t>(Widen(value))),
        integer_(is_integer_ ? static_cast<std::int64_t>(value) : 0),
        real_(static_cast<double>(value)) {}

  bool is_integer() const { return is_integer_; }
  std::int64_t integer() const { return integer_; }  // valid if is_integer()
  double real() const { return real_; }              // always valid, rounded if need be

 private:
  // std::in_range takes neither bool nor characters nor floating point.
  template <class T>
  static auto Widen(T value) {
    if constexpr (std::is_same_v<T, std::uint64_t> || std::is_same_v<T, unsigned long long>) {
      return static_cast<std::uint64_t>(value);
    } else if constexpr (std::is_integral_v<T>) {
      return static_cast<std::int64_t>(value);
    } else {
      return std::int64_t{0};
    }
  }

  bool is_integer_;
  std::int64_t integer_;
  double real_;
};

class NDArray {
 public:
  NDArray() = default;  // empty: usable for assignment and empty() only
  // Contents are undefined until written. Throws OutOfMemory if the array alone, rounded up to its
  // size class, exceeds the pool's cap.
  explicit NDArray(Shape shape, DType dtype = DType::kFloat32, Device device = Cpu(),
                   Engine& engine = Engine::Default());

  NDArray(const NDArray& other) noexcept : state_(other.state_) {
    if (state_ != nullptr) internal::RetainArray(state_);
  }
  NDArray(NDArray&& other) noexcept : state_(std::exchange(other.state_, nullptr)) {}
  NDArray& operator=(NDArray other) noexcept {
    std::swap(state_, other.state_);
    return *this;
  }
  ~NDArray() {
    if (state_ != nullptr) internal::ReleaseArray(state_);
  }

  static NDArray Zeros(Shape shape, DType dtype = DType::kFloat32, Device device = Cpu(),
                       Engine& engine = Engine::Default());
  static NDArray Ones(Shape shape, DType dtype = DType::kFloat32, Device device = Cpu(),
                      Engine& engine = Engine::Default());
  static NDArray Full(Shape shape, Scalar value, DType dtype = DType::kFloat32,
                      Device device = Cpu(), Engine& engine = Engine::Default());
  // 0, 1, ... count - 1, in one dimension.
  static NDArray Arange(std::int64_t count, DType dtype = DType::kFloat32, Device device = Cpu(),
                        Engine& engine = Engine::Default());

  // An array with a copy of host values, cast to `dtype`; `values` may go right after the call. As
  // many values as the shape has elements; without a shape, one dimension.
  template <class T>
  static NDArray FromVector(const std::vector<T>& values) {
    return FromVector(values, Shape{static_cast<std::int64_t>(values.size())});
  }
  template <class T>
  static NDArray FromVector(const std::vector<T>& values, Shape shape, DType dtype = kDTypeOf<T>,
                            Device device = Cpu(), Engine& engine = Engine::Default()) {
    return FromData(std::span<const T>(values), std::move(shape), dtype, device, engine);
  }
  template <class T>
  static NDArray FromData(std::span<const T> values, Shape shape, DType dtype = kDTypeOf<T>,
                          Device device = Cpu(), Engine& engine = Engine::Default()) {
    return FromHost(values.data(), static_cast<std::int64_t>(values.size()), kDTypeOf<T>,
                    std::move(shape), dtype, device, engine);
  }

  // An array that shows memory of somebody else's, contiguous in C order, without a copy. `release`
  // is called once, from any thread, when no handle and no op uses it any more; it must not throw.
  // If this throws, release is not called. Only heddle's own calls are ordered: before others read
  // or write the memory, wait (WaitToRead, WaitToWrite). InvalidArgument for null and for memory
  // that is not aligned to its elements.
  static NDArray FromForeign(void* data, Shape shape, DType dtype, std::function<void()> release,
                             Device device = Cpu(), Engine& engine = Engine::Default());

  bool empty() const { return state_ == nullptr; }
  explicit operator bool() const { return !empty(); }
  // All of these throw InvalidArgument if empty().
  const Shape& shape() const;
  DType dtype() const;
  Device device() const;
  Engine& engine() const;
  const Var& var() const;
  std::int64_t size() const;   // elements
  std::int64_t bytes() const;  // of the elements
  // Shows a part of its buffer only. An op that writes it names var() in `reads` too.
  bool is_partial() const;
  // Whether both show the very same elements of one buffer, in any shape; or share at least one.
  bool IsSameAs(const NDArray& other) const;
  bool Overlaps(const NDArray& other) const;

  // The elements: for the bodies of ops that name var(), or after a wait. Takes the memory from the
  // pool on first use: OutOfMemory. T must be the dtype's type. A body asks for data<const float>()
  // of what its op only reads and for data<float>() of what it writes: the access checker
  // (EngineOptions::check_access) tells them apart by that.
  template <class T>
  T* data() const {
    constexpr DType kExpected = kDTypeOf<std::remove_const_t<T>>;
    if constexpr (std::is_const_v<T>) {
      return static_cast<T*>(TypedConstData(kExpected));
    } else {
      return static_cast<T*>(TypedData(kExpected));
    }
  }
  void* data() const;
  const void* const_data() const;

  // Elements [begin, end) of the first axis. One element of it: [i, i + 1).
  NDArray Slice(std::int64_t begin, std::int64_t end) const;
  // The same elements in another shape of the same size.
  NDArray Reshape(Shape shape) const;

  // Queued operations; a higher priority runs first.

  // Copies the elements to `dst`: any device, casting to its dtype; equal shapes, one engine.
  // Overlapping parts of one buffer are copied as by memmove. Onto itself: nothing.
  void CopyTo(const NDArray& dst, int priority = 0) const;
  // A fresh array with these values; on this device, another one, or as another dtype.
  NDArray Copy(int priority = 0) const;
  NDArray Copy(Device device, int priority = 0) const;
  NDArray AsType(DType dtype, int priority = 0) const;
  void Fill(Scalar value, int priority = 0) const;
  // Copies host values, cast to dtype(); `values` may go right after the call. size() values.
  template <class T>
  void CopyFromHost(std::span<const T> values, int priority = 0) const {
    FromHostQueued(values.data(), static_cast<std::int64_t>(values.size()), kDTypeOf<T>, priority);
  }
  template <class T>
  void CopyFromHost(const std::vector<T>& values, int priority = 0) const {
    CopyFromHost(std::span<const T>(values), priority);
  }

  // Element-wise, in place and into a fresh array; equal shapes, dtypes and devices. Integers wrap
  // around; their division rounds towards zero, and dividing by zero gives zero.
  const NDArray& operator+=(const NDArray& other) const;
  const NDArray& operator-=(const NDArray& other) const;
  const NDArray& operator*=(const NDArray& other) const;
  const NDArray& operator/=(const NDArray& other) const;
  const NDArray& operator+=(Scalar value) const;
  const NDArray& operator-=(Scalar value) const;
  const NDArray& operator*=(Scalar value) const;
  const NDArray& operator/=(Scalar value) const;

  // Waits for pending writes, then the values may be read through data(); throws the error of a
  // poisoned array, every time.
  void WaitToRead() const;
  void WaitToRead(Deadline deadline) const;
  // Waits for pending reads too, then the values may be overwritten through data().
  void WaitToWrite() const;
  void WaitToWrite(Deadline deadline) const;

  // The values as they are when everything pushed before is done, converted to T. Waits. Values of
  // a bool array come as 0 and 1: ToVector<std::uint8_t>().
  template <class T>
  std::vector<T> ToVector() const {
    static_assert(!std::is_same_v<T, bool>, "std::vector<bool> has no elements to copy to");
    std::vector<T> values(static_cast<std::size_t>(size()));
    ToHost(values.data(), kDTypeOf<T>);
    return values;
  }

 private:
  friend class internal::ArrayAccess;  // storage/array_state.h
  explicit NDArray(internal::ArrayState* state) noexcept : state_(state) {}  // takes one count over

  static NDArray FromHost(const void* values, std::int64_t count, DType from, Shape shape,
                          DType dtype, Device device, Engine& engine);
  void FromHostQueued(const void* values, std::int64_t count, DType from, int priority) const;
  void ToHost(void* values, DType as) const;
  void CheckDType(DType expected) const;
  void* TypedData(DType expected) const;
  const void* TypedConstData(DType expected) const;

  internal::ArrayState* state_ = nullptr;
};

NDArray operator+(const NDArray& a, const NDArray& b);
NDArray operator-(const NDArray& a, const NDArray& b);
NDArray operator*(const NDArray& a, const NDArray& b);
NDArray operator/(const NDArray& a, const NDArray& b);
NDArray operator+(const NDArray& a, Scalar b);
NDArray operator-(const NDArray& a, Scalar b);
NDArray operator*(const NDArray& a, Scalar b);
NDArray operator/(const NDArray& a, Scalar b);
NDArray operator+(Scalar a, const NDArray& b);
NDArray operator-(Scalar a, const NDArray& b);
NDArray operator*(Scalar a, const NDArray& b);
NDArray operator/(Scalar a, const NDArray& b);

// out = inputs[0] + inputs[1] + ..., queued as one op. Added in list order (float16 and bfloat16 in
// float32, rounded once): the same bits for every number of workers. One input at least; an input
// may be `out` itself. Equal shapes and dtypes; devices of one memory (all cpu(i)) may be mixed.
void Sum(std::span<const NDArray> inputs, const NDArray& out, int priority = 0);
void Sum(std::initializer_list<NDArray> inputs, const NDArray& out, int priority = 0);

}  // namespace heddle
