#include "kvstore/optimizer/cuda/gpu_plan.cuh"

HEDDLE_KERNELS_OF(LambNumbers);
HEDDLE_KERNELS_OF(LansNumbers);
HEDDLE_KERNELS_OF(LarsNumbers);
HEDDLE_KERNELS_OF(LbSgdNumbers);

// The planner's own Flush adds sums of blocks, from files that nvcc does not compile.
template void heddle::kvstore::cuda::UpdateLaunch::operator()(
    const heddle::ops::cuda::Table<heddle::ops::cuda::AddBlocksBody>&) const;
