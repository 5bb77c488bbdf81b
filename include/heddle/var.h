// Var: the unit of ordering. Ops name the vars that they read and write; the engine orders the ops.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace heddle {

namespace internal {
struct VarState;
void RetainVar(VarState* state) noexcept;
void ReleaseVar(VarState* state) noexcept;
}  // namespace internal

// A counted handle to one variable of one engine, made by Engine::NewVar. Empty by default.
// Dropping the last handle is safe at any time: ops already pushed keep the variable alive, and a
// handle may outlive its engine.
// Threads: copies may be used from any thread; one handle object from one thread at a time.
class Var {
 public:
  Var() = default;
  Var(const Var& other) noexcept : state_(other.state_) {
    if (state_ != nullptr) internal::RetainVar(state_);
  }
  Var(Var&& other) noexcept : state_(std::exchange(other.state_, nullptr)) {}
  Var& operator=(Var other) noexcept {
    std::swap(state_, other.state_);
    return *this;
  }
  ~Var() {
    if (state_ != nullptr) internal::ReleaseVar(state_);
  }

  explicit operator bool() const { return state_ != nullptr; }
  friend bool operator==(const Var& a, const Var& b) { return a.state_ == b.state_; }

  // The name given at NewVar, or "var<id>".
  std::string name() const;

  internal::VarState* state() const { return state_; }    // for heddle itself
  static Var Adopt(internal::VarState* state) noexcept {  // for heddle itself: takes one count over
    Var var;
    var.state_ = state;
    return var;
  }

 private:
  internal::VarState* state_ = nullptr;
};

// Borrows a Var for the duration of a call.
class VarRef {
 public:
  VarRef() = default;
  VarRef(const Var& var) : state_(var.state()) {}  // NOLINT(google-explicit-constructor)
  internal::VarState* state() const { return state_; }

 private:
  internal::VarState* state_ = nullptr;
};

// The vars of one op: `{x, y}` or a std::vector<Var>. Borrows the vars, copies the list; up to four
// without allocating.
class VarList {
 public:
  VarList() = default;
  VarList(std::initializer_list<VarRef> vars) { Assign(vars.begin(), vars.size()); }
  VarList(const std::vector<Var>& vars) {  // NOLINT(google-explicit-constructor)
    const std::vector<VarRef> refs(vars.begin(), vars.end());
    Assign(refs.data(), refs.size());
  }
  VarList(const std::vector<VarRef>& vars) {  // NOLINT(google-explicit-constructor)
    Assign(vars.data(), vars.size());
  }
  explicit VarList(std::span<const VarRef> vars) { Assign(vars.data(), vars.size()); }

  const VarRef* begin() const { return more_.empty() ? few_ : more_.data(); }
  const VarRef* end() const { return begin() + size_; }
  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

 private:
  static constexpr std::size_t kFew = 4;

  void Assign(const VarRef* vars, std::size_t count) {
    size_ = count;
    if (count > kFew) {
      more_.assign(vars, vars + count);
      return;
    }
    for (std::size_t i = 0; i < count; ++i) few_[i] = vars[i];
  }

  std::size_t size_ = 0;
  VarRef few_[kFew];
  std::vector<VarRef> more_;
};

}  // namespace heddle
