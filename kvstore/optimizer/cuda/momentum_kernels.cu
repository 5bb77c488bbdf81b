#include "kvstore/optimizer/cuda/gpu_plan.cuh"

HEDDLE_KERNELS_OF(DcaSgdNumbers);
HEDDLE_KERNELS_OF(NagNumbers);
HEDDLE_KERNELS_OF(SgdNumbers);
HEDDLE_KERNELS_OF(SignumNumbers);
HEDDLE_KERNELS_OF(TestNumbers);
