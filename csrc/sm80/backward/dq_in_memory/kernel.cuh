// The portable backward: a CTA owns a key tile with its dK and dV, and loops over the row tiles of all query heads that
// read it. All warps load and all compute; mma.sync, cp.async, ldmatrix.
#pragma once

#include "contract/plan.h"
#include "epilogue.cuh"
#include "mainloop.cuh"
#include "traits.cuh"

namespace flash_cute::sm80::backward::dq_in_memory {

template <class Traits, bool kDeterministic>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.ctas_per_sm)
    bwd_kernel(__grid_constant__ BwdParams const params) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_raw);

  typename Traits::MmaKeys mma;
  using Tile = Shape<Int<Traits::kBlockN>, Int<Traits::kHeadDim>>;
  auto tdKrdK = partition_fragment_C(mma, Tile{});  // (MMA, MMA_N, MMA_D)
  auto tdVrdV = partition_fragment_C(mma, Tile{});  // (MMA, MMA_N, MMA_D)
  clear(tdKrdK);
  clear(tdVrdV);
  mainloop<Traits, kDeterministic>(params, smem, tdKrdK, tdVrdV);
  epilogue<Traits, kDeterministic>(params, smem, tdKrdK, tdVrdV);
}

}  // namespace flash_cute::sm80::backward::dq_in_memory
