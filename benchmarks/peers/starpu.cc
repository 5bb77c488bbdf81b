// Peer: StarPU tasks over data handles. Its pushing thread never runs ops, so `workers` CPU workers
// run them whether or not the pusher is to be included.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include <starpu.h>

#include "benchmarks/peers/harness.h"

namespace heddle::bench {
namespace {

Workload* current = nullptr;  // what the codelets run

void RunOp(void**, void* index) {
  current->RunBody(static_cast<int>(reinterpret_cast<std::intptr_t>(index)));
}

class StarPuRunner {
 public:
  StarPuRunner(int workers, bool) {
    setenv("STARPU_SILENT", "1", 0);
    starpu_conf conf;
    starpu_conf_init(&conf);
    conf.ncpus = workers;
    conf.ncuda = 0;
    conf.nopencl = 0;
    if (const int error = starpu_init(&conf); error != 0) {
      throw std::runtime_error("starpu_init: error " + std::to_string(error));
    }
    for (int shape = 0; shape < 4; ++shape) {
      const OpSpec spec{static_cast<Shape>(shape), {}};
      starpu_codelet& codelet = codelets_[shape];
      starpu_codelet_init(&codelet);
      codelet.cpu_funcs[0] = &RunOp;
      codelet.nbuffers = spec.num_vars();
      for (int i = 0; i < spec.num_vars(); ++i) {
        codelet.modes[i] = i == spec.num_reads() ? STARPU_RW : STARPU_R;
      }
    }
  }
  ~StarPuRunner() { starpu_shutdown(); }
  StarPuRunner(const StarPuRunner&) = delete;
  StarPuRunner& operator=(const StarPuRunner&) = delete;

  void Prepare(Workload& workload) {
    homes_.resize(static_cast<std::size_t>(workload.num_vars()));
    handles_.resize(homes_.size());
    for (std::size_t i = 0; i < homes_.size(); ++i) {
      starpu_variable_data_register(&handles_[i], STARPU_MAIN_RAM,
                                    reinterpret_cast<std::uintptr_t>(&homes_[i]),
                                    sizeof(homes_[i]));
    }
  }

  void Run(Workload& workload) {
    current = &workload;
    for (int i = 0; i < workload.num_ops(); ++i) Push(workload.op(i), i);
    starpu_task_wait_for_all();
  }

  void Finish() {
    for (starpu_data_handle_t handle : handles_) starpu_data_unregister(handle);
    handles_.clear();
  }

 private:
  void Push(const OpSpec& spec, int index) {
    starpu_task* task = starpu_task_create();
    task->cl = &codelets_[static_cast<int>(spec.shape)];
    task->cl_arg = reinterpret_cast<void*>(static_cast<std::intptr_t>(index));
    for (int i = 0; i < spec.num_vars(); ++i) task->handles[i] = handles_[spec.vars[i]];
    if (const int error = starpu_task_submit(task); error != 0) {
      throw std::runtime_error("starpu_task_submit: error " + std::to_string(error));
    }
  }

  starpu_codelet codelets_[4];
  std::vector<std::uint64_t> homes_;
  std::vector<starpu_data_handle_t> handles_;
};

}  // namespace
}  // namespace heddle::bench

int main(int argc, char** argv) {
  return heddle::bench::HarnessMain<heddle::bench::StarPuRunner>("starpu", argc, argv);
}
