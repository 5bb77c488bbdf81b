// The context of a callback, and what destroys it.
#pragma once

#include <heddle/c_api.h>

#include <utility>

#include "c_api/status.h"

namespace heddle::c_api {

// Owns it from the moment that the call which was given it succeeds.
class Context {
 public:
  Context(void* context, HeddleDestroyContext destroy) : context_(context), destroy_(destroy) {}
  Context(Context&& other) noexcept
      : context_(other.context_), destroy_(std::exchange(other.destroy_, nullptr)) {}
  Context& operator=(Context&&) = delete;
  ~Context() {
    if (destroy_ == nullptr) return;
    const CallbackScope scope;
    destroy_(context_);
  }

  void* get() const { return context_; }
  void Release() { destroy_ = nullptr; }

 private:
  void* context_;
  HeddleDestroyContext destroy_;
};

}  // namespace heddle::c_api
