// Code that kernels run on the GPU and tests run on the CPU.
//
// What a thread of a kernel does is written as a function of its block and its number, without
// anything that only a GPU has: tests call it for all blocks and threads, and compare the outcome
// with the kernels of ops/.
#pragma once

#ifdef __CUDACC__
#define HEDDLE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define HEDDLE_HOST_DEVICE inline __attribute__((always_inline))
#endif

// Before a loop that the GPU's compiler unrolls, so that its arrays become registers.
#ifdef __CUDA_ARCH__
#define HEDDLE_UNROLL _Pragma("unroll")
#else
#define HEDDLE_UNROLL
#endif
