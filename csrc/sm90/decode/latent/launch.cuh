// Launches a plan. Included only by the generated instance files.
#pragma once

#include <cuda_runtime.h>

#include "core/element.cuh"
#include "kernel.cuh"
#include "sm90/common/launch.cuh"
#include "sm90/decode/common/cache_map.cuh"
#include "sm90/decode/common/small_pages.h"

namespace flash_cute::sm90::decode::latent {

template <class Traits, class Loader>
cudaError_t launch_decode(int64_t ctas, DecodeParams const& params, int shares, cudaStream_t stream) {
  KernelArgs args{};
  args.params = params;
  args.shares = shares;
  if constexpr (Loader::kByTma) {
    args.box_rows = box_rows(params, kTileKeys);
    args.boxes = kTileKeys / args.box_rows;
    cudaError_t const error = encode_cache<typename Traits::Element>(
        &args.k, params.k, params.k_strides, params, params.heads_kv / shares, params.head_dim,
        {.rows = args.box_rows, .columns = kChunk});
    if (error != cudaSuccess) return error;
  }
  auto* const kernel = decode_kernel<Traits, Loader>;
  cudaError_t const error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error != cudaSuccess) return error;
  return launch(kernel, {.ctas = ctas, .threads = kThreads, .smem_bytes = kSmemBytes}, args, stream);
}

template <class Traits>
cudaError_t launch_kernels(DecodePlan const& plan, DecodeParams const& call, cudaStream_t stream) {
  DecodeParams const params = share_heads(call);
  if (plan.ctas > 0) {
    int const shares = head_shares(call.group);
    bool const copies = copies_rows(params.table.entries != nullptr, params.table.page_size);
    cudaError_t const error = copies ? launch_decode<Traits, RowCopier<Traits>>(plan.ctas, params, shares, stream)
                                     : launch_decode<Traits, BoxLoader<Traits>>(plan.ctas, params, shares, stream);
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
