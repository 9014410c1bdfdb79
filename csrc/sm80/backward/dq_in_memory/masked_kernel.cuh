// The portable backward with a mask, of plain or of modified scores. A CTA owns a key tile, as in kernel.cuh, and
// visits the row tiles that the tile's list names, by the steps of sequence_mainloop.cuh.
#pragma once

#include "contract/plan.h"
#include "epilogue.cuh"
#include "masked_step.cuh"
#include "masked_traits.cuh"
#include "sequence_mainloop.cuh"

namespace flash_cute::sm80::backward::dq_in_memory {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.ctas_per_sm)
    bwd_masked_kernel(__grid_constant__ BwdParams const params) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_raw);
  MaskedTask const& task = smem.task;
  find_task<Traits>(params, smem.task);

  typename Traits::MmaKeys mma;
  using Tile = Shape<Int<Traits::kBlockN>, Int<Traits::kHeadDim>>;
  auto tdKrdK = partition_fragment_C(mma, Tile{});  // (MMA, MMA_N, MMA_D)
  auto tdVrdV = partition_fragment_C(mma, Tile{});  // (MMA, MMA_N, MMA_D)
  clear(tdKrdK);
  clear(tdVrdV);
  if (task.last_tile >= 0) sequence_mainloop<Traits>(params, smem, tdKrdK, tdVrdV);

  auto const results = [&](void* base, Strides const& strides) {
    return make_head_tensor(static_cast<typename Traits::Element*>(base), strides, task.index, task.head_kv,
                            params.len_k, params.head_dim);
  };
  store_results<Traits>(params, smem, results, task.n_block, tdKrdK, tdVrdV);
}

}  // namespace flash_cute::sm80::backward::dq_in_memory
