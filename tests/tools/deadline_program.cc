// A worker whose server stands still while a push is on its way:
//
//   deadline_program SERVER_PID
//
// It stops the server, pushes 16 MiB, and when the deadline is reported it makes the array's memory
// inaccessible: whoever still read it would fail. Then the server goes on, and so must the job.
#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>

#include <sys/mman.h>

namespace {

constexpr std::int64_t kElements = 4 << 20;

void Run(pid_t server) {
  const std::unique_ptr<heddle::KVStore> store = heddle::KVStore::Create("dist_sync");
  const heddle::NDArray big = heddle::NDArray::Zeros({kElements});
  const heddle::NDArray small = heddle::NDArray::Zeros({3});
  store->Init("big", big);
  store->Init("small", small);

  constexpr std::size_t kBytes = kElements * sizeof(float);
  void* const memory =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const heddle::NDArray lent = heddle::NDArray::FromForeign(
      memory, {kElements}, heddle::DType::kFloat32, [=] { munmap(memory, kBytes); });
  kill(server, SIGSTOP);
  store->Push("big", lent);
  try {
    lent.engine().WaitForAll();
    std::printf("the push has ended well\n");
  } catch (const heddle::TimeoutError& error) {
    mprotect(memory, kBytes, PROT_NONE);
    std::printf("%s\n", error.what());
  }
  kill(server, SIGCONT);

  store->PushPull("small", heddle::NDArray::Full({3}, 7), small);
  std::printf("small has %g\n", small.ToVector<float>().front());
  try {
    store->Pull("big", big);
    big.WaitToRead();
    std::printf("the round has ended well\n");
  } catch (const heddle::Error& error) {
    std::printf("round: %s\n", error.what());
  }
  store->PushPull("big", heddle::NDArray::Full({kElements}, 3), big);
  big.WaitToRead();
  double sum = 0;
  for (const float element : big.ToVector<float>()) sum += element;
  std::printf("big has %g\n", sum / kElements);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: deadline_program SERVER_PID\n");
    return 2;
  }
  try {
    Run(static_cast<pid_t>(std::atoi(argv[1])));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "deadline_program: %s\n", error.what());
    return 1;
  }
  return 0;
}
