// A worker of a job that does what a test says:
//
//   worker_program train ROUNDS    pushes and pulls two keys in rounds, with an optimizer
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>
#include <heddle/optimizer.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>

namespace {

void Train(int rounds) {
  const std::unique_ptr<heddle::KVStore> store = heddle::KVStore::Create("dist_sync");
  store->SetOptimizer(heddle::Sgd({.learning_rate = 0.5f}));
  const heddle::NDArray weight = heddle::NDArray::Zeros({1000});
  const heddle::NDArray bias = heddle::NDArray::Zeros({10});
  store->Init("weight", weight);
  store->Init("bias", bias);
  for (int round = 0; round < rounds; ++round) {
    store->Push("weight", heddle::NDArray::Full({1000}, 1));
    store->Push("bias", heddle::NDArray::Full({10}, 1));
    store->Pull("weight", weight);
    store->Pull("bias", bias);
    weight.WaitToRead();
    bias.WaitToRead();
  }
  store->Barrier();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  try {
    if (mode == "train" && argc == 3) {
      Train(std::atoi(argv[2]));
      return 0;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "worker_program: %s\n", error.what());
    return 1;
  }
  std::fprintf(stderr, "usage: worker_program train ROUNDS\n");
  return 2;
}
