// How long two workers of one host take to sum 64 MiB at one server, through shared memory. Prints
// one JSON object, {"sum": median microseconds}.
//
//   host_sum [--quick]
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "base/check.h"
#include "benchmarks/dist/job.h"
#include "benchmarks/dist/processes.h"
#include "benchmarks/dist/turns.h"
#include "benchmarks/support/bars.h"

int main(int argc, char** argv) {
  using namespace heddle::bench_dist;  // NOLINT(google-build-using-namespace)
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  constexpr std::size_t kBytes = std::size_t{64} << 20;
  const Job job({.workers = 2, .servers = 1, .shared_memory = true});
  const auto sum_of = [&job](int rank) -> std::function<void()> {
    const std::shared_ptr<Worker> worker = job.Join();
    const heddle::NDArray value = worker->Array(kBytes, rank + 1);
    const heddle::NDArray out = worker->Array(kBytes);
    worker->store().Init("sum", out);
    return [worker, value, out] {
      worker->store().PushPull("sum", value, out);
      out.WaitToRead();
      CHECK(out.data<float>()[kBytes / sizeof(float) - 1] == 3);
    };
  };
  const Partner partner([&sum_of] { return Partner::Tasks{sum_of(1)}; });
  const std::function<void()> own = sum_of(0);
  std::vector<Contender> contenders = {{.name = "sum", .operation = [&] {
                                          partner.Start(0);
                                          own();
                                          partner.Finish();
                                        }}};
  TakeTurns(contenders, {.rounds = quick ? 3 : 19, .operations = 1});
  std::printf("{\"sum\": %.1f}\n", heddle::bench::Median(contenders[0].figures));
}
