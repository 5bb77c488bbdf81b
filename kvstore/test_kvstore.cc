// "teststore": a store that keeps nothing and sums what it gets. The smallest useful type, for
// tests of front ends and as a model for types of one's own (docs/adding_a_store.md).
#include <heddle/kvstore.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "kvstore/checks.h"
#include "kvstore/near_arrays.h"

namespace heddle::kvstore {

namespace {

class TestKVStore final : public KVStore {
 public:
  using KVStore::KVStore;

 protected:
  // Copies the value of each key to its outputs.
  void DoBroadcast(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                   int priority) override {
    for (const KeyArrays& pair : values) CheckOneArray("Broadcast", pair, engine());
    SumInto("Broadcast", values, out, priority);
  }

  // Copies the sum of the values of each key, taken on the device of the first, to its outputs.
  void DoPushPull(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                  int priority) override {
    SumInto("PushPull", values, out, priority);
  }

 private:
  void SumInto(std::string_view call, std::span<const KeyArrays> values,
               std::span<const KeyArrays> out, int priority) const {
    for (std::size_t i = 0; i < values.size(); ++i) {
      CheckArrays(call, values[i], engine());
      CheckArrays(call, out[i], engine());
      CheckDense(call, values[i]);
      CheckDense(call, out[i]);
      const NDArray& first = values[i].arrays[0];
      for (const NDArray& array : values[i].arrays) {
        CheckShapeAndDType(call, values[i].key, first, array);
      }
      for (const NDArray& array : out[i].arrays) CheckShape(call, out[i].key, first, array);
    }
    // All inputs are read before an output is written: an output may be the input of a later key.
    std::vector<NDArray> sums;
    for (const KeyArrays& pair : values) {
      const NDArray& first = pair.arrays[0];
      sums.emplace_back(first.shape(), first.dtype(), first.device(), engine());
      Sum(NearInputs(pair.arrays, first.device(), priority).view(), sums.back(), priority);
    }
    for (std::size_t i = 0; i < out.size(); ++i) {
      for (const NDArray& array : out[i].arrays) sums[i].CopyTo(array, priority);
    }
  }
};

}  // namespace

std::unique_ptr<KVStore> MakeTestStore(Engine& engine, const KVStoreOptions&) {
  return std::make_unique<TestKVStore>(engine);
}

}  // namespace heddle::kvstore
