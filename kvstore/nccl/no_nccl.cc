// NCCL in a build without it.
#include <heddle/error.h>

#include "kvstore/nccl/nccl_api.h"

namespace heddle::kvstore {

std::shared_ptr<Nccl> LoadNccl() {
  throw NcclError(
      "heddle was built without NCCL: expected a build with the CMake options WITH_CUDA and "
      "WITH_NCCL, and nccl.h, which comes with CUDA or from PyPI (nvidia-nccl-cu13)",
      0);
}

}  // namespace heddle::kvstore
