// Launches a plan. Included only by the generated instance files.
#pragma once

#include <cuda_runtime.h>

#include "core/element.cuh"
#include "kernel.cuh"
#include "sm90/common/launch.cuh"
#include "sm90/decode/common/cache_map.cuh"
#include "sm90/decode/long_rows/launch.cuh"

namespace flash_cute::sm90::decode::split_keys {

using flash_cute::split_keys::Float8;

template <class Traits>
cudaError_t launch_decode(DecodePlan const& plan, DecodeParams const& params, cudaStream_t stream) {
  using Cache = typename Traits::Cache;
  KernelArgs args;
  args.params = params;
  args.box_rows = box_rows(params, Traits::kTileKeys);
  args.copies_rows = params.table.entries != nullptr && args.box_rows < kLeastBoxRows;
  args.boxes = Traits::kTileKeys / args.box_rows;
  args.chunk_step = std::max(1, 32 / int(args.boxes));
  cudaError_t error = encode_cache<Cache>(&args.k, params.k, params.k_strides, params, params.heads_kv,
                                          params.head_dim, {.rows = args.box_rows, .columns = Traits::kChunkK});
  if (error != cudaSuccess) return error;
  error = encode_cache<Cache>(&args.v, params.v, params.v_strides, params, params.heads_kv, params.head_dim_v,
                              {.rows = args.box_rows, .columns = Traits::kChunkV});
  if (error != cudaSuccess) return error;
  constexpr int kSmemBytes = Traits::kSmemBytes;
  error = cudaFuncSetAttribute(decode_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error != cudaSuccess) return error;
  Launch const shape{.ctas = plan.ctas, .threads = kThreads, .smem_bytes = kSmemBytes};
  return launch(decode_kernel<Traits>, shape, args, stream);
}

template <class Traits>
cudaError_t launch_kernels(DecodePlan const& plan, DecodeParams const& params, cudaStream_t stream) {
  if (plan.ctas > 0) {
    cudaError_t const error = launch_decode<Traits>(plan, params, stream);
    if (error != cudaSuccess) return error;
  }
  int64_t const merges = flash_cute::split_keys::merge_ctas(params);
  if (merges == 0) return cudaSuccess;
  int const threads = 32 * flash_cute::split_keys::kMergeWarps;
  return launch(merge_kernel<Traits>, {.ctas = merges, .threads = threads, .smem_bytes = 0, .early = true}, params,
                stream);
}

template <int kHeadDim, int kHeadDimV>
cudaError_t launch(DecodePlan const& plan, DecodeParams const& params, cudaStream_t stream) {
  return with_element(plan.dtype, [&]<class Element>(Element) {
    cudaError_t error = plan.float8_cache
                            ? launch_kernels<Traits<Element, kHeadDim, kHeadDimV, Float8>>(plan, params, stream)
                            : launch_kernels<Traits<Element, kHeadDim, kHeadDimV>>(plan, params, stream);
    if constexpr (long_rows::has_kernel(kHeadDim, kHeadDimV)) {
      bool const launches = error == cudaSuccess && plan.long_ctas > 0;
      if (launches) error = long_rows::launch<Element, kHeadDim>(plan, params, stream);
    }
    return error;
  });
}

}  // namespace flash_cute::sm90::decode::split_keys
