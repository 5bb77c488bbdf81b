// What processes without a scheduler need to share a store of type "nccl".
#pragma once

#include <string>

namespace heddle {

// The value of HEDDLE_NCCL_ID, for one store of each process: 256 hexadecimal digits. The process
// with HEDDLE_NCCL_RANK 0 calls it, lives on, and hands it to the others, as HEDDLE_NCCL_ID of
// their environment before they create the store. Errors: NcclError.
std::string NewNcclId();

}  // namespace heddle
