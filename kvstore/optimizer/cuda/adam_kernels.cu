#include "kvstore/optimizer/cuda/gpu_plan.cuh"

HEDDLE_KERNELS_OF(AdaBeliefNumbers);
HEDDLE_KERNELS_OF(AdamNumbers);
HEDDLE_KERNELS_OF(AdamWNumbers);
HEDDLE_KERNELS_OF(AdamaxNumbers);
HEDDLE_KERNELS_OF(NadamNumbers);
