// When a process has started, or its job has passed its first barrier: prints one JSON object,
// {"at": seconds of the monotonic clock, which all processes of a machine share}.
//
//   first_barrier start     as soon as it runs
//   first_barrier           as a worker of a job, behind its first barrier
#include <heddle/kvstore.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>

int main(int argc, char** argv) {
  std::unique_ptr<heddle::KVStore> store;
  if (argc < 2 || std::strcmp(argv[1], "start") != 0) {
    store = heddle::KVStore::Create("dist_sync");
    store->Barrier();
  }
  const std::chrono::duration<double> at = std::chrono::steady_clock::now().time_since_epoch();
  std::printf("{\"at\": %.6f}\n", at.count());
}
