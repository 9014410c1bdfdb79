// Launches a plan: a family's kernel, and behind it the one that folds what several CTAs have of a sequence.
#pragma once

#include <cuda_runtime.h>

#include "contract/decode.h"
#include "core/split_keys/merge.cuh"

namespace flash_cute::sm80::decode {

template <class Traits>
__global__ void __launch_bounds__(32 * flash_cute::split_keys::kMergeWarps, 1)
    merge_kernel(__grid_constant__ DecodeParams const params) {
  int const place = int(blockIdx.x) / params.heads_kv, head_kv = int(blockIdx.x) % params.heads_kv;
  if (place == params.bundles - 1) {
    flash_cute::split_keys::clear_rows_of_no_sequence<typename Traits::Element>(params);
  } else {
    flash_cute::split_keys::Merge<Traits>(params, place + 1, head_kv).run([] {});
  }
}

// `rest`: what the family's kernel takes besides the parameters.
template <class Traits, class... Rest>
cudaError_t launch_plan(void (*kernel)(DecodeParams, Rest...), DecodePlan const& plan, DecodeParams const& params,
                        cudaStream_t stream, Rest... rest) {
  if (plan.ctas > 0) {
    int const bytes = plan.shape.smem_bytes;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    kernel<<<unsigned(plan.ctas), plan.shape.threads, bytes, stream>>>(params, rest...);
    error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  int64_t const merges = flash_cute::split_keys::merge_ctas(params);
  if (merges == 0) return cudaSuccess;
  merge_kernel<Traits><<<unsigned(merges), 32 * flash_cute::split_keys::kMergeWarps, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace flash_cute::sm80::decode
