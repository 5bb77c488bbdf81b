// MPI's sum of 64 MiB of float32 over all ranks, on one host through shared memory. Rank 0 prints
// one JSON object, {"sum": median microseconds}.
//
//   mpirun -n 2 peer_mpi [--quick]
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include <mpi.h>

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  constexpr int kCount = 16 << 20;
  const std::vector<float> value(kCount, static_cast<float>(rank + 1));
  std::vector<float> sum(kCount);
  std::vector<double> times;
  for (int round = 0; round < (quick ? 4 : 20); ++round) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = MPI_Wtime();
    MPI_Allreduce(value.data(), sum.data(), kCount, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    const double own = MPI_Wtime() - begin;
    double slowest = 0;
    MPI_Reduce(&own, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    if (round > 0) times.push_back(slowest * 1e6);  // of the first one the pages are new
  }
  std::sort(times.begin(), times.end());
  if (rank == 0) std::printf("{\"sum\": %.1f}\n", times[times.size() / 2]);
  MPI_Finalize();
}
