// The stream that a kernel is launched on, without CUDA's headers.
#pragma once

struct CUstream_st;

namespace heddle::ops::cuda {

using Stream = CUstream_st*;  // a cudaStream_t; its device is the current one

}  // namespace heddle::ops::cuda
