// The Hopper backward: a CTA owns a tile of keys and their dK and dV, and passes over the row tiles of all query
// heads that read them. Two consumer warpgroups, each with 64 of the keys; in a third warpgroup one thread issues all
// loads, and two add dQ to memory.
#pragma once

#include "bwd_args.cuh"
#include "bwd_epilogue.cuh"
#include "bwd_load.cuh"
#include "bwd_mainloop.cuh"
#include "bwd_traits.cuh"
#include "warpgroup.cuh"

namespace flash_cute::sm90 {

template <class Traits>
CUTE_DEVICE void bwd_consumer(BwdArgs const& args, typename Traits::SharedStorage& smem) {
  KeyTile const tile(args);
  RowRange const range = row_range<typename Traits::Mask, Traits::kBlockM, Traits::kBlockN>(args.params, tile.n_block);
  typename Traits::MmaKeys mma;
  using Tile = Shape<Int<Traits::kBlockN>, Int<Traits::kHeadDim>>;
  auto tdKrdK = partition_fragment_C(mma, Tile{});  // (MMA, MMA_N, MMA_D)
  auto tdVrdV = partition_fragment_C(mma, Tile{});  // (MMA, MMA_N, MMA_D)
  bwd_mainloop<Traits>(args, range, smem, tdKrdK, tdVrdV);
  bwd_epilogue<Traits>(args, smem, tdKrdK, tdVrdV);
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) bwd_kernel(__grid_constant__ BwdArgs const args) {
  extern __shared__ char smem_bytes[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_bytes);
  int const warpgroup = __shfl_sync(0xffffffff, int(threadIdx.x) / 128, 0);  // uniform, and known to be

  if (threadIdx.x == 0) {
    prefetch_tma_descriptor(&args.q);
    prefetch_tma_descriptor(&args.dout);
    prefetch_tma_descriptor(&args.k);
    prefetch_tma_descriptor(&args.v);
    smem.k_pipeline.init(4 * Traits::kWarpgroups);
    smem.v_pipeline.init(4 * Traits::kWarpgroups);
    smem.q_pipeline.init(4 * Traits::kWarpgroups);
    smem.dout_pipeline.init(4 * Traits::kWarpgroups);
    smem.ds_pipeline.init(4 * Traits::kWarpgroups, 4 * Traits::kWarpgroups);
    for (auto& pipeline : smem.dq_pipeline) pipeline.init(1, 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // TMA sees the barriers
  }
  __syncthreads();

  if (warpgroup == 0) {
    set_max_registers<Traits::kProducerRegs, false>();
    int const warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) {
      if (warp == 0) {
        bwd_producer<Traits>(args, smem);
      } else if (warp <= 2) {
        add_dq<Traits>(args, smem, warp - 1);
      }
    }
  } else {
    set_max_registers<Traits::kConsumerRegs, true>();
    bwd_consumer<Traits>(args, smem);
  }
}

}  // namespace flash_cute::sm90
