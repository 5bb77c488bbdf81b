#include "kvstore/optimizer/cuda/gpu_plan.cuh"

HEDDLE_KERNELS_OF(AdaDeltaNumbers);
HEDDLE_KERNELS_OF(AdaGradNumbers);
HEDDLE_KERNELS_OF(FtmlNumbers);
HEDDLE_KERNELS_OF(FtrlNumbers);
HEDDLE_KERNELS_OF(GroupAdaGradNumbers);
HEDDLE_KERNELS_OF(RmsPropNumbers);
HEDDLE_KERNELS_OF(SgldNumbers);
