// A worker of a distributed job, as a user writes it:
//
//   dist_program TYPE ROUNDS
//
// pushes rank + 1 in each round and prints the last sum.
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: dist_program TYPE ROUNDS\n");
    return 2;
  }
  try {
    const std::unique_ptr<heddle::KVStore> store = heddle::KVStore::Create(argv[1]);
    const heddle::NDArray value = heddle::NDArray::Zeros({3});
    store->Init("sum", value);
    for (int round = std::atoi(argv[2]); round > 0; --round) {
      store->PushPull("sum", heddle::NDArray::Full({3}, store->rank() + 1), value);
    }
    std::printf("rank %d of %d has %g\n", store->rank(), store->num_workers(),
                value.ToVector<float>().front());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "dist_program: %s\n", error.what());
    return 1;
  }
  return 0;
}
