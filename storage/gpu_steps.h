// Ops of a GPU which the host has to know something of midway: how many rows they insert.
//
// DESIGN. To everybody else such an op is one asynchronous op of the CPUs, which holds its
// variables to the end. So it begins when all that came before is done, on the devices too, and
// nobody sees the arrays half way. Its body queues a chain of inner ops on a variable of their own:
//
//   First   an op of the GPU, whose last work copies numbers to pinned memory;
//   a look  an op of the CPUs, ready when the GPU is done: so what is issued next is issued with
//           the numbers known. No thread waits for the device;
//   Second  an op of the GPU;
//   the end an op of the CPUs that runs in any case and completes the asynchronous op, with the
//           error of the step that failed, if one did. What comes behind Second does not run then.
#pragma once

#include <heddle/completion.h>
#include <heddle/engine.h>

#include <exception>
#include <memory>
#include <utility>

#include "engine/access_check.h"

namespace heddle::storage {

namespace gpu_steps {

// The arrays are declared by the asynchronous op, for the inner ones.
template <class Work>
struct First {
  std::shared_ptr<Work> work;
  void operator()(GpuStream stream) const {
    const engine::UncheckedScope declared_outside;
    work->First(stream);
  }
};

template <class Work>
struct Second {
  std::shared_ptr<Work> work;
  void operator()(GpuStream stream) const {
    const engine::UncheckedScope declared_outside;
    work->Second(stream);
  }
};

}  // namespace gpu_steps

// `options`: of the op, whose device is the GPU. Work has
//   bool Begin()               in the body of the asynchronous op: false, there is nothing to do;
//   void First(GpuStream)      in the body of an op of the GPU;
//   void Second(GpuStream)     likewise, when what First has issued is done on the device.
// It is touched by nobody else, and lives until the device is done with both. What Begin and the
// steps throw fails the op.
template <class Work>
void PushGpuSteps(Engine& engine, OpOptions options, std::shared_ptr<Work> work) {
  OpOptions inner{.name = options.name, .device = options.device};
  inner.priority = options.priority;
  options.device = Cpu();
  engine.PushAsync(options, [&engine, inner, work = std::move(work)](const Completion& done) {
    if (!work->Begin()) return done();
    const Var steps = engine.NewVar();
    OpOptions on_gpu = inner;
    on_gpu.reads = on_gpu.writes = {steps};
    OpOptions on_cpu = on_gpu;
    on_cpu.device = Cpu();
    std::exception_ptr cut_short;  // the engine is being stopped, say
    try {
      engine.PushGpu(on_gpu, gpu_steps::First<Work>{work});
      engine.Push(on_cpu, [] {});  // the look
      engine.PushGpu(on_gpu, gpu_steps::Second<Work>{work});
    } catch (...) {
      cut_short = std::current_exception();
    }
    on_cpu.writes = {};
    on_cpu.run_when_poisoned = true;
    // The steps that were pushed use the arrays until then.
    engine.Push(on_cpu, [&engine, steps, work, done, cut_short]() mutable {
      work = nullptr;  // before anybody is told, as of all ops of GPUs
      const std::exception_ptr error = engine.ErrorOf(steps);
      done(error != nullptr ? error : cut_short);
    });
  });
}

}  // namespace heddle::storage
