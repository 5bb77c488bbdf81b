// A worker of a job that does what a test says:
//
//   worker_program train ROUNDS        pushes and pulls two keys in rounds, with an optimizer
//   worker_program forever             pushes and pulls; says "started" after the first round
//   worker_program survive END STATUS  the last rank ends after a round as END says, while the
//                                      others go on until their calls fail, and print why; or for
//                                      100 rounds, if END is "return" and STATUS no failure
//
// END: "exit" calls std::exit with a store that lives, "static" too, but the store is a static
// variable; "return" drops the store, then returns from main; "throw" lets an exception leave main,
// "throw-in-thread" a thread's function; "throw-to-handler" ends in a terminate handler of its own
// that exits with STATUS; "terminate" calls std::terminate; "throw-and-catch" catches the exception
// where the store is gone, and returns from main.
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>
#include <heddle/optimizer.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

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

void PushPull(heddle::KVStore& store) {
  const heddle::NDArray value = heddle::NDArray::Zeros({3});
  store.PushPull("sum", heddle::NDArray::Full({3}, 1), value);
  value.WaitToRead();
}

[[noreturn]] void PushPullForever() {
  const std::unique_ptr<heddle::KVStore> store = heddle::KVStore::Create("dist_sync");
  store->Init("sum", heddle::NDArray::Zeros({3}));
  PushPull(*store);
  std::puts("started");
  std::fflush(stdout);
  for (;;) PushPull(*store);
}

int exit_status = 0;

// With the last store, which goes before who catches sees the exception.
[[noreturn]] void ThrowAs(const std::string& end, std::unique_ptr<heddle::KVStore> /*store*/) {
  if (end == "terminate") std::terminate();
  if (end == "throw-in-thread") {
    std::thread([] { throw std::runtime_error("out of luck"); }).join();
  }
  throw std::runtime_error("out of luck");
}

// Returns the status for main, if it comes to that.
int Survive(const std::string& end, int status) {
  static std::unique_ptr<heddle::KVStore> of_process;
  exit_status = status;
  if (end == "throw-to-handler") std::set_terminate([] { std::_Exit(exit_status); });
  std::unique_ptr<heddle::KVStore> store = heddle::KVStore::Create("dist_sync");
  store->Init("sum", heddle::NDArray::Zeros({3}));
  if (store->rank() == store->num_workers() - 1) {
    PushPull(*store);
    if (end == "static") of_process = std::move(store);
    if (end == "exit" || end == "static") std::exit(status);  // NOLINT(concurrency-mt-unsafe)
    if (end == "throw-and-catch") {
      try {
        ThrowAs(end, std::move(store));
      } catch (const std::exception&) {
        return status;
      }
    }
    if (end.starts_with("throw") || end == "terminate") ThrowAs(end, std::move(store));
    store.reset();
    return status;
  }
  try {
    const bool nobody_fails = end == "return" && status % 256 == 0;
    for (int round = 0; !nobody_fails || round < 100; ++round) PushPull(*store);
  } catch (const std::exception& error) {
    std::printf("worker %d: %s\n", store->rank(), error.what());
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "train" && argc == 3) {
    Train(std::atoi(argv[2]));
    return 0;
  }
  if (mode == "forever") PushPullForever();
  if (mode == "survive" && argc == 4) return Survive(argv[2], std::atoi(argv[3]));
  std::fprintf(stderr, "usage: worker_program train ROUNDS | forever | survive END STATUS\n");
  return 2;
}
