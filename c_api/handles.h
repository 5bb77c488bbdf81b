// Handles of each kind and what they stand for.
#pragma once

#include <heddle/c_api.h>
#include <heddle/completion.h>
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>
#include <heddle/optimizer.h>
#include <heddle/row_sparse.h>
#include <heddle/var.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <variant>

#include "c_api/handle_table.h"

namespace heddle::c_api {

using AnyArray = std::variant<NDArray, RowSparseNDArray>;

template <class Handle>
struct HandleKind;
template <>
struct HandleKind<HeddleArray> {
  using Object = AnyArray;
  static constexpr const char* kName = "an array";
};
template <>
struct HandleKind<HeddleVar> {
  using Object = Var;
  static constexpr const char* kName = "a variable";
};
template <>
struct HandleKind<HeddleKVStore> {
  using Object = std::shared_ptr<KVStore>;  // shared by the calls that use it
  static constexpr const char* kName = "a store";
};
template <>
struct HandleKind<HeddleOptimizer> {
  using Object = OptimizerPtr;
  static constexpr const char* kName = "an optimizer";
};
template <>
struct HandleKind<HeddleCompletion> {
  using Object = Completion;
  static constexpr const char* kName = "a completion that was not called";
};

template <class Handle>
using ObjectOf = typename HandleKind<Handle>::Object;

// The one table of a kind; never destroyed, since threads may outlive main.
template <class Handle>
HandleTable<ObjectOf<Handle>>& TableOf();
template <>
HandleTable<AnyArray>& TableOf<HeddleArray>();
template <>
HandleTable<Var>& TableOf<HeddleVar>();
template <>
HandleTable<std::shared_ptr<KVStore>>& TableOf<HeddleKVStore>();
template <>
HandleTable<OptimizerPtr>& TableOf<HeddleOptimizer>();
template <>
HandleTable<Completion>& TableOf<HeddleCompletion>();

// C knows handles as pointers, so that its compiler tells their kinds apart. They point nowhere.
static_assert(sizeof(void*) == sizeof(std::uint64_t));
template <class Handle>
Handle NewHandle(ObjectOf<Handle> object) {
  return reinterpret_cast<Handle>(TableOf<Handle>().Insert(std::move(object)));
}
template <class Handle>
std::uint64_t NumberOf(Handle handle) {
  return reinterpret_cast<std::uint64_t>(handle);
}

// A handle that lasts for a scope, for the arguments of callbacks.
template <class Handle>
class ScopedHandle {
 public:
  explicit ScopedHandle(ObjectOf<Handle> object) : handle_(NewHandle<Handle>(std::move(object))) {}
  ~ScopedHandle() { TableOf<Handle>().Take(NumberOf(handle_)); }
  ScopedHandle(const ScopedHandle&) = delete;
  ScopedHandle& operator=(const ScopedHandle&) = delete;

  Handle get() const { return handle_; }

 private:
  Handle handle_;
};

}  // namespace heddle::c_api
