#include "kvstore/optimizer/cuda/gpu_plan.cuh"

HEDDLE_KERNELS_OF(LambNumbers);
HEDDLE_KERNELS_OF(LansNumbers);
HEDDLE_KERNELS_OF(LarsNumbers);
HEDDLE_KERNELS_OF(LbSgdNumbers);
