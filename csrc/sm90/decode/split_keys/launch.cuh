// Launches a plan. Included only by the generated instance files.
#pragma once

#include <cuda_runtime.h>

#include "core/element.cuh"
#include "kernel.cuh"
#include "sm90/common/launch.cuh"
#include "sm90/common/tensor_map.cuh"

namespace flash_cute::sm90::decode::split_keys {

using flash_cute::split_keys::Float8;

// The rows of a TMA box: the largest power of two, up to the tile, that divides the page. A contiguous cache is one
// page a sequence, in which tiles begin at multiples of their size.
inline int box_rows(DecodeParams const& params, int tile_keys) {
  int rows = tile_keys;
  while (params.table.entries != nullptr && params.table.page_size % rows != 0) rows /= 2;
  return rows;
}

// A cache without rows is never read: then the map is of something that there is.
template <class Cache>
cudaError_t encode_cache(CUtensorMap* map, void const* data, CacheStrides const& strides, DecodeParams const& params,
                         int head_dim, Box box) {
  PageTable const& table = params.table;
  int const page_size = std::max(1, table.page_size), pages = std::max(1, table.pages);
  return encode_map<Cache, 4>(
      map, table.capacity > 0 && table.pages > 0 ? data : params.q,
      {uint64_t(head_dim), uint64_t(page_size), uint64_t(params.heads_kv), uint64_t(pages)},
      {pitch<Cache>(page_size, strides.row), pitch<Cache>(params.heads_kv, strides.head),
       pitch<Cache>(pages, strides.page)},
      box, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

template <class Traits>
cudaError_t launch_decode(DecodePlan const& plan, DecodeParams const& params, cudaStream_t stream) {
  using Cache = typename Traits::Cache;
  KernelArgs args;
  args.params = params;
  args.box_rows = box_rows(params, Traits::kTileKeys);
  cudaError_t error = encode_cache<Cache>(&args.k, params.k, params.k_strides, params, params.head_dim,
                                          {.rows = args.box_rows, .columns = Traits::kChunkK});
  if (error != cudaSuccess) return error;
  error = encode_cache<Cache>(&args.v, params.v, params.v_strides, params, params.head_dim_v,
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
    if constexpr (reads_float8(kHeadDim, kHeadDimV)) {
      if (plan.float8_cache) {
        return launch_kernels<Traits<Element, kHeadDim, kHeadDimV, Float8>>(plan, params, stream);
      }
    }
    return launch_kernels<Traits<Element, kHeadDim, kHeadDimV>>(plan, params, stream);
  });
}

}  // namespace flash_cute::sm90::decode::split_keys
