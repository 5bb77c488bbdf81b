#include "engine/failure.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace heddle::engine {
namespace {

// Whatever the program's own what() does.
std::string MessageOf(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    const char* const message = exception.what();
    return message != nullptr ? message : "an exception whose what() is null";
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

}  // namespace

Thrown::Thrown(std::exception_ptr exception)
    : error(std::move(exception)), message(MessageOf(error)) {}

const void* AddressOf(const std::exception_ptr& error) noexcept {
  static_assert(sizeof(error) == sizeof(void*), "an exception_ptr is the exception's address");
  const void* address = nullptr;
  std::memcpy(&address, static_cast<const void*>(&error), sizeof(address));
  return address;
}

void Unreported::Add(FailureRecord* failure) {
  DCHECK(!full() && !failure->seen);
  failure->unreported = true;
  unseen_.insert(failure);
}

void Unreported::See(FailureRecord* failure) {
  if (std::exchange(failure->seen, true) || !failure->unreported) return;
  const auto [first, last] = unseen_.equal_range(failure);
  seen_.insert(unseen_.extract(std::find(first, last, failure)));
}

FailureRecord* Unreported::TakeFirst(Failures& failures) {
  FailureRecord* const first = *failures.begin();
  failures.erase(failures.begin());
  first->unreported = false;
  return first;
}

FailureRecord* Unreported::TakeEarliest() {
  if (unseen_.empty() && seen_.empty()) return nullptr;
  if (seen_.empty()) return TakeFirst(unseen_);
  if (unseen_.empty()) return TakeFirst(seen_);
  return TakeFirst((*unseen_.begin())->ticket < (*seen_.begin())->ticket ? unseen_ : seen_);
}

FailureRecord* Unreported::TakeLeastWanted() { return TakeFirst(seen_.empty() ? unseen_ : seen_); }

}  // namespace heddle::engine
