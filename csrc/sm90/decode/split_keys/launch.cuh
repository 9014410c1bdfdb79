// Launches a plan. Included only by the generated instance files.
#pragma once

#include <cuda_runtime.h>

#include "core/element.cuh"
#include "kernel.cuh"
#include "sm90/common/launch.cuh"
#include "sm90/decode/common/cache_map.cuh"
#include "sm90/decode/common/small_pages.h"
#include "sm90/decode/long_rows/launch.cuh"

namespace flash_cute::sm90::decode::split_keys {

using flash_cute::split_keys::Float8;

template <class Traits>
cudaError_t prepare_boxes(KernelArgs& args) {
  using Cache = typename Traits::Cache;
  DecodeParams const& params = args.params;
  args.box_rows = box_rows(params, Traits::kTileKeys);
  args.boxes = Traits::kTileKeys / args.box_rows;
  args.chunk_step = std::max(1, 32 / int(args.boxes));
  cudaError_t const error = encode_cache<Cache>(&args.k, params.k, params.k_strides, params, params.heads_kv,
                                                params.head_dim, {.rows = args.box_rows, .columns = Traits::kChunkK});
  if (error != cudaSuccess) return error;
  return encode_cache<Cache>(&args.v, params.v, params.v_strides, params, params.heads_kv, params.head_dim_v,
                             {.rows = args.box_rows, .columns = Traits::kChunkV});
}

template <class Traits, class Loader>
cudaError_t launch_decode(int64_t ctas, DecodeParams const& params, cudaStream_t stream) {
  KernelArgs args{};
  args.params = params;
  if constexpr (Loader::kByTma) {
    cudaError_t const error = prepare_boxes<Traits>(args);
    if (error != cudaSuccess) return error;
  }
  auto* const kernel = decode_kernel<Traits, Loader>;
  constexpr int kSmemBytes = Traits::kSmemBytes;
  cudaError_t const error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error != cudaSuccess) return error;
  return launch(kernel, {.ctas = ctas, .threads = threads(Loader::kWarps), .smem_bytes = kSmemBytes}, args, stream);
}

template <class Traits>
cudaError_t launch_kernels(DecodePlan const& plan, DecodeParams const& params, cudaStream_t stream) {
  if (plan.ctas > 0) {
    bool const copies = copies_rows(params.table.entries != nullptr, params.table.page_size);
    cudaError_t const error = copies ? launch_decode<Traits, RowCopier<Traits>>(plan.ctas, params, stream)
                                     : launch_decode<Traits, BoxLoader<Traits>>(plan.ctas, params, stream);
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
