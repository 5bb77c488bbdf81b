#include "c_api/handles.h"

namespace heddle::c_api {

template <>
HandleTable<AnyArray>& TableOf<HeddleArray>() {
  static auto* const table = new HandleTable<AnyArray>(1);
  return *table;
}
template <>
HandleTable<Var>& TableOf<HeddleVar>() {
  static auto* const table = new HandleTable<Var>(2);
  return *table;
}
template <>
HandleTable<std::shared_ptr<KVStore>>& TableOf<HeddleKVStore>() {
  static auto* const table = new HandleTable<std::shared_ptr<KVStore>>(3);
  return *table;
}
template <>
HandleTable<OptimizerPtr>& TableOf<HeddleOptimizer>() {
  static auto* const table = new HandleTable<OptimizerPtr>(4);
  return *table;
}
template <>
HandleTable<Completion>& TableOf<HeddleCompletion>() {
  static auto* const table = new HandleTable<Completion>(5);
  return *table;
}

}  // namespace heddle::c_api
