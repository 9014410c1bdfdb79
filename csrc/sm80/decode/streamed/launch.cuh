// Launches a plan. Included only by the generated instance files.
#pragma once

#include <cuda_runtime.h>

#include "core/element.cuh"
#include "kernel.cuh"

namespace flash_cute::sm80::decode::streamed {

template <class Traits>
cudaError_t launch_kernels(DecodePlan const& plan, DecodeParams const& params, cudaStream_t stream) {
  if (plan.ctas > 0) {
    int const bytes = plan.shape.smem_bytes;
    cudaError_t error =
        cudaFuncSetAttribute(decode_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    decode_kernel<Traits><<<unsigned(plan.ctas), kThreads, bytes, stream>>>(params, bytes - kFixedBytes);
    error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  int64_t const merges = flash_cute::split_keys::merge_ctas(params);
  if (merges == 0) return cudaSuccess;
  merge_kernel<Traits><<<unsigned(merges), 32 * flash_cute::split_keys::kMergeWarps, 0, stream>>>(params);
  return cudaGetLastError();
}

template <int kHeadDim, int kHeadDimV>
cudaError_t launch(DecodePlan const& plan, DecodeParams const& params, cudaStream_t stream) {
  return with_element(plan.dtype, [&]<class Element>(Element) {
    return launch_kernels<Traits<Element, kHeadDim, kHeadDimV>>(plan, params, stream);
  });
}

}  // namespace flash_cute::sm80::decode::streamed
