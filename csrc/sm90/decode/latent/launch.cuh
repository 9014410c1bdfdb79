// Launches a plan. Included only by the generated instance files.
#pragma once

#include <cuda_runtime.h>

#include "core/element.cuh"
#include "kernel.cuh"
#include "sm90/common/launch.cuh"
#include "sm90/decode/common/cache_map.cuh"

namespace flash_cute::sm90::decode::latent {

template <class Traits>
cudaError_t launch_decode(DecodePlan const& plan, DecodeParams const& params, int shares, cudaStream_t stream) {
  KernelArgs args;
  args.params = params;
  args.shares = shares;
  args.box_rows = box_rows(params, kTileKeys);
  args.boxes = kTileKeys / args.box_rows;
  cudaError_t error = encode_cache<typename Traits::Element>(&args.k, params.k, params.k_strides, params,
                                                             params.heads_kv / shares, params.head_dim,
                                                             {.rows = args.box_rows, .columns = kChunk});
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(decode_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error != cudaSuccess) return error;
  return launch(decode_kernel<Traits>, {.ctas = plan.ctas, .threads = kThreads, .smem_bytes = kSmemBytes}, args,
                stream);
}

template <class Traits>
cudaError_t launch_kernels(DecodePlan const& plan, DecodeParams const& call, cudaStream_t stream) {
  DecodeParams const params = share_heads(call);
  if (plan.ctas > 0) {
    cudaError_t const error = launch_decode<Traits>(plan, params, head_shares(call.group), stream);
    if (error != cudaSuccess) return error;
  }
  int64_t const merges = kMergeShares * flash_cute::split_keys::merge_ctas(params);
  if (merges == 0) return cudaSuccess;
  return launch(merge_kernel<Traits>, {.ctas = merges, .threads = kMergeThreads, .smem_bytes = 0, .early = true},
                params, stream);
}

template <int kHeadDim, int kHeadDimV>
cudaError_t launch(DecodePlan const& plan, DecodeParams const& params, cudaStream_t stream) {
  return with_element(plan.dtype, [&]<class Element>(Element) {
    return launch_kernels<Traits<Element, kHeadDim, kHeadDimV>>(plan, params, stream);
  });
}

}  // namespace flash_cute::sm90::decode::latent
