// Attention over a KV cache with large head dims, for every chip from Ampere on: persistent CTAs of eight warps. The
// columns of K and V pass through a ring of slabs in shared memory (load.cuh). Of a key tile the warps compute the
// scores of all rows, each over a part of the columns or for a part of the keys (scores.cuh); then each has the softmax
// of some rows (softmax.cuh); then each adds P V for a part of V's columns (values.cuh).
#pragma once

#include <new>

#include "row_tile.cuh"

namespace flash_cute::sm80::decode::streamed {

// The walk over the CTA's units.
CUTE_DEVICE Walk<Cut>& walk_of(Storage& smem) { return reinterpret_cast<Walk<Cut>&>(smem.walk); }

// Not inlined: what these derive from the parameters would be kept in registers across the units. All lanes of a warp
// call the first.
inline __noinline__ __device__ void begin_walk(DecodeParams const& params, Storage& smem) {
  Walk<Cut> const walk(params, int(blockIdx.x) / params.heads_kv, int(blockIdx.x) % params.heads_kv);
  if (threadIdx.x % 32 == 0) new (&walk_of(smem)) Walk<Cut>(walk);
}
inline __noinline__ __device__ bool next_unit(Storage& smem) { return walk_of(smem).next(); }

// `slab_bytes`: of shared memory, for slabs and queries.
template <class Traits>
__global__ void __launch_bounds__(kThreads, 1)
    decode_kernel(__grid_constant__ DecodeParams const params, int const slab_bytes) {
  extern __shared__ __align__(1024) char smem_raw[];
  auto& smem = *reinterpret_cast<Storage*>(smem_raw);
  auto* const slabs = reinterpret_cast<typename Traits::Element*>(smem_raw + kFixedBytes);
  if (threadIdx.x / 32 == 0) begin_walk(params, smem);
#pragma unroll 1
  while (true) {
    if (threadIdx.x == 0) smem.has_unit = next_unit(smem);
    __syncthreads();
    if (!smem.has_unit) break;
    Unit const& unit = walk_of(smem).unit();
    int const of_tile = tile_slabs(params.head_dim, params.head_dim_v, Traits::kHeadDimV);
    auto const stages_of = [&](int rows) { return stages(slab_bytes, rows, params.head_dim, of_tile); };
    if (unit.tile_rows == kFewRows) {
      RowTile<Traits, kFewRows>(params, unit, smem, slabs, stages_of(kFewRows)).run();
    } else if constexpr (Traits::kManyRows != kFewRows) {
      RowTile<Traits, Traits::kManyRows>(params, unit, smem, slabs, stages_of(Traits::kManyRows)).run();
    }
    __syncthreads();  // all warps have read the unit, and shared memory
  }
}

}  // namespace flash_cute::sm80::decode::streamed
