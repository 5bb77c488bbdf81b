#include "ops/cuda/launch.cuh"
#include "ops/cuda/math.h"
#include "ops/cuda/product_plan.h"

namespace heddle::ops::cuda {

namespace {

template <class Body>
__global__ void __launch_bounds__(kBlockThreads) RunProduct(const __grid_constant__ Body body) {
  __shared__ typename Body::Slice slice;
  const typename Body::Tile tile = body.TileOf(blockIdx.x);
  typename Body::Sums sums;
  for (std::uint64_t begin = tile.begin; begin < tile.end; begin += kTileDepth) {
    body.Load(tile, begin, threadIdx.x, slice);
    __syncthreads();
    body.Add(tile, begin, threadIdx.x, slice, sums);
    __syncthreads();
  }
  body.Store(tile, threadIdx.x, sums);
}

}  // namespace

void MatrixProduct(DType dtype, const void* a, const void* b, std::size_t rows, std::size_t inner,
                   std::size_t columns, void* out, void* scratch, Stream stream) {
  const auto launch_tiles = [&](const auto& body, std::size_t blocks) {
    RunProduct<<<static_cast<unsigned>(blocks), kBlockThreads, 0, stream>>>(body);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) ThrowCudaError(error, "matrix product");
  };
  PlanMatrixProduct(dtype, a, b, rows, inner, columns, out, scratch, launch_tiles,
                    [&](const auto& table) { LaunchTable("matrix product", table, stream); });
}

}  // namespace heddle::ops::cuda
