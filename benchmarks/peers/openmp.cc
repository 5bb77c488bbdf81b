// Peer: OpenMP tasks with `depend` clauses. Built twice: by GCC for libgomp and by Clang for LLVM's
// libomp.

#include <cstddef>
#include <vector>

#include <omp.h>

#include "benchmarks/peers/harness.h"

namespace heddle::bench {
namespace {

#if defined(__clang__)
constexpr char kProgram[] = "libomp";
#else
constexpr char kProgram[] = "libgomp";
#endif

class OpenMpRunner {
 public:
  OpenMpRunner(int workers, bool pusher_included)
      : threads_(pusher_included ? workers : workers + 1) {}

  void Prepare(Workload& workload) { vars_.resize(static_cast<std::size_t>(workload.num_vars())); }

  void Run(Workload& workload) {
#pragma omp parallel num_threads(threads_)
#pragma omp single
    {
      for (int i = 0; i < workload.num_ops(); ++i) Push(&workload, i);
#pragma omp taskwait
    }
  }

  void Finish() {}

 private:
  // The dependencies are the addresses of the variables; nothing is stored in them.
  void Push(Workload* workload, int index) {
    const OpSpec& spec = workload->op(index);
    [[maybe_unused]] char* vars = vars_.data();
    [[maybe_unused]] const int a = spec.vars[0], b = spec.vars[1], c = spec.vars[2],
                               d = spec.vars[3];
    switch (spec.shape) {
      case Shape::kWrite:
#pragma omp task depend(inout : vars[a]) firstprivate(workload, index)
        workload->RunBody(index);
        break;
      case Shape::kRead:
#pragma omp task depend(in : vars[a]) firstprivate(workload, index)
        workload->RunBody(index);
        break;
      case Shape::kRead2Write:
#pragma omp task depend(in : vars[a], vars[b]) depend(inout : vars[c]) firstprivate(workload, index)
        workload->RunBody(index);
        break;
      case Shape::kRead3Write:
#pragma omp task depend(in                                             \
                        : vars[a], vars[b], vars[c]) depend(inout      \
                                                            : vars[d]) \
    firstprivate(workload, index)
        workload->RunBody(index);
        break;
    }
  }

  const int threads_;
  std::vector<char> vars_;
};

}  // namespace
}  // namespace heddle::bench

int main(int argc, char** argv) {
  return heddle::bench::HarnessMain<heddle::bench::OpenMpRunner>(heddle::bench::kProgram, argc,
                                                                 argv);
}
