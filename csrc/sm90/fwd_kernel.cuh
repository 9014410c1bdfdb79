// The Hopper forward: a persistent CTA of one producer warpgroup, of which one thread issues all TMA loads,
// and one to four consumer warpgroups, each with 64 query rows of a tile. Registers move from the first to
// the others by setmaxnreg.
#pragma once

#include "fwd_args.cuh"
#include "fwd_epilogue.cuh"
#include "fwd_mainloop.cuh"
#include "fwd_scheduler.cuh"
#include "fwd_traits.cuh"
#include "load_tma.cuh"
#include "warpgroup.cuh"

namespace flash_cute::sm90 {

CUTE_DEVICE TileCoord uniform(TileCoord const volatile& tile) {
  return {uniform(tile.m_block), uniform(tile.head), uniform(tile.head_kv), uniform(tile.batch)};
}

template <class Traits>
CUTE_DEVICE void fwd_consumer(FwdArgs const& args, typename Traits::SharedStorage& smem, int warpgroup) {
  int count = 0;  // of key tiles, of all tiles
  TurnRing<Traits::kWarpgroups, Traits::kTile.ping_pong>::start(warpgroup);
  typename Traits::MmaPV mma;
#pragma unroll 1
  for (int draws = 0;; ++draws) {
    smem.tile_pipeline.wait_full(at_step(draws));
    TileCoord const tile = uniform(smem.tile[draws & 1]);
    if (tile.m_block < 0) break;
    PipelineState<1> const q_state{0, draws & 1};
    OnlineSoftmax<2> softmax(args.params.scale_log2);
    auto tOrO = partition_fragment_C(mma, Shape<Int<Traits::kRows>, Int<Traits::kHeadDim>>{});  // (MMA, MMA_M, MMA_D)
    fwd_mainloop<Traits>(args.params, tile.m_block, warpgroup, smem, count, q_state, softmax, tOrO);
    fwd_epilogue<Traits>(args.params, tile, warpgroup, softmax, tOrO);
    // Not step by step in there: that a warp's lanes have one count the compiler would not see.
    count += key_range<typename Traits::Mask, Traits::kBlockM, Traits::kBlockN>(args.params, tile.m_block).end;
    smem.tile_pipeline.release(at_step(draws));
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) fwd_kernel(__grid_constant__ FwdArgs const args) {
  extern __shared__ char smem_bytes[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_bytes);
  int const warpgroup = uniform(threadIdx.x / 128);

  if (threadIdx.x == 0) {
    prefetch_tma_descriptor(&args.q);
    prefetch_tma_descriptor(&args.k);
    prefetch_tma_descriptor(&args.v);
    smem.k_pipeline.init(4 * Traits::kWarpgroups);
    smem.v_pipeline.init(4 * Traits::kWarpgroups);
    for (auto& pipeline : smem.q_pipeline) pipeline.init(4);
    smem.tile_pipeline.init(4 * Traits::kWarpgroups);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // TMA sees the barriers
  }
  __syncthreads();

  if (warpgroup == 0) {
    set_max_registers<Traits::kProducerRegs, false>();
    if (threadIdx.x == 0) fwd_producer<Traits>(args, smem);
  } else {
    set_max_registers<Traits::kConsumerRegs, true>();
    fwd_consumer<Traits>(args, smem, warpgroup - 1);
  }
}

}  // namespace flash_cute::sm90
