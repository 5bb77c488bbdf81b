// Tests of GPU ops on each type of engine, on a simulated device that does not dawdle.
#pragma once

#include <heddle/engine.h>

#include <memory>

#include <gtest/gtest.h>

#include "tests/engine/sim_gpu.h"
#include "tests/engine/support.h"

namespace heddle::engine_test {

// The parameter: the type.
class GpuTypesTest : public testing::TestWithParam<const char*> {
 protected:
  GpuTypesTest() { gpu_->set_turns_max(1); }

  EngineOptions Options() {
    EngineOptions options;
    options.type = GetParam();
    options.num_workers = 2;
    options.worker_host = WorkerHost::kThreads;
    options.gpu_driver = gpu_;
    return options;
  }

  std::shared_ptr<SimGpu> gpu_ = std::make_shared<SimGpu>(1, BaseSeed());
};

}  // namespace heddle::engine_test
